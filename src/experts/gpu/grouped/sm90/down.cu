#include "experts/gpu/grouped/sm90/launch.cuh"

namespace switchyard {

void launch_sm90_down(const GroupedProduct& product, cudaStream_t stream) {
  launch_sm90_types<Epilogue::kLinear, false, false>(product, stream);
}

}  // namespace switchyard
