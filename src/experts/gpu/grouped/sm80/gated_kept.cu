#include "experts/gpu/grouped/sm80/launch.cuh"

namespace switchyard {

void launch_sm80_gated_kept(const GroupedProduct& product, cudaStream_t stream) {
  launch_sm80_types<Epilogue::kGatedKept>(product, stream);
}

}  // namespace switchyard
