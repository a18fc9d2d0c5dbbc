// What the experts have left is weighed and added to the residual stream, whose norm comes with it:
// a block has a row, in registers.
#include <algorithm>

#include "models/gpu/generation/batch/tiles.cuh"

namespace switchyard::models::gpu {
namespace {

constexpr int kMostThreads = 256;
constexpr int kQuads = static_cast<int>(kMostBatchHidden) / (4 * kMostThreads);

/// Adds four columns of kAtOnce splits, whose loads are under way together.
template <int kAtOnce>
__device__ __forceinline__ void add_splits(const float* from, std::int64_t of_split,
                                           float (&sum)[4]) {
  float of[kAtOnce][4];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) load4(from + i * of_split, of[i]);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] += of[i][j];
  }
}

__global__ void __launch_bounds__(kMostThreads) sum_norm_kernel(SumNormArgs p) {
  __shared__ float sums[kMostThreads / 32];
  const int size = static_cast<int>(p.hidden), each = 4 * static_cast<int>(blockDim.x);
  const int begin = 4 * static_cast<int>(threadIdx.x);
  let_stage_behind_begin();
  float weight[kQuads][4];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    if (begin + q * each < size) load4(p.weight + begin + q * each, weight[q]);
  }
  wait_for_stages_in_front();
  const std::int64_t row = std::int64_t{blockIdx.x} * size;
  const int num_parts = p.parts == nullptr ? 0 : p.top_k;
  const std::int64_t of_split = p.rows * num_parts * size;
  float v[kQuads][4];
  float squares = 0;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int column = begin + q * each;
    if (column >= size) continue;
    load4(p.x + row + column, v[q]);
#pragma unroll 1
    for (int k = 0; k < num_parts; ++k) {
      const float share =
          p.share == nullptr ? 1.0F : p.share[static_cast<int>(blockIdx.x) * num_parts + k];
      const float* from = p.parts + row * num_parts + k * size + column;
      float sum[4] = {};
      int splits = p.splits;
#pragma unroll 1
      for (; splits >= 8; splits -= 8, from += 8 * of_split) add_splits<8>(from, of_split, sum);
      if (splits >= 4) {
        add_splits<4>(from, of_split, sum);
        splits -= 4;
        from += 4 * of_split;
      }
#pragma unroll 1
      for (; splits > 0; --splits, from += of_split) add_splits<1>(from, of_split, sum);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[q][j] = fmaf(share, sum[j], v[q][j]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) squares += v[q][j] * v[q][j];
    if (p.sum != nullptr) store4(p.sum + row + column, v[q]);
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float total = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) total += sums[w];
  const float scale = 1.0F / sqrtf(total / static_cast<float>(size) + p.epsilon);
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int column = begin + q * each;
    if (column >= size) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) v[q][j] *= weight[q][j] * scale;
    store4(static_cast<Bf16*>(p.y) + row + column, v[q]);
  }
}

}  // namespace

void sum_norm(const SumNormArgs& args) {
  const std::int64_t threads = std::min<std::int64_t>((args.hidden + 127) / 128 * 32, kMostThreads);
  launch_overlapped(sum_norm_kernel, static_cast<unsigned>(args.rows), static_cast<int>(threads), 0,
                    args.stream, args);
}

}  // namespace switchyard::models::gpu
