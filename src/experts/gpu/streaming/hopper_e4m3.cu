// The streaming kernels of bf16 rows with weights that are stored as e4m3 with scales of blocks
// (sm_90a); coded.cuh says how.

#include "experts/gpu/streaming/kernels.cuh"

namespace switchyard::streaming {

Kernels kernels_hopper_e4m3(const StreamingShape& shape) {
  return pick<Coded<WeightFormat::kE4M3>, true>(shape);
}

}  // namespace switchyard::streaming
