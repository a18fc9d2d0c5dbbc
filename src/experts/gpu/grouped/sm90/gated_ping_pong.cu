#include "experts/gpu/grouped/sm90/launch.cuh"

namespace switchyard {

void launch_sm90_gated_ping_pong(const GroupedProduct& product, cudaStream_t stream) {
  launch_sm90_types<Epilogue::kGated, true, true>(product, stream);
}

}  // namespace switchyard
