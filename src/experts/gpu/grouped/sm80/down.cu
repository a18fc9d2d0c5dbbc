#include "experts/gpu/grouped/sm80/launch.cuh"

namespace switchyard {

void launch_sm80_down(const GroupedProduct& product, cudaStream_t stream) {
  launch_sm80_types<Epilogue::kLinear>(product, stream);
}

}  // namespace switchyard
