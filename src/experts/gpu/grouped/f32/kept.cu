// Those of them that keep the pre-activation.
#include "experts/gpu/grouped/f32/launch.cuh"

namespace switchyard {

void launch_f32_gated_kept(const GroupedProduct& product, cudaStream_t stream) {
  launch_f32<Epilogue::kGatedKept>(product, stream);
}
void launch_f32_plain_kept(const GroupedProduct& product, cudaStream_t stream) {
  launch_f32<Epilogue::kPlainKept>(product, stream);
}

}  // namespace switchyard
