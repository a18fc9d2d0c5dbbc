#include "experts/grouped_gemm_sm90_launch.cuh"

namespace switchyard {

void launch_sm90_gated(const GroupedProduct& product, cudaStream_t stream) {
  launch_sm90_types<Epilogue::kGated, true, false>(product, stream);
}

}  // namespace switchyard
