// The decode kernels of f32 weights that copy by cp.async (sm_80 and later); decode_up.cuh and
// decode_down.cuh say how.

#include "experts/gpu/streaming/kernels.cuh"

namespace switchyard::decode {

Kernels kernels_portable_f32(const DecodeShape& shape) { return pick<float, false>(shape); }

}  // namespace switchyard::decode
