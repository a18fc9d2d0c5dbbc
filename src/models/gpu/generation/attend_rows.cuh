#pragma once

// Attention of a few rows over a cache. A team of neighbouring threads has a position, each thread
// 16 bytes of its key and value; teams have running maxima and sums of their own, which meet at the
// end: in a warp by shuffles, then in shared memory. All is f32 but what is read and written.

#include "models/gpu/generation/stages.hpp"
#include "models/gpu/launch.cuh"
#include "models/gpu/stages.hpp"

namespace switchyard::models::gpu {

inline constexpr int kAttendTogether = 4;  ///< Positions of a team under way.
/// Of a lane, in rope.
inline constexpr int kAttendPairs = static_cast<int>(kMaxHeadDim) / 64;
inline constexpr float kLog2e = 1.4426950408889634F;

/// A block's row, its head of keys, and the queries that share it: kGroup from `first_head` on.
struct AttendItem {
  std::int64_t row, sequence;
  int position, kv_head, first_head, num_heads;
};

template <int kGroup>
__device__ __forceinline__ AttendItem find_attend_item(const AttendArgs& p, int index) {
  const int of_kv = p.heads / p.kv_heads;
  const int groups = (of_kv + kGroup - 1) / kGroup;
  AttendItem at{};
  const int group = index % groups;
  at.kv_head = index / groups % p.kv_heads;
  at.row = index / groups / p.kv_heads;
  at.sequence = at.row / p.positions;
  at.position = (p.place != nullptr ? p.place->position : static_cast<int>(p.first)) +
                static_cast<int>(at.row % p.positions);
  at.first_head = at.kv_head * of_kv + group * kGroup;
  at.num_heads = min(kGroup, of_kv - group * kGroup);
  return at;
}

/// A warp normalises and turns a head, as rope() does but for the order of the squares' sum.
template <typename T, class Store>
__device__ __forceinline__ void turn_head(const AttendArgs& p, const T* x, const float* weight,
                                          int position, const Store& put) {
  const int lane = static_cast<int>(threadIdx.x) % 32, half = p.head_dim / 2;
  float a[kAttendPairs] = {}, b[kAttendPairs] = {};
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kAttendPairs; ++j) {
    const int i = lane + 32 * j;
    if (i >= half) continue;
    a[j] = to_float(x[i]);
    b[j] = to_float(x[half + i]);
    squares += a[j] * a[j] + b[j] * b[j];
  }
  if (weight != nullptr) {
    const float mean = warp_sum(squares) / static_cast<float>(p.head_dim);
    const float scale = 1.0F / sqrtf(mean + p.epsilon);
#pragma unroll
    for (int j = 0; j < kAttendPairs; ++j) {
      const int i = lane + 32 * j;
      if (i >= half) continue;
      a[j] *= scale * weight[i];
      b[j] *= scale * weight[half + i];
    }
  }
  const std::int64_t angle = std::int64_t{position} * half;
#pragma unroll
  for (int j = 0; j < kAttendPairs; ++j) {
    const int i = lane + 32 * j;
    if (i >= half) continue;
    const float c = p.cosine[angle + i], s = p.sine[angle + i];
    put(i, a[j] * c - b[j] * s);
    put(half + i, b[j] * c + a[j] * s);
  }
}

template <typename T>
__device__ __forceinline__ float rounded(float x) {
  T y;
  store(&y, x);
  return to_float(y);
}

/// Queries into shared memory, rounded as rope() leaves them; with `appends` the row's key and
/// value into the cache. A warp a head.
template <typename T, int kGroup, int kSize>
__device__ __forceinline__ void prepare_queries(const AttendArgs& p, const AttendItem& at,
                                                bool appends, float (&q)[kGroup][kSize]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int dim = p.head_dim;
  const int of_both = p.heads + p.kv_heads;
  if (warp < kGroup) {
    for (int i = lane; i < kSize; i += 32) {
      if (i >= dim || warp >= at.num_heads) q[warp][i] = 0;
    }
    if (warp >= at.num_heads) return;
    const int head = at.first_head + warp;
    if (p.qkv == nullptr) {
      const T* const x = static_cast<const T*>(p.turned) + (at.row * of_both + head) * dim;
      for (int i = lane; i < dim; i += 32) q[warp][i] = to_float(x[i]);
      return;
    }
    const T* const x =
        static_cast<const T*>(p.qkv) + (at.row * (of_both + p.kv_heads) + head) * dim;
    turn_head(p, x, p.q_weight, at.position, [&](int i, float v) { q[warp][i] = rounded<T>(v); });
    return;
  }
  if (!appends || p.qkv == nullptr || warp > kGroup + 1) return;
  const T* const row = static_cast<const T*>(p.qkv) + at.row * (of_both + p.kv_heads) * dim;
  const std::int64_t to =
      ((at.sequence * p.kv_heads + at.kv_head) * p.cache.capacity + at.position) * p.cache.row;
  if (warp == kGroup) {
    T* const key = static_cast<T*>(p.cache.keys) + to;
    turn_head(p, row + (p.heads + at.kv_head) * dim, p.k_weight, at.position,
              [&](int i, float v) { store(key + i, v); });
  } else {
    T* const value = static_cast<T*>(p.cache.values) + to;
    for (int i = lane; i < dim; i += 32) value[i] = row[(of_both + at.kv_head) * dim + i];
  }
}

/// What a block of kWarps warps shares while it attends.
template <typename T, int kLanes, int kGroup, int kWarps>
struct AttendRoom {
  static constexpr int kSize = kLanes * kPack<T>;
  float queries[kGroup][kSize];
  float sums[kWarps][kGroup][kSize];
  float stats[kWarps][kGroup][2];
};

/// An item of attend(), a stretch of its positions: kLanes threads have a position; kGroup heads of
/// queries share what is read. The room may be used again behind a barrier.
template <typename T, int kLanes, int kGroup, int kWarps>
__device__ __forceinline__ void attend_item(const AttendArgs& p, int index, int split,
                                            AttendRoom<T, kLanes, kGroup, kWarps>& room) {
  constexpr int kThreads = 32 * kWarps;
  constexpr int kSize = kLanes * kPack<T>;
  constexpr int kTeams = kThreads / kLanes;
  static_assert(kGroup + 2 <= kWarps);
  auto& queries = room.queries;
  auto& sums = room.sums;
  auto& stats = room.stats;
  const AttendItem at = find_attend_item<kGroup>(p, index);
  const int length = at.position + 1;
  const int each = (length + p.splits - 1) / p.splits;
  const int begin = split * each, end = min(length, begin + each);
  prepare_queries<T, kGroup, kSize>(p, at, begin <= at.position && at.position < end, queries);
  __syncthreads();

  const int thread = static_cast<int>(threadIdx.x);
  const int team = thread / kLanes, column = thread % kLanes * kPack<T>;
  const bool inside = column < p.cache.row;
  const std::int64_t head = (at.sequence * p.kv_heads + at.kv_head) * p.cache.capacity;
  const T* const keys = static_cast<const T*>(p.cache.keys) + head * p.cache.row + column;
  const T* const values = static_cast<const T*>(p.cache.values) + head * p.cache.row + column;
  const float scale = kLog2e / sqrtf(static_cast<float>(p.head_dim));
  float q[kGroup][kPack<T>], sum[kGroup][kPack<T>] = {};
  float most[kGroup], total[kGroup] = {};
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    most[g] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) q[g][i] = queries[g][column + i] * scale;
  }
  for (int base = begin; base < end; base += kTeams * kAttendTogether) {
    int4 k[kAttendTogether], v[kAttendTogether];
#pragma unroll
    for (int j = 0; j < kAttendTogether; ++j) {
      const int i = base + j * kTeams + team;
      const bool there = inside && i < end;
      k[j] = there ? *reinterpret_cast<const int4*>(keys + i * p.cache.row) : int4{};
      v[j] = there ? *reinterpret_cast<const int4*>(values + i * p.cache.row) : int4{};
    }
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      float score[kAttendTogether], now = most[g];
#pragma unroll
      for (int j = 0; j < kAttendTogether; ++j) {
        float key[kPack<T>], dot = 0;
        unpack16(k[j], key, T{});
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) dot = fmaf(q[g][i], key[i], dot);
#pragma unroll
        for (int i = kLanes / 2; i > 0; i /= 2) dot += __shfl_xor_sync(0xffffffffU, dot, i);
        score[j] = base + j * kTeams + team < end ? dot : -INFINITY;
        now = fmaxf(now, score[j]);
      }
      const float against = now == -INFINITY ? 0.0F : now;  // a team without a position yet
      const float keep = exp2f(most[g] - against);
      most[g] = now;
      total[g] *= keep;
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) sum[g][i] *= keep;
#pragma unroll
      for (int j = 0; j < kAttendTogether; ++j) {
        float value[kPack<T>];
        unpack16(v[j], value, T{});
        const float share = exp2f(score[j] - against);
        total[g] += share;
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) sum[g][i] = fmaf(share, value[i], sum[g][i]);
      }
    }
  }

  // Teams of a warp, then warps.
  const int warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    float all = most[g];
#pragma unroll
    for (int i = 16; i >= kLanes; i /= 2) all = fmaxf(all, __shfl_xor_sync(0xffffffffU, all, i));
    const float keep = all == -INFINITY ? 0.0F : exp2f(most[g] - all);
    total[g] *= keep;
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) sum[g][i] *= keep;
#pragma unroll
    for (int i = 16; i >= kLanes; i /= 2) {
      total[g] += __shfl_xor_sync(0xffffffffU, total[g], i);
#pragma unroll
      for (int n = 0; n < kPack<T>; ++n) sum[g][n] += __shfl_xor_sync(0xffffffffU, sum[g][n], i);
    }
    if (lane == 0) {
      stats[warp][g][0] = all;
      stats[warp][g][1] = total[g];
    }
    if (lane >= kLanes) continue;
#pragma unroll
    for (int n = 0; n < kPack<T>; ++n) sums[warp][g][column + n] = sum[g][n];
  }
  __syncthreads();
  for (int i = thread; i < at.num_heads * p.head_dim; i += kThreads) {
    const int g = i / p.head_dim, d = i % p.head_dim;
    float all = -INFINITY, weights = 0, x = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all = fmaxf(all, stats[w][g][0]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float keep = all == -INFINITY ? 0.0F : exp2f(stats[w][g][0] - all);
      weights += keep * stats[w][g][1];
      x += keep * sums[w][g][d];
    }
    const std::int64_t of_head = at.row * p.heads + at.first_head + g;
    if (p.splits == 1) {
      store(static_cast<T*>(p.mixed) + of_head * p.head_dim + d, x / weights);
      continue;
    }
    const std::int64_t part = of_head * p.splits + split;
    p.parts[part * p.head_dim + d] = x;
    if (d == 0) {
      p.stats[2 * part] = all;
      p.stats[2 * part + 1] = weights;
    }
  }
}

}  // namespace switchyard::models::gpu
