// The f32 grouped GEMM's three kernels.
#include "experts/gpu/grouped/f32/launch.cuh"

namespace switchyard {

void launch_f32_gated(const GroupedProduct& product, cudaStream_t stream) {
  launch_f32<Epilogue::kGated>(product, stream);
}
void launch_f32_plain(const GroupedProduct& product, cudaStream_t stream) {
  launch_f32<Epilogue::kPlain>(product, stream);
}
void launch_f32_down(const GroupedProduct& product, cudaStream_t stream) {
  launch_f32<Epilogue::kLinear>(product, stream);
}

}  // namespace switchyard
