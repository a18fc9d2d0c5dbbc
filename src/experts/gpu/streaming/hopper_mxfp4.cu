// The streaming kernels of bf16 rows with weights that are stored as MXFP4 (sm_90a); coded.cuh says
// how.

#include "experts/gpu/streaming/kernels.cuh"

namespace switchyard::streaming {

Kernels kernels_hopper_mxfp4(const StreamingShape& shape) {
  return pick<Coded<WeightFormat::kMxfp4>, true>(shape);
}

}  // namespace switchyard::streaming
