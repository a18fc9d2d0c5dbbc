// Those of them that keep the pre-activation.
#include "experts/gpu/grouped/f32/sm90_launch.cuh"

namespace switchyard {

void launch_f32_sm90_gated_kept(const GroupedProduct& product, cudaStream_t stream) {
  launch_f32_sm90<Epilogue::kGatedKept>(product, stream);
}
void launch_f32_sm90_plain_kept(const GroupedProduct& product, cudaStream_t stream) {
  launch_f32_sm90<Epilogue::kPlainKept>(product, stream);
}

}  // namespace switchyard
