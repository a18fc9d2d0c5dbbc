// The kernels on 512-bit vectors: tiles of 14 rows x 32 columns, 16-bit weights widened to float.
#include "experts/cpu/kernels/avx512.hpp"
#include "experts/cpu/product/widen.hpp"

namespace switchyard::cpu {
namespace {
struct Here {};
}  // namespace

const Kernels* avx512_kernels(DType dtype, bool q8) {
  return find_float_kernels<Avx512<Here>>(CpuIsa::kAvx512, dtype, q8);
}

WidenFunction avx512_widening(DType dtype, Storage storage) {
  return find_widening<Avx512<Here>>(dtype, storage);
}

}  // namespace switchyard::cpu
