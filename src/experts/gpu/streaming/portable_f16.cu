// The streaming kernels of f16 weights that copy by cp.async (sm_80 and later); streaming_up.cuh
// and streaming_down.cuh say how.

#include "experts/gpu/streaming/kernels.cuh"

namespace switchyard::streaming {

Kernels kernels_portable_f16(const StreamingShape& shape) { return pick<__half, false>(shape); }

}  // namespace switchyard::streaming
