#include "experts/gpu/grouped/sm80/launch.cuh"

namespace switchyard {

void launch_sm80_gated(const GroupedProduct& product, cudaStream_t stream) {
  launch_sm80_types<Epilogue::kGated>(product, stream);
}

}  // namespace switchyard
