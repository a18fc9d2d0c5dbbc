// What the experts have left is weighed and added to the residual stream, whose norm comes with it:
// a block has a row, in registers.
#include <algorithm>

#include "models/gpu/generation/batch/tiles.cuh"

namespace switchyard::models::gpu {
namespace {

constexpr int kMostThreads = 256;
constexpr int kQuads = static_cast<int>(kMostBatchHidden) / (4 * kMostThreads);

constexpr int kPartsAtOnce = 16;  // under way

/// Four columns of a row's parts, weighed, in the order of splits and then of choices.
__device__ __forceinline__ void add_parts(const SumNormArgs& p, std::int64_t row_and_column,
                                          float (&v)[4]) {
  if (p.parts == nullptr) return;
  const int row = static_cast<int>(blockIdx.x), num = p.splits * p.top_k;
  const std::int64_t of_row = row * p.hidden, of_split = p.rows * p.top_k * p.hidden;
  const float* from = p.parts + of_row * p.top_k + (row_and_column - of_row);
  const bool weighed = p.share != nullptr;
  const float* const shares = weighed ? p.share + row * p.top_k : p.weight;
  int k = 0;
#pragma unroll 1
  for (int first = 0; first < num; first += kPartsAtOnce) {
    float of[kPartsAtOnce][4], share[kPartsAtOnce];
    // No branch, which a load would wait behind: what there is not is another one.
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
      load4(from + k * p.hidden, of[i]);
      share[i] = shares[k];
      if (first + i + 1 >= num) continue;
      from += k + 1 == p.top_k ? of_split : 0;
      k = k + 1 == p.top_k ? 0 : k + 1;
    }
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
      const bool there = first + i < num;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v[j] = there ? fmaf(weighed ? share[i] : 1.0F, of[i][j], v[j]) : v[j];
      }
    }
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
  float v[kQuads][4];
  float squares = 0;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int column = begin + q * each;
    if (column >= size) continue;
    load4(p.x + row + column, v[q]);
    add_parts(p, row + column, v[q]);
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
