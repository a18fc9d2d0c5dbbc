// The streaming kernels of f32 weights that copy by cp.async (sm_80 and later); streaming_up.cuh
// and streaming_down.cuh say how.

#include "experts/gpu/streaming/kernels.cuh"

namespace switchyard::streaming {

Kernels kernels_portable_f32(const StreamingShape& shape) { return pick<float, false>(shape); }

}  // namespace switchyard::streaming
