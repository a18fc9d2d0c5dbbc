#include "experts/gpu/grouped/sm90/launch.cuh"

namespace switchyard {

void launch_sm90_plain(const GroupedProduct& product, cudaStream_t stream) {
  launch_sm90_types<Epilogue::kPlain, true, false>(product, stream);
}

}  // namespace switchyard
