#include "experts/gpu/grouped/sm90/launch.cuh"

namespace switchyard {

// In turns, whatever the shape: the stores of three times as many columns hide behind the other
// warpgroup's products.
void launch_sm90_gated_kept(const GroupedProduct& product, cudaStream_t stream) {
  launch_sm90_types<Epilogue::kGatedKept, true, true>(product, stream);
}

}  // namespace switchyard
