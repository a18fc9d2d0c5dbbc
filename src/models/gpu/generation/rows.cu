// The small stages of a token step: its beginning, norms, what goes into the cache behind a piece
// of a prompt, the likeliest tokens. Bound by latency.
#include "core/gpu/ptx.cuh"
#include "models/gpu/generation/likeliest.cuh"
#include "models/gpu/generation/stages.hpp"
#include "models/gpu/launch.cuh"

namespace switchyard::models::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

/// Not overlapped: what comes before it may have written weights, ids and place.
__global__ void begin_kernel(BeginArgs p) {
  const std::int64_t row = blockIdx.x;
  const std::int64_t from = std::int64_t{p.ids[row]} * p.hidden;
  for (std::int64_t i = 4 * threadIdx.x; i < p.hidden; i += 4 * kThreads) {
    float x[4];
    load4(p.table + from + i, x);
    store4(p.x + row * p.hidden + i, x);
  }
  if (row == 0 && threadIdx.x == 0) p.place->position = p.place->next++;
}

template <typename T>
__global__ void append_kernel(AppendArgs p) {
  const std::int64_t of_kv = std::int64_t{p.kv_heads} * p.head_dim;
  const std::int64_t of_qk = (p.heads + p.kv_heads) * std::int64_t{p.head_dim};
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.rows * of_kv) return;
  const std::int64_t row = i / of_kv, column = i % of_kv;
  const std::int64_t position = p.first + row % p.positions, sequence = row / p.positions;
  const std::int64_t head = sequence * p.kv_heads + column / p.head_dim;
  const std::int64_t to = (head * p.cache.capacity + position) * p.cache.row + column % p.head_dim;
  static_cast<T*>(p.cache.keys)[to] =
      static_cast<const T*>(p.turned)[(row + 1) * of_qk - of_kv + column];
  static_cast<T*>(p.cache.values)[to] =
      static_cast<const T*>(p.qkv)[row * (of_qk + of_kv) + of_qk + column];
}

template <typename T>
__global__ void __launch_bounds__(kThreads) norm_rows_kernel(NormRowsArgs p) {
  __shared__ float sums[kWarps];
  ptx::start_after_previous_kernel();
  const float* const x = p.x + blockIdx.x * p.size;
  float squares = 0;
  for (std::int64_t i = 4 * threadIdx.x; i < p.size; i += 4 * kThreads) {
    float v[4];
    load4(x + i, v);
#pragma unroll
    for (int j = 0; j < 4; ++j) squares += v[j] * v[j];
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[w];
  const float scale = 1.0F / sqrtf(total / static_cast<float>(p.size) + p.epsilon);
  for (std::int64_t i = 4 * threadIdx.x; i < p.size; i += 4 * kThreads) {
    float v[4], weight[4];
    load4(x + i, v);
    load4(p.weight + i, weight);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] *= weight[j] * scale;
    store4(static_cast<T*>(p.y) + blockIdx.x * p.size + i, v);
  }
}

__global__ void likeliest_kernel(LikeliestArgs p) {
  ptx::start_after_previous_kernel();
  const float* const logits = p.logits + blockIdx.x * p.vocabulary;
  Best best = no_best();
  for (std::int64_t i = threadIdx.x; i < p.vocabulary; i += blockDim.x) {
    best = better(best, best_of(logits[i], i));
  }
  best = best_of_block(best);
  if (threadIdx.x > 0) return;
  p.ids[blockIdx.x] = max(best.id, 0);
  p.told[p.place->position % p.ring * p.rows + blockIdx.x] = best.id;
}

}  // namespace

void begin_step(const BeginArgs& args) {
  launch(begin_kernel, dim3(static_cast<unsigned>(args.rows)), dim3(kThreads), 0, args.stream,
         args);
}

void append(const AppendArgs& args) {
  const std::int64_t count = args.rows * args.kv_heads * args.head_dim;
  by_type(args.bf16, [&](auto type) {
    launch(append_kernel<decltype(type)>, dim3(blocks_for(count, kThreads)), dim3(kThreads), 0,
           args.stream, args);
  });
}

void norm_rows(const NormRowsArgs& args) {
  by_type(args.bf16, [&](auto type) {
    launch_overlapped(norm_rows_kernel<decltype(type)>, static_cast<unsigned>(args.rows), kThreads,
                      0, args.stream, args);
  });
}

void likeliest(const LikeliestArgs& args) {
  const int threads = args.vocabulary > 4 * kThreads ? 1024 : kThreads;
  launch_overlapped(likeliest_kernel, static_cast<unsigned>(args.rows), threads, 0, args.stream,
                    args);
}

}  // namespace switchyard::models::gpu
