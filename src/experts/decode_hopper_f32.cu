// The decode kernels of f32 weights that copy by tensor copies (sm_90a); decode_up.cuh and
// decode_down.cuh say how.

#include "experts/decode_kernels.cuh"

namespace switchyard::decode {

Kernels kernels_hopper_f32(const DecodeShape& shape) { return pick<float, true>(shape); }

}  // namespace switchyard::decode
