// Causal attention in f32, forward and back: a warp has a row, its lanes the numbers of a head. For
// exactness, not speed.
#include "models/gpu/attention.hpp"
#include "models/gpu/launch.cuh"

namespace switchyard::models::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kEach = static_cast<int>(kMaxHeadDim) / 32;  // numbers of a lane
constexpr int kTogether = 4;                               // keys, for their latencies' sake

/// One warp's place: row `position` of head `head` of a sequence.
struct Place {
  std::int64_t sequence;
  int head, position;
};

__device__ __forceinline__ bool find_place(const AttentionArgs& p, int heads, Place& place) {
  const std::int64_t item = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (item >= p.batch * heads * p.positions) return false;
  place.position = static_cast<int>(item % p.positions);
  place.head = static_cast<int>(item / p.positions % heads);
  place.sequence = item / p.positions / heads;
  return true;
}

template <typename T>
__device__ __forceinline__ T* row_of(const Heads& heads, const AttentionArgs& p,
                                     std::int64_t sequence, int head, int position) {
  return static_cast<T*>(heads.data) + (sequence * p.positions + position) * heads.row +
         head * p.head_dim;
}

__device__ __forceinline__ void load_row(const float* from, int dim, float (&x)[kEach]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    x[j] = lane + 32 * j < dim ? from[lane + 32 * j] : 0.0F;
  }
}

__device__ __forceinline__ void store_row(float* to, int dim, const float (&x)[kEach], float by) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (lane + 32 * j < dim) to[lane + 32 * j] = x[j] * by;
  }
}

__device__ __forceinline__ float dot(const float (&x)[kEach], const float (&y)[kEach]) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) sum += x[j] * y[j];
  return warp_sum(sum);
}

__device__ __forceinline__ void add(float by, const float (&x)[kEach], float (&to)[kEach]) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) to[j] += by * x[j];
}

__device__ __forceinline__ std::int64_t stats_of(const AttentionArgs& p, std::int64_t sequence,
                                                 int head) {
  return (sequence * p.heads + head) * p.positions;
}

__global__ void attention_kernel(AttentionArgs p) {
  Place at;
  if (!find_place(p, p.heads, at)) return;
  const int of_kv = at.head / (p.heads / p.kv_heads);
  const float scale = 1.0F / sqrtf(static_cast<float>(p.head_dim));
  float q[kEach], sums[kEach] = {};
  load_row(row_of<float>(p.q, p, at.sequence, at.head, at.position), p.head_dim, q);
  float most = -INFINITY, total = 0;
  for (int first = 0; first <= at.position; first += kTogether) {
    float s[kTogether], now = most;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int key = min(first + i, at.position);
      float k[kEach];
      load_row(row_of<float>(p.k, p, at.sequence, of_kv, key), p.head_dim, k);
      s[i] = first + i <= at.position ? dot(q, k) * scale : -INFINITY;
      now = fmaxf(now, s[i]);
    }
    const float keep = expf(most - now);
    most = now;
    total *= keep;
#pragma unroll
    for (int j = 0; j < kEach; ++j) sums[j] *= keep;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float share = expf(s[i] - now);
      float v[kEach];
      load_row(row_of<float>(p.v, p, at.sequence, of_kv, min(first + i, at.position)), p.head_dim,
               v);
      total += share;
      add(share, v, sums);
    }
  }
  store_row(row_of<float>(p.out, p, at.sequence, at.head, at.position), p.head_dim, sums,
            1.0F / total);
  if (threadIdx.x % 32 == 0) {
    p.lse[stats_of(p, at.sequence, at.head) + at.position] = most + logf(total);
  }
}

/// dout . out of each query.
__global__ void delta_kernel(AttentionBackwardArgs args) {
  const AttentionArgs& p = args.forward;
  Place at;
  if (!find_place(p, p.heads, at)) return;
  float out[kEach], dout[kEach];
  load_row(row_of<float>(p.out, p, at.sequence, at.head, at.position), p.head_dim, out);
  load_row(row_of<float>(args.dout, p, at.sequence, at.head, at.position), p.head_dim, dout);
  const float delta = dot(out, dout);
  if (threadIdx.x % 32 == 0) {
    args.delta[stats_of(p, at.sequence, at.head) + at.position] = delta;
  }
}

__global__ void queries_kernel(AttentionBackwardArgs args) {
  const AttentionArgs& p = args.forward;
  Place at;
  if (!find_place(p, p.heads, at)) return;
  const int of_kv = at.head / (p.heads / p.kv_heads);
  const float scale = 1.0F / sqrtf(static_cast<float>(p.head_dim));
  const std::int64_t place = stats_of(p, at.sequence, at.head) + at.position;
  const float lse = p.lse[place], delta = args.delta[place];
  float q[kEach], dout[kEach], dq[kEach] = {};
  load_row(row_of<float>(p.q, p, at.sequence, at.head, at.position), p.head_dim, q);
  load_row(row_of<float>(args.dout, p, at.sequence, at.head, at.position), p.head_dim, dout);
#pragma unroll 2
  for (int key = 0; key <= at.position; ++key) {
    float k[kEach], v[kEach];
    load_row(row_of<float>(p.k, p, at.sequence, of_kv, key), p.head_dim, k);
    load_row(row_of<float>(p.v, p, at.sequence, of_kv, key), p.head_dim, v);
    const float share = expf(dot(q, k) * scale - lse);
    add(share * (dot(dout, v) - delta), k, dq);
  }
  store_row(row_of<float>(args.dq, p, at.sequence, at.head, at.position), p.head_dim, dq, scale);
}

__global__ void keys_kernel(AttentionBackwardArgs args) {
  const AttentionArgs& p = args.forward;
  Place at;
  if (!find_place(p, p.kv_heads, at)) return;
  const int group = p.heads / p.kv_heads;
  const float scale = 1.0F / sqrtf(static_cast<float>(p.head_dim));
  float k[kEach], v[kEach], dk[kEach] = {}, dv[kEach] = {};
  load_row(row_of<float>(p.k, p, at.sequence, at.head, at.position), p.head_dim, k);
  load_row(row_of<float>(p.v, p, at.sequence, at.head, at.position), p.head_dim, v);
  for (int head = at.head * group; head < (at.head + 1) * group; ++head) {
    const std::int64_t stats = stats_of(p, at.sequence, head);
#pragma unroll 2
    for (int i = at.position; i < p.positions; ++i) {
      float q[kEach], dout[kEach];
      load_row(row_of<float>(p.q, p, at.sequence, head, i), p.head_dim, q);
      load_row(row_of<float>(args.dout, p, at.sequence, head, i), p.head_dim, dout);
      const float share = expf(dot(q, k) * scale - p.lse[stats + i]);
      add(share, dout, dv);
      add(share * (dot(dout, v) - args.delta[stats + i]), q, dk);
    }
  }
  store_row(row_of<float>(args.dk, p, at.sequence, at.head, at.position), p.head_dim, dk, scale);
  store_row(row_of<float>(args.dv, p, at.sequence, at.head, at.position), p.head_dim, dv, 1.0F);
}

unsigned blocks_of(const AttentionArgs& args, int heads) {
  return blocks_for(args.batch * heads * args.positions, kWarps);
}

}  // namespace

bool attention_takes(std::int32_t head_dim, bool bf16) {
  if (bf16) return head_dim == 32 || head_dim == 64 || head_dim == 128;
  return head_dim >= 1 && head_dim <= kMaxHeadDim;
}

void attention(const AttentionArgs& args) {
  if (args.bf16) return attention_bf16(args);
  launch(attention_kernel, blocks_of(args, args.heads), kThreads, 0, args.stream, args);
}

void attention_backward(const AttentionBackwardArgs& args) {
  const AttentionArgs& forward = args.forward;
  if (forward.bf16) return attention_backward_bf16(args);
  launch(delta_kernel, blocks_of(forward, forward.heads), kThreads, 0, forward.stream, args);
  launch(queries_kernel, blocks_of(forward, forward.heads), kThreads, 0, forward.stream, args);
  launch(keys_kernel, blocks_of(forward, forward.kv_heads), kThreads, 0, forward.stream, args);
}

}  // namespace switchyard::models::gpu
