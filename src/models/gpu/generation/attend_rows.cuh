#pragma once

// Attention of a few rows over a cache. A team of neighbouring threads has a position, each thread
// 16 bytes of its key and value, which it copies to shared memory for itself two turns ahead; teams
// have running maxima and sums of their own, which meet at the end: in a warp by shuffles, then in
// shared memory. All is f32 but what is read and written.

#include "core/gpu/ptx.cuh"
#include "models/gpu/generation/stages.hpp"
#include "models/gpu/launch.cuh"
#include "models/gpu/stages.hpp"

namespace switchyard::models::gpu {

inline constexpr int kAttendTogether = 2;  ///< Positions of a team in a turn,
inline constexpr int kAttendAhead = 3;     ///< and turns that are under way.
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

template <typename T>
__device__ __forceinline__ float rounded(float x) {
  T y;
  store(&y, x);
  return to_float(y);
}

/// What a block of kWarps warps shares while it attends.
template <typename T, int kLanes, int kGroup, int kWarps>
struct AttendRoom {
  static constexpr int kSize = kLanes * kPack<T>;
  float queries[kGroup][kSize];
  float sums[kWarps][kGroup][kSize];
  float most[kGroup][kWarps], total[kGroup][kWarps];
  int4 fresh[2][kLanes];  ///< The row's own key and value.
  int4 ahead[kAttendAhead][2][kAttendTogether][32 * kWarps];
};

/// An item of attend(), a stretch of its positions: kLanes threads have a position; kGroup heads of
/// queries share what is read. What does not depend on the row can be asked for before it is there:
/// the angles, and turns of positions that are cached. Where other blocks are waited for then, the
/// first turn alone: who waits reads behind what has been asked for. The room may be used again
/// behind a barrier.
template <typename T, int kLanes, int kGroup, int kWarps>
class AttendBlock {
 public:
  using Room = AttendRoom<T, kLanes, kGroup, kWarps>;

  __device__ __forceinline__ AttendBlock(const AttendArgs& args, int index, int split, Room& room)
      : p_(args), room_(room), at_(find_attend_item<kGroup>(args, index)), split_(split) {
    const int length = at_.position + 1, each = (length + p_.splits - 1) / p_.splits;
    begin_ = split * each;
    const int end = min(length, begin_ + each);
    appends_ = p_.qkv != nullptr && begin_ <= at_.position && at_.position < end;
    end_ = appends_ ? at_.position : end;
    const std::int64_t head = (at_.sequence * p_.kv_heads + at_.kv_head) * p_.cache.capacity;
    const std::int64_t at = head * p_.cache.row + (column() < p_.cache.row ? column() : 0);
    keys_ = static_cast<const T*>(p_.cache.keys) + at;
    values_ = static_cast<const T*>(p_.cache.values) + at;
    load_angles();
  }

  /// The row need not be there yet.
  __device__ __forceinline__ void ask_first(int turns) {
    for (; asked_ < turns; ++asked_) ask(asked_);
  }

  __device__ __forceinline__ void run() {
    load_row();
    ask_first(kAttendAhead);
    prepare();
    __syncthreads();
    const float scale = kLog2e / sqrtf(static_cast<float>(p_.head_dim));
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      most_[g] = -INFINITY;
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) q_[g][i] = room_.queries[g][column() + i] * scale;
    }
#pragma unroll 1
    for (int turn = 0; is_turn(turn); ++turn) {
      ptx::cp_async_wait<kAttendAhead - 1>();
      int4 k[kAttendTogether], v[kAttendTogether];
      bool there[kAttendTogether];
#pragma unroll
      for (int j = 0; j < kAttendTogether; ++j) {
        const int i = position(turn, j);
        const bool own = appends_ && i == at_.position;
        auto& ahead = room_.ahead[turn % kAttendAhead];
        k[j] = own ? room_.fresh[0][thread() % kLanes] : ahead[0][j][thread()];
        v[j] = own ? room_.fresh[1][thread() % kLanes] : ahead[1][j][thread()];
        there[j] = own || i < end_;
      }
      add(k, v, there);
      ask(turn + kAttendAhead);
    }
    ptx::cp_async_wait<0>();
    meet();
    __syncthreads();
    write();
  }

 private:
  static constexpr int kThreads = 32 * kWarps, kTeams = kThreads / kLanes;
  static constexpr int kOfTurn = kTeams * kAttendTogether;
  static_assert(kGroup + 2 <= kWarps);

  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ __forceinline__ int column() { return thread() % kLanes * kPack<T>; }
  [[nodiscard]] __device__ __forceinline__ int position(int turn, int j) const {
    return begin_ + turn * kOfTurn + j * kTeams + thread() / kLanes;
  }
  [[nodiscard]] __device__ __forceinline__ bool is_turn(int turn) const {
    return begin_ + turn * kOfTurn < end_ + (appends_ ? 1 : 0);
  }
  /// This thread's part of a turn's positions; zeros where there are none.
  __device__ __forceinline__ void ask(int turn) {
    if (is_turn(turn)) {
      const bool inside = column() < p_.cache.row;
      auto& to = room_.ahead[turn % kAttendAhead];
#pragma unroll
      for (int j = 0; j < kAttendTogether; ++j) {
        const int i = position(turn, j);
        const bool there = inside && i < end_;
        const int from = there ? i * static_cast<int>(p_.cache.row) : 0;
        const std::uint32_t bytes = there ? 16 : 0;
        ptx::cp_async_16(ptx::shared_address(&to[0][j][thread()]), keys_ + from, bytes);
        ptx::cp_async_16(ptx::shared_address(&to[1][j][thread()]), values_ + from, bytes);
      }
    }
    ptx::cp_async_commit();
  }

  // ---- the row: a warp has a head of queries, the next ones its key and its value ----

  [[nodiscard]] __device__ __forceinline__ bool turns_query() const {
    return thread() / 32 < at_.num_heads;
  }
  [[nodiscard]] __device__ __forceinline__ bool turns_key() const {
    return appends_ && thread() / 32 == kGroup;
  }
  __device__ __forceinline__ void load_angles() {
    if (p_.qkv == nullptr || (!turns_query() && !turns_key())) return;
    const int half = p_.head_dim / 2;
    const std::int64_t angle = std::int64_t{at_.position} * half;
    const float* const weight = turns_key() ? p_.k_weight : p_.q_weight;
#pragma unroll
    for (int j = 0; j < kAttendPairs; ++j) {
      const int i = thread() % 32 + 32 * j;
      if (i >= half) continue;
      cosine_[j] = p_.cosine[angle + i];
      sine_[j] = p_.sine[angle + i];
      weight_[j][0] = weight == nullptr ? 1.0F : weight[i];
      weight_[j][1] = weight == nullptr ? 1.0F : weight[half + i];
    }
  }
  /// The head that this warp turns, or the row's value.
  __device__ __forceinline__ void load_row() {
    const bool has_value = appends_ && thread() / 32 == kGroup + 1;
    if (p_.qkv == nullptr || !(turns_query() || turns_key() || has_value)) return;
    int head = at_.first_head + thread() / 32;
    if (turns_key()) head = p_.heads + at_.kv_head;
    if (has_value) head = p_.heads + p_.kv_heads + at_.kv_head;
    const std::int64_t heads = p_.heads + std::int64_t{2} * p_.kv_heads;
    const T* const x = static_cast<const T*>(p_.qkv) + (at_.row * heads + head) * p_.head_dim;
    const int half = p_.head_dim / 2;
#pragma unroll
    for (int j = 0; j < kAttendPairs; ++j) {
      const int i = thread() % 32 + 32 * j;
      if (i >= half) continue;
      row_[j][0] = x[i];
      row_[j][1] = x[half + i];
    }
  }
  /// A warp normalises and turns its head, as rope() does but for the order of the squares' sum.
  template <class Store>
  __device__ __forceinline__ void turn_head(bool normed, const Store& put) const {
    const int lane = thread() % 32, half = p_.head_dim / 2;
    float a[kAttendPairs] = {}, b[kAttendPairs] = {};
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kAttendPairs; ++j) {
      const int i = lane + 32 * j;
      if (i >= half) continue;
      a[j] = to_float(row_[j][0]);
      b[j] = to_float(row_[j][1]);
      squares += a[j] * a[j] + b[j] * b[j];
    }
    if (normed) {
      const float mean = warp_sum(squares) / static_cast<float>(p_.head_dim);
      const float scale = 1.0F / sqrtf(mean + p_.epsilon);
#pragma unroll
      for (int j = 0; j < kAttendPairs; ++j) {
        a[j] *= scale * weight_[j][0];
        b[j] *= scale * weight_[j][1];
      }
    }
#pragma unroll
    for (int j = 0; j < kAttendPairs; ++j) {
      const int i = lane + 32 * j;
      if (i >= half) continue;
      put(i, a[j] * cosine_[j] - b[j] * sine_[j]);
      put(half + i, b[j] * cosine_[j] + a[j] * sine_[j]);
    }
  }
  /// Queries into shared memory, rounded as rope() leaves them; where the row's own position is in
  /// the stretch its key and value there and into the cache.
  __device__ __forceinline__ void prepare() {
    const int warp = thread() / 32, lane = thread() % 32, dim = p_.head_dim;
    const int of_both = p_.heads + p_.kv_heads;
    if (warp < kGroup) {
      float* const q = room_.queries[warp];
      for (int i = lane; i < Room::kSize; i += 32) {
        if (i >= dim || !turns_query()) q[i] = 0;
      }
      if (!turns_query()) return;
      const int head = at_.first_head + warp;
      if (p_.qkv == nullptr) {
        const T* const x = static_cast<const T*>(p_.turned) + (at_.row * of_both + head) * dim;
        for (int i = lane; i < dim; i += 32) q[i] = to_float(x[i]);
        return;
      }
      turn_head(p_.q_weight != nullptr, [&](int i, float v) { q[i] = rounded<T>(v); });
      return;
    }
    if (!appends_ || warp > kGroup + 1) return;
    const std::int64_t to =
        ((at_.sequence * p_.kv_heads + at_.kv_head) * p_.cache.capacity + at_.position) *
        p_.cache.row;
    T* const fresh = reinterpret_cast<T*>(room_.fresh[warp - kGroup]);
    for (int i = dim + lane; i < Room::kSize; i += 32) fresh[i] = T(0.0F);
    if (warp == kGroup) {
      T* const key = static_cast<T*>(p_.cache.keys) + to;
      turn_head(p_.k_weight != nullptr, [&](int i, float v) {
        store(key + i, v);
        store(fresh + i, v);
      });
    } else {
      T* const value = static_cast<T*>(p_.cache.values) + to;
#pragma unroll
      for (int j = 0; j < kAttendPairs; ++j) {
        const int i = lane + 32 * j, half = dim / 2;
        if (i >= half) continue;
        value[i] = fresh[i] = row_[j][0];
        value[half + i] = fresh[half + i] = row_[j][1];
      }
    }
  }

  // ---- scores and sums ----

  __device__ __forceinline__ void add(const int4 (&k)[kAttendTogether],
                                      const int4 (&v)[kAttendTogether],
                                      const bool (&there)[kAttendTogether]) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      float score[kAttendTogether], now = most_[g];
#pragma unroll
      for (int j = 0; j < kAttendTogether; ++j) {
        float key[kPack<T>], dot = 0;
        unpack16(k[j], key, T{});
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) dot = fmaf(q_[g][i], key[i], dot);
#pragma unroll
        for (int i = kLanes / 2; i > 0; i /= 2) dot += __shfl_xor_sync(0xffffffffU, dot, i);
        score[j] = there[j] ? dot : -INFINITY;
        now = fmaxf(now, score[j]);
      }
      const float against = now == -INFINITY ? 0.0F : now;  // a team without a position yet
      const float keep = exp2f(most_[g] - against);
      most_[g] = now;
      total_[g] *= keep;
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) sum_[g][i] *= keep;
#pragma unroll
      for (int j = 0; j < kAttendTogether; ++j) {
        float value[kPack<T>];
        unpack16(v[j], value, T{});
        const float share = exp2f(score[j] - against);
        total_[g] += share;
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) sum_[g][i] = fmaf(share, value[i], sum_[g][i]);
      }
    }
  }

  /// Teams of a warp, into shared memory.
  __device__ __forceinline__ void meet() {
    const int warp = thread() / 32, lane = thread() % 32;
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      float all = most_[g];
#pragma unroll
      for (int i = 16; i >= kLanes; i /= 2) all = fmaxf(all, __shfl_xor_sync(0xffffffffU, all, i));
      const float keep = all == -INFINITY ? 0.0F : exp2f(most_[g] - all);
      total_[g] *= keep;
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) sum_[g][i] *= keep;
#pragma unroll
      for (int i = 16; i >= kLanes; i /= 2) {
        total_[g] += __shfl_xor_sync(0xffffffffU, total_[g], i);
#pragma unroll
        for (int n = 0; n < kPack<T>; ++n) {
          sum_[g][n] += __shfl_xor_sync(0xffffffffU, sum_[g][n], i);
        }
      }
      if (lane == 0) {
        room_.most[g][warp] = all;
        room_.total[g][warp] = total_[g];
      }
      if (lane >= kLanes) continue;
#pragma unroll
      for (int n = 0; n < kPack<T>; ++n) room_.sums[warp][g][column() + n] = sum_[g][n];
    }
  }
  /// Of all warps, to memory: eight lanes share an output.
  __device__ __forceinline__ void write() const {
    constexpr int kShare = 8, kEach = kWarps / kShare;
    const int part = thread() % kShare, outs = at_.num_heads * p_.head_dim;
    const auto of_lanes = [](float x, const auto& both) {
#pragma unroll
      for (int i = 1; i < kShare; i *= 2) x = both(x, __shfl_xor_sync(0xffffffffU, x, i));
      return x;
    };
    const auto sum = [](float a, float b) { return a + b; };
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
#pragma unroll 1
    for (int i = thread() / kShare; i < (outs + 3) / 4 * 4; i += kThreads / kShare) {
      const int out = min(i, outs - 1), g = out / p_.head_dim, d = out - g * p_.head_dim;
      float all = -INFINITY, weights = 0, x = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) all = fmaxf(all, room_.most[g][kEach * part + j]);
      all = of_lanes(all, larger);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int w = kEach * part + j;
        const float keep = all == -INFINITY ? 0.0F : exp2f(room_.most[g][w] - all);
        weights += keep * room_.total[g][w];
        x += keep * room_.sums[w][g][d];
      }
      weights = of_lanes(weights, sum);
      x = of_lanes(x, sum);
      if (part != 0 || i >= outs) continue;
      const std::int64_t of_head = at_.row * p_.heads + at_.first_head + g;
      if (p_.splits == 1) {
        store(static_cast<T*>(p_.mixed) + of_head * p_.head_dim + d, x / weights);
        continue;
      }
      const std::int64_t to = of_head * p_.splits + split_;
      p_.parts[to * p_.head_dim + d] = x;
      if (d == 0) {
        p_.stats[2 * to] = all;
        p_.stats[2 * to + 1] = weights;
      }
    }
  }

  const AttendArgs& p_;
  Room& room_;
  AttendItem at_;
  int split_, asked_ = 0;  ///< Turns that have been asked for.
  int begin_, end_;        ///< Positions [begin, end) are read from the cache,
  bool appends_;           ///< and the row's own behind them.
  const T* keys_;
  const T* values_;
  float cosine_[kAttendPairs] = {}, sine_[kAttendPairs] = {}, weight_[kAttendPairs][2] = {};
  T row_[kAttendPairs][2];
  float q_[kGroup][kPack<T>], sum_[kGroup][kPack<T>] = {};
  float most_[kGroup], total_[kGroup] = {};
};

}  // namespace switchyard::models::gpu
