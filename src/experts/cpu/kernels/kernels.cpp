// The list of kernels by instruction set.
#include "experts/cpu/kernels/kernels.hpp"

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

}  // namespace

const Kernels& find_kernels(CpuIsa isa, DType dtype, bool quantize_q8) {
  for (int level = static_cast<int>(isa); level >= 0; --level) {
    const Kernels* kernels = kernels_of(static_cast<CpuIsa>(level), dtype, quantize_q8);
    if (kernels != nullptr) return *kernels;
  }
  fail(ErrorCode::kUnsupported, "no CPU kernels for {}", to_string(dtype));
}

}  // namespace switchyard::cpu
