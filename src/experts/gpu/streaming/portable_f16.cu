// The decode kernels of f16 weights that copy by cp.async (sm_80 and later); decode_up.cuh and
// decode_down.cuh say how.

#include "experts/gpu/streaming/kernels.cuh"

namespace switchyard::decode {

Kernels kernels_portable_f16(const DecodeShape& shape) { return pick<__half, false>(shape); }

}  // namespace switchyard::decode
