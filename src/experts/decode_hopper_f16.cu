// The decode kernels of f16 weights that copy by tensor copies (sm_90a); decode_up.cuh and
// decode_down.cuh say how.

#include "experts/decode_kernels.cuh"

namespace switchyard::decode {

Kernels kernels_hopper_f16(const DecodeShape& shape) { return pick<__half, true>(shape); }

}  // namespace switchyard::decode
