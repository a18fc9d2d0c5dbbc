// The decode kernels of bf16 weights that copy by tensor copies (sm_90a); decode_up.cuh and
// decode_down.cuh say how.

#include "experts/decode_kernels.cuh"

namespace switchyard::decode {

Kernels kernels_hopper_bf16(const DecodeShape& shape) { return pick<__nv_bfloat16, true>(shape); }

}  // namespace switchyard::decode
