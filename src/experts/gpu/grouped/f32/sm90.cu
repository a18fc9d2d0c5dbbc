// The f32 grouped GEMM's three kernels for Hopper.
#include "experts/gpu/grouped/f32/sm90_launch.cuh"

namespace switchyard {

void launch_f32_sm90_gated(const GroupedProduct& product, cudaStream_t stream) {
  launch_f32_sm90<Epilogue::kGated>(product, stream);
}
void launch_f32_sm90_plain(const GroupedProduct& product, cudaStream_t stream) {
  launch_f32_sm90<Epilogue::kPlain>(product, stream);
}
void launch_f32_sm90_down(const GroupedProduct& product, cudaStream_t stream) {
  launch_f32_sm90<Epilogue::kLinear>(product, stream);
}

}  // namespace switchyard
