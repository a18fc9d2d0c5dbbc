// The decode kernels of bf16 weights that copy by cp.async (sm_80 and later); decode_up.cuh and
// decode_down.cuh say how.

#include "experts/gpu/streaming/kernels.cuh"

namespace switchyard::decode {

Kernels kernels_portable_bf16(const DecodeShape& shape) {
  return pick<__nv_bfloat16, false>(shape);
}

}  // namespace switchyard::decode
