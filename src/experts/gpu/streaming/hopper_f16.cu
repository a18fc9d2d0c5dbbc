// The decode kernels of f16 weights that copy by tensor copies (sm_90a); decode_up.cuh,
// decode_down.cuh and decode_whole.cuh say how.

#include "experts/gpu/streaming/hopper_kernels.cuh"

namespace switchyard::decode {

Kernels kernels_hopper_f16(const DecodeShape& shape) { return pick_hopper<__half>(shape); }

}  // namespace switchyard::decode
