// Queries and keys normalised by head and turned by their positions, and back. A warp has a head in
// its registers, each lane pairs (i, i + D/2). Bound by bytes.
#include "models/gpu/launch.cuh"
#include "models/gpu/stages.hpp"

namespace switchyard::models::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPairs = static_cast<int>(kMaxHeadDim) / 64;  // of a lane
constexpr std::int64_t kMostParts = 512;

template <typename T>
__global__ void rope_kernel(RopeArgs p) {
  const int of_both = p.heads + p.kv_heads;
  const std::int64_t item = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (item >= p.rows * of_both) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(item % of_both);
  const std::int64_t row = item / of_both;
  const int half = p.head_dim / 2;
  const T* const x =
      static_cast<const T*>(p.qkv) + row * (of_both + p.kv_heads) * p.head_dim + head * p.head_dim;
  T* const out = static_cast<T*>(p.turned) + (row * of_both + head) * p.head_dim;
  float a[kPairs] = {}, b[kPairs] = {};
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = lane + 32 * j;
    if (i >= half) continue;
    a[j] = to_float(x[i]);
    b[j] = to_float(x[half + i]);
    squares += a[j] * a[j] + b[j] * b[j];
  }
  if (p.q_weight != nullptr) {
    const float* const weight = head < p.heads ? p.q_weight : p.k_weight;
    const float mean = warp_sum(squares) / static_cast<float>(p.head_dim);
    const float scale = 1.0F / sqrtf(mean + p.epsilon);
    if (lane == 0) p.scales[item] = scale;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + 32 * j;
      if (i >= half) continue;
      a[j] *= scale * weight[i];
      b[j] *= scale * weight[half + i];
    }
  }
  const std::int64_t angle = (p.first + row % p.positions) * half;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = lane + 32 * j;
    if (i >= half) continue;
    const float c = p.cosine[angle + i], s = p.sine[angle + i];
    store(out + i, a[j] * c - b[j] * s);
    store(out + half + i, b[j] * c + a[j] * s);
  }
}

/// A block has `rows_each` neighbouring rows, a warp every eighth head of them. What they add to
/// the weights is a row of parts: [2][D], queries' and keys'.
template <typename T>
__global__ void rope_backward_kernel(RopeBackwardArgs args, std::int64_t rows_each) {
  const RopeArgs& p = args.forward;
  __shared__ float sums[2][kMaxHeadDim];
  const int of_both = p.heads + p.kv_heads;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int half = p.head_dim / 2;
  const std::int64_t begin = std::int64_t{blockIdx.x} * rows_each;
  const std::int64_t end = begin + rows_each < p.rows ? begin + rows_each : p.rows;
  float to_a[2][kPairs] = {}, to_b[2][kPairs] = {};
  for (std::int64_t item = begin * of_both + warp; item < end * of_both; item += kWarps) {
    const int head = static_cast<int>(item % of_both);
    const std::int64_t row = item / of_both;
    const std::int64_t place = row * (of_both + p.kv_heads) * p.head_dim + head * p.head_dim;
    T* const dx = static_cast<T*>(args.dqkv) + place;
    const std::int64_t angle = (p.first + row % p.positions) * half;
    float da[kPairs] = {}, db[kPairs] = {};
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + 32 * j;
      if (i >= half) continue;
      const float c = p.cosine[angle + i], s = p.sine[angle + i];
      const float a = to_float(dx[i]), b = to_float(dx[half + i]);
      da[j] = a * c + b * s;
      db[j] = b * c - a * s;
    }
    if (p.q_weight != nullptr) {
      const T* const x = static_cast<const T*>(p.qkv) + place;
      const bool is_key = head >= p.heads;
      const float* const weight = is_key ? p.k_weight : p.q_weight;
      const float scale = p.scales[item];
      float a[kPairs] = {}, b[kPairs] = {};
      float dot = 0;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int i = lane + 32 * j;
        if (i >= half) continue;
        a[j] = to_float(x[i]);
        b[j] = to_float(x[half + i]);
        const float of_a = da[j] * a[j] * scale, of_b = db[j] * b[j] * scale;
        to_a[0][j] += is_key ? 0.0F : of_a;
        to_a[1][j] += is_key ? of_a : 0.0F;
        to_b[0][j] += is_key ? 0.0F : of_b;
        to_b[1][j] += is_key ? of_b : 0.0F;
        da[j] *= weight[i];
        db[j] *= weight[half + i];
        dot += da[j] * a[j] + db[j] * b[j];
      }
      const float share = warp_sum(dot) * scale * scale / static_cast<float>(p.head_dim);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        da[j] = scale * (da[j] - a[j] * share);
        db[j] = scale * (db[j] - b[j] * share);
      }
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + 32 * j;
      if (i >= half) continue;
      store(dx + i, da[j]);
      store(dx + half + i, db[j]);
    }
  }
  if (p.q_weight == nullptr) return;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int i = lane + 32 * j;
        if (i >= half) continue;
        for (int k = 0; k < 2; ++k) {
          sums[k][i] = w == 0 ? to_a[k][j] : sums[k][i] + to_a[k][j];
          sums[k][half + i] = w == 0 ? to_b[k][j] : sums[k][half + i] + to_b[k][j];
        }
      }
    }
    __syncthreads();
  }
  for (int c = static_cast<int>(threadIdx.x); c < 2 * p.head_dim; c += kThreads) {
    args.parts[std::int64_t{blockIdx.x} * 2 * p.head_dim + c] =
        sums[c / p.head_dim][c % p.head_dim];
  }
}

std::int64_t rows_of_block(std::int64_t rows) { return (rows + kMostParts - 1) / kMostParts; }

}  // namespace

void rope(const RopeArgs& args) {
  by_type(args.bf16, [&]<typename T>(T) {
    launch(rope_kernel<T>, blocks_for(args.rows * (args.heads + args.kv_heads), kWarps), kThreads,
           0, args.stream, args);
  });
}

std::int64_t rope_parts(std::int64_t rows, std::int64_t head_dim) {
  return blocks_for(rows, rows_of_block(rows)) * 2 * head_dim;
}

void rope_backward(const RopeBackwardArgs& args) {
  const RopeArgs& forward = args.forward;
  const std::int64_t each = rows_of_block(forward.rows);
  const unsigned blocks = blocks_for(forward.rows, each);
  by_type(forward.bf16, [&]<typename T>(T) {
    launch(rope_backward_kernel<T>, blocks, kThreads, 0, forward.stream, args, each);
  });
  if (forward.q_weight == nullptr) return;
  const std::int64_t dim = forward.head_dim;
  sum_parts(args.parts, blocks, dim, 2 * dim, args.accumulate, args.dq_weight, forward.stream);
  sum_parts(args.parts + dim, blocks, dim, 2 * dim, args.accumulate, args.dk_weight,
            forward.stream);
}

}  // namespace switchyard::models::gpu
