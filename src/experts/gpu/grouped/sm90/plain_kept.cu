#include "experts/gpu/grouped/sm90/launch.cuh"

namespace switchyard {

void launch_sm90_plain_kept(const GroupedProduct& product, cudaStream_t stream) {
  launch_sm90_types<Epilogue::kPlainKept, true, false>(product, stream);
}

}  // namespace switchyard
