// The list of kernels by instruction set.
#include "experts/cpu/kernels/kernels.hpp"

#include <map>
#include <mutex>
#include <tuple>

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
  if (exact.isa >= CpuIsa::kAvx512Bf16) return avx512_bf16_widening(storage);
  if (exact.isa == CpuIsa::kAvx512) return avx512_widening(exact.dtype, storage);
  if (exact.isa == CpuIsa::kAvx2) return avx2_widening(exact.dtype, storage);
#endif
  return portable_widening(exact.dtype, storage);
}

Storage storage_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kE4M3: return Storage::kE4M3;
    case WeightFormat::kMxfp4: return Storage::kMxfp4;
    case WeightFormat::kInt4: return Storage::kInt4;
    case WeightFormat::kNvfp4: return Storage::kNvfp4;
    case WeightFormat::kExact:
    case WeightFormat::kQ8:
    case WeightFormat::kStored: break;  // no codes of a file's, or no format yet
  }
  fail(ErrorCode::kUnsupported, "no CPU kernels for weights in {}", to_string(format));
}

/// Made when asked for, and kept: tables of an instruction set are only touched where it is there.
const Kernels& with_storage(const Kernels& exact, Storage storage, const Int4Form& int4) {
  using Key = std::tuple<const Kernels*, Storage, std::int32_t, DType, bool>;
  static std::mutex mutex;
  static std::map<Key, Kernels> made;
  const Key key{&exact, storage, int4.group, int4.scale, int4.zero_points};
  const std::lock_guard lock(mutex);
  const auto [place, fresh] = made.try_emplace(key, exact);
  if (fresh) {
    place->second.storage = storage;
    place->second.widen = widening_of(exact, storage);
    place->second.int4 = int4;
#if SWITCHYARD_X86_KERNELS
    if (exact.isa == CpuIsa::kAvx512Bf16) place->second.coded_rows = avx512_bf16_coded_rows();
    if (exact.isa == CpuIsa::kAmxBf16) place->second.coded_rows = amx_bf16_coded_rows(storage);
#endif
  }
  return place->second;
}

}  // namespace

const Kernels& find_kernels(CpuIsa isa, DType dtype, WeightFormat format, Int4Form int4) {
  const bool q8 = format == WeightFormat::kQ8;
  for (int level = static_cast<int>(isa); level >= 0; --level) {
    const Kernels* kernels = kernels_of(static_cast<CpuIsa>(level), dtype, q8);
    if (kernels == nullptr) continue;
    if (!has_codes(format)) return *kernels;
    return with_storage(*kernels, storage_of(format),
                        format == WeightFormat::kInt4 ? int4 : Int4Form{});
  }
  fail(ErrorCode::kUnsupported, "no CPU kernels for {}", to_string(dtype));
}

}  // namespace switchyard::cpu
