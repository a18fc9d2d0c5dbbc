// -ln softmax at the target and its gradient, row by row. Bound by bytes: a row's logits are read
// once. Up to 16384 of them stay in a block's registers; of more a block reads them again.
#include "models/gpu/launch.cuh"
#include "models/gpu/stages.hpp"

namespace switchyard::models::gpu {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, i));
  return x;
}

/// kTeam threads (a warp or a block) have a row.
template <typename T, int kTeam>
__global__ void cross_entropy_kernel(CrossEntropyArgs p) {
  __shared__ float parts[2][kThreads / 32];
  constexpr int kTeams = kThreads / kTeam;
  const std::int64_t row = std::int64_t{blockIdx.x} * kTeams + threadIdx.x / kTeam;
  if (row >= p.rows) return;  // a warp, or a block, as a whole
  const int thread = static_cast<int>(threadIdx.x) % kTeam;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const float* const x = p.logits + row * p.vocabulary;
  float most = -INFINITY;
  for (std::int64_t i = thread; i < p.vocabulary; i += kTeam) most = fmaxf(most, x[i]);
  most = warp_max(most);
  if constexpr (kTeam > 32) {
    if (threadIdx.x % 32 == 0) parts[0][warp] = most;
    __syncthreads();
    for (int w = 0; w < kTeam / 32; ++w) most = fmaxf(most, parts[0][w]);
  }
  float sum = 0;
  for (std::int64_t i = thread; i < p.vocabulary; i += kTeam) sum += expf(x[i] - most);
  sum = warp_sum(sum);
  if constexpr (kTeam > 32) {
    if (threadIdx.x % 32 == 0) parts[1][warp] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < kTeam / 32; ++w) sum += parts[1][w];
  }
  const std::int32_t target = p.targets[row];
  if (thread == 0) p.nll[row] = target < 0 ? 0.0F : most - x[target] + logf(sum);
  if (p.dlogits == nullptr) return;
  T* const out = static_cast<T*>(p.dlogits) + row * p.vocabulary;
  const float scale = target < 0 ? 0.0F : *p.scale;
  const float share = scale / sum;
  for (std::int64_t i = thread; i < p.vocabulary; i += kTeam) {
    const float probability = target < 0 ? 0.0F : expf(x[i] - most) * share;
    store(out + i, i == target ? probability - scale : probability);
  }
}

constexpr int kRowThreads = 512;
constexpr int kRowWarps = kRowThreads / 32;

/// `parts` of all warps, of which each thread has all.
template <class Add>
__device__ __forceinline__ float over_block(float x, float* parts, const Add& add) {
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float all = parts[0];
#pragma unroll
  for (int w = 1; w < kRowWarps; ++w) all = add(all, parts[w]);
  return all;
}

/// A block has a row in its registers. The vocabulary is a multiple of 4.
template <typename T, int kQuads>
__global__ void __launch_bounds__(kRowThreads) cross_entropy_row_kernel(CrossEntropyArgs p) {
  __shared__ float parts[2][kRowWarps];
  const std::int64_t row = blockIdx.x;
  const float* const logits = p.logits + row * p.vocabulary;
  float x[kQuads][4];
  float most = -INFINITY;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = 4 * (static_cast<int>(threadIdx.x) + kRowThreads * i);
    for (float& value : x[i]) value = -INFINITY;
    if (column < p.vocabulary) load4(logits + column, x[i]);
    for (const float value : x[i]) most = fmaxf(most, value);
  }
  const std::int32_t target = p.targets[row];
  const float at_target = target < 0 ? 0.0F : logits[target];
  most = over_block(warp_max(most), parts[0], [](float a, float b) { return fmaxf(a, b); });
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    for (float& value : x[i]) {
      value = expf(value - most);
      sum += value;
    }
  }
  sum = over_block(warp_sum(sum), parts[1], [](float a, float b) { return a + b; });
  if (threadIdx.x == 0) p.nll[row] = target < 0 ? 0.0F : most - at_target + logf(sum);
  if (p.dlogits == nullptr) return;
  T* const out = static_cast<T*>(p.dlogits) + row * p.vocabulary;
  const float scale = target < 0 ? 0.0F : *p.scale;
  const float share = scale / sum;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = 4 * (static_cast<int>(threadIdx.x) + kRowThreads * i);
    if (column >= p.vocabulary) continue;
    for (int j = 0; j < 4; ++j) {
      x[i][j] = target < 0 ? 0.0F : x[i][j] * share;
      if (column + j == target) x[i][j] -= scale;
    }
    store4(out + column, x[i]);
  }
}

/// One block: thread t adds up x[t], x[t + 1024], ...; warps, then their sums in order.
__global__ void sum_kernel(const float* x, std::int64_t count, double* out) {
  __shared__ double parts[32];
  double sum = 0;
#pragma unroll 8
  for (std::int64_t i = threadIdx.x; i < count; i += 1024) sum += static_cast<double>(x[i]);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  double all = 0;
  for (const double part : parts) all += part;
  *out = all;
}

}  // namespace

void cross_entropy(const CrossEntropyArgs& args) {
  by_type(args.bf16, [&]<typename T>(T) {
    constexpr std::int64_t kOfQuad = 4 * kRowThreads;
    const bool whole_quads = args.vocabulary % 4 == 0;
    if (args.rows == 0) return;
    if (args.vocabulary <= 2048) {
      launch(cross_entropy_kernel<T, 32>, blocks_for(args.rows, kThreads / 32), kThreads, 0,
             args.stream, args);
    } else if (whole_quads && args.vocabulary <= 4 * kOfQuad) {
      launch(cross_entropy_row_kernel<T, 4>, blocks_for(args.rows, 1), kRowThreads, 0, args.stream,
             args);
    } else if (whole_quads && args.vocabulary <= 8 * kOfQuad) {
      launch(cross_entropy_row_kernel<T, 8>, blocks_for(args.rows, 1), kRowThreads, 0, args.stream,
             args);
    } else {
      launch(cross_entropy_kernel<T, kThreads>, blocks_for(args.rows, 1), kThreads, 0, args.stream,
             args);
    }
  });
}

void sum_of(const float* x, std::int64_t count, double* out, cudaStream_t stream) {
  launch(sum_kernel, 1, 1024, 0, stream, x, count, out);
}

}  // namespace switchyard::models::gpu
