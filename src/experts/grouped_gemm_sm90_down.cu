#include "experts/grouped_gemm_sm90_launch.cuh"

namespace switchyard {

void launch_sm90_down(const GroupedProduct& product, cudaStream_t stream) {
  launch_sm90_types<Epilogue::kLinear, false, false>(product, stream);
}

}  // namespace switchyard
