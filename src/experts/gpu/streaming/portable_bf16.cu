// The streaming kernels of bf16 weights that copy by cp.async (sm_80 and later); streaming_up.cuh
// and streaming_down.cuh say how.

#include "experts/gpu/streaming/kernels.cuh"

namespace switchyard::streaming {

Kernels kernels_portable_bf16(const StreamingShape& shape) {
  return pick<__nv_bfloat16, false>(shape);
}

}  // namespace switchyard::streaming
