// The streaming kernels of f32 weights that copy by tensor copies (sm_90a); streaming_up.cuh,
// streaming_down.cuh and streaming_whole.cuh say how.

#include "experts/gpu/streaming/hopper_kernels.cuh"

namespace switchyard::streaming {

Kernels kernels_hopper_f32(const StreamingShape& shape) { return pick_hopper<float>(shape); }

}  // namespace switchyard::streaming
