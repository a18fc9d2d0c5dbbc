// The streaming kernels of f16 weights that copy by tensor copies (sm_90a); streaming_up.cuh,
// streaming_down.cuh and streaming_whole.cuh say how.

#include "experts/gpu/streaming/hopper_kernels.cuh"

namespace switchyard::streaming {

Kernels kernels_hopper_f16(const StreamingShape& shape) { return pick_hopper<__half>(shape); }

}  // namespace switchyard::streaming
