#include "experts/grouped_gemm_sm90_launch.cuh"

namespace switchyard {

void launch_sm90_down_ping_pong(const Sm90Product& product, cudaStream_t stream) {
  launch_sm90_types<Epilogue::kLinear, false, true>(product, stream);
}

}  // namespace switchyard
