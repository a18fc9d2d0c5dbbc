// The list of kernels by instruction set.
#include "experts/cpu/kernels/kernels.hpp"

#include <map>
#include <mutex>
#include <utility>

#include "core/check.hpp"

namespace switchyard::cpu {
namespace {

const Kernels* kernels_of(CpuIsa isa, DType dtype, bool q8) {
  switch (isa) {
#if SWITCHYARD_X86_KERNELS
    case CpuIsa::kAmxBf16: return amx_bf16_kernels(dtype, q8);
    case CpuIsa::kAvx512Bf16: return avx512_bf16_kernels(dtype, q8);
    case CpuIsa::kAvx512: return avx512_kernels(dtype, q8);
    case CpuIsa::kAvx2: return avx2_kernels(dtype, q8);
#endif
    case CpuIsa::kPortable: return portable_kernels(dtype, q8);
    default: return nullptr;
  }
}

WidenFunction widening_of(const Kernels& exact, Storage storage) {
#if SWITCHYARD_X86_KERNELS
  if (exact.isa >= CpuIsa::kAvx512) return avx512_widening(exact.dtype, storage);
  if (exact.isa == CpuIsa::kAvx2) return avx2_widening(exact.dtype, storage);
#endif
  return portable_widening(exact.dtype, storage);
}

/// Made when asked for, and kept: tables of an instruction set are only touched where it is there.
const Kernels& with_storage(const Kernels& exact, Storage storage) {
  static std::mutex mutex;
  static std::map<std::pair<const Kernels*, Storage>, Kernels> made;
  const std::lock_guard lock(mutex);
  const auto [place, fresh] = made.try_emplace({&exact, storage}, exact);
  if (fresh) {
    place->second.storage = storage;
    place->second.widen = widening_of(exact, storage);
  }
  return place->second;
}

}  // namespace

const Kernels& find_kernels(CpuIsa isa, DType dtype, WeightFormat format) {
  const bool q8 = format == WeightFormat::kQ8;
  for (int level = static_cast<int>(isa); level >= 0; --level) {
    const Kernels* kernels = kernels_of(static_cast<CpuIsa>(level), dtype, q8);
    if (kernels == nullptr) continue;
    if (format == WeightFormat::kE4M3) return with_storage(*kernels, Storage::kE4M3);
    if (format == WeightFormat::kMxfp4) return with_storage(*kernels, Storage::kMxfp4);
    return *kernels;
  }
  fail(ErrorCode::kUnsupported, "no CPU kernels for {}", to_string(dtype));
}

}  // namespace switchyard::cpu
