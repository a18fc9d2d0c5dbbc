#pragma once

// Grouped GEMM of f32 experts on Hopper: out[row] = epilogue(W[e] a[row]), three products of TF32
// terms, the weights as the M side.
//
// Up to 64 rows an expert it is bound by the memory the weights come from, above by the tensor
// cores. A CTA takes 256 rows of weights (128 gate and 128 up ones when gated) by a strip of up to
// 64 token rows: one warp loads weights by TMA, two chunks of 32 values at a time (256 bytes in a
// row of memory), three warps fetch token rows by cp.async, three chunks ahead, and split them into
// both terms in shared memory, two warpgroups split weights in registers and multiply 2 x 64 rows
// each. The tensor cores truncate as they add: their sums are of 32 values only, the rest is added
// outside.

#include "core/gpu/register_pool.hpp"
#include "core/gpu/wgmma_tf32.cuh"
#include "experts/gpu/grouped/epilogue.cuh"
#include "experts/gpu/grouped/scheduler.cuh"

namespace switchyard::f32_sm90 {

constexpr int kThreads = 384;
constexpr int kSplitThreads = 96;
constexpr int kSplitRegisters = 88;
constexpr int kMultiplyRegisters = 208;
constexpr int kChunk = 32;  // values along the sum: 128 bytes, one swizzled row
constexpr int kRowBytes = 128;
constexpr int kTileM = 256;
constexpr int kHalfM = kTileM / 2;
constexpr int kWeightStages = 5;
constexpr int kWeightBytes = kTileM * kRowBytes;
constexpr int kTokenStages = 2;
constexpr int kTermBytes = StripCut::kRows * kRowBytes;
constexpr int kTokenBytes = 2 * kTermBytes;
constexpr int kRawStages = 4;  // of token rows as they come
// The loading warp may be as many units ahead as there are stages, and one more is announced.
constexpr int kUnitSlots = 16;

constexpr int kTokensAt = kWeightStages * kWeightBytes;
constexpr int kRawAt = kTokensAt + kTokenStages * kTokenBytes;
constexpr int kUnitsAt = kRawAt + kRawStages * kTermBytes;
constexpr int kBarriersAt = kUnitsAt + kUnitSlots * 16;
constexpr int kSharedBytes = kBarriersAt + (2 * kWeightStages + 2 * kTokenStages + kUnitSlots) * 8;
static_assert(kSharedBytes <= 232448, "more shared memory than a CTA can have");
static_assert((kSplitRegisters + 2 * kMultiplyRegisters) * 128 <= launch_registers(kThreads));

struct Params {
  ScheduleParams schedule;
  EpilogueParams epilogue;
  const float* rows;              // [N or S, depth]
  const std::int32_t* row_token;  // [S], or null
  std::int32_t depth;
  std::int32_t weight_rows;  // of one expert
  float* preactivation;      // [S, weight_rows], of the epilogues that keep it
};

struct Cursor {
  std::uint32_t stage = 0;
  std::uint32_t phase = 0;
  template <int kStages>
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

/// What every role knows.
struct Context {
  const Params& params;
  std::uint32_t shared;
  int num_chunks;

  __device__ std::uint32_t weights(const Cursor& c) const {
    return shared + c.stage * kWeightBytes;
  }
  __device__ std::uint32_t tokens(const Cursor& c) const {
    return shared + kTokensAt + c.stage * kTokenBytes;
  }
  __device__ std::uint32_t weights_full(const Cursor& c) const { return barrier(2 * c.stage); }
  __device__ std::uint32_t weights_empty(const Cursor& c) const { return barrier(2 * c.stage + 1); }
  __device__ std::uint32_t tokens_full(const Cursor& c) const {
    return barrier(2 * (kWeightStages + c.stage));
  }
  __device__ std::uint32_t tokens_empty(const Cursor& c) const {
    return barrier(2 * (kWeightStages + c.stage) + 1);
  }
  __device__ std::uint32_t unit_known(std::uint32_t index) const {
    return barrier(2 * (kWeightStages + kTokenStages) + index % kUnitSlots);
  }
  __device__ std::uint32_t unit(std::uint32_t index) const {
    return shared + kUnitsAt + index % kUnitSlots * 16;
  }
  __device__ std::uint32_t barrier(std::uint32_t i) const { return shared + kBarriersAt + i * 8; }

  /// One thread, before all others begin.
  __device__ void init() const {
    Cursor c;
    for (; c.stage < kWeightStages; ++c.stage) {
      ptx::mbarrier_init(weights_full(c), 1);
      ptx::mbarrier_init(weights_empty(c), 8);
    }
    for (c.stage = 0; c.stage < kTokenStages; ++c.stage) {
      ptx::mbarrier_init(tokens_full(c), kSplitThreads);
      ptx::mbarrier_init(tokens_empty(c), 8);
    }
    for (std::uint32_t i = 0; i < kUnitSlots; ++i) ptx::mbarrier_init(unit_known(i), 1);
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ void announce(std::uint32_t index, const int4& message) const {
    if (threadIdx.x % 32 != 0) return;
    ptx::store_shared_16(unit(index), message);
    ptx::mbarrier_arrive(unit_known(index));
  }
  __device__ __forceinline__ Work receive(std::uint32_t index) const {
    ptx::mbarrier_wait(unit_known(index), index / kUnitSlots % 2);
    const int4 m = ptx::load_shared_16(unit(index));
    return {m.x, {m.y, m.z, m.w / 4, false}};
  }
};

/// Warp 0: hands out units and loads their weights.
template <bool kGated>
__device__ __forceinline__ void run_loader(const Context& context, const CUtensorMap* map) {
  UnitWalk<1, StripCut> walk(context.params.schedule, static_cast<std::int32_t>(blockIdx.x),
                             static_cast<std::int32_t>(gridDim.x));
  const std::uint64_t policy = ptx::policy_evict_first();
  constexpr int kOutColumns = kGated ? kHalfM : kTileM;
  Cursor cursor;
  const auto load = [&](const Cursor& c, int chunk, int half, int row) {
    ptx::tma_load_2d(context.weights(c) + half * kHalfM * kRowBytes, map, chunk * kChunk, row,
                     context.weights_full(c), policy);
  };
  int4 next = walk.next();
  for (std::uint32_t index = 0;; ++index) {
    const int4 unit = next;
    context.announce(index, unit);
    if (unit.x < 0) return;
    next = walk.next();
    if (threadIdx.x == 0) {
      const int first = unit.x * context.params.weight_rows + unit.w / 4 * kOutColumns;
      const int second = first + (kGated ? context.params.epilogue.columns : kHalfM);
      for (int chunk = 0; chunk < context.num_chunks; chunk += 2) {
        const bool two = chunk + 1 < context.num_chunks;
        const Cursor a = cursor;
        ptx::mbarrier_wait(context.weights_empty(a), a.phase ^ 1);
        cursor.advance<kWeightStages>();
        const Cursor b = cursor;
        if (two) {
          ptx::mbarrier_wait(context.weights_empty(b), b.phase ^ 1);
          ptx::mbarrier_arrive_expect(context.weights_full(b), kWeightBytes);
          cursor.advance<kWeightStages>();
        }
        ptx::mbarrier_arrive_expect(context.weights_full(a), kWeightBytes);
        load(a, chunk, 0, first);
        if (two) load(b, chunk + 1, 0, first);
        load(a, chunk, 1, second);
        if (two) load(b, chunk + 1, 1, second);
      }
    }
    __syncwarp();
  }
}

/// Warps 1 to 3: both terms of the token rows.
class Splitter {
 public:
  __device__ explicit Splitter(const Context& context)
      : context_(context), thread_(static_cast<int>(threadIdx.x) - 32) {}

  __device__ __forceinline__ void run() {
    for (std::uint32_t index = 0;; ++index) {
      const Work work = context_.receive(index);
      if (work.expert < 0) return;
      aim(work);
      for (int chunk = 0; chunk < kRawStages - 1; ++chunk) fetch(chunk, work.tile.rows);
      for (int chunk = 0; chunk < context_.num_chunks; ++chunk) {
        ptx::cp_async_wait<kRawStages - 2>();
        // All threads' copies of this chunk are there, and all have read the last one.
        ptx::named_barrier(1, kSplitThreads);
        fetch(chunk + kRawStages - 1, work.tile.rows);
        ptx::mbarrier_wait(context_.tokens_empty(cursor_), cursor_.phase ^ 1);
        for (int task = thread_; task < 2 * work.tile.rows; task += kSplitThreads) {
          split(raw(chunk), task / 2, task % 2);
        }
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(context_.tokens_full(cursor_));
        cursor_.advance<kTokenStages>();
      }
      ptx::named_barrier(1, kSplitThreads);  // before the first chunks of the next unit
    }
  }

 private:
  static constexpr int kRowsAtOnce = kSplitThreads / 8;
  static constexpr int kTurns = (StripCut::kRows + kRowsAtOnce - 1) / kRowsAtOnce;

  [[nodiscard]] __device__ __forceinline__ std::uint32_t raw(int chunk) const {
    return context_.shared + kRawAt + static_cast<std::uint32_t>(chunk % kRawStages * kTermBytes);
  }
  static __device__ __forceinline__ std::uint32_t place(int row, int piece) {
    return static_cast<std::uint32_t>(row * kRowBytes + ((piece ^ (row & 7)) << 4));
  }

  /// Eight threads bring the 128 bytes of a row.
  __device__ __forceinline__ void aim(const Work& work) {
    const Params& params = context_.params;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const std::int32_t row = min(thread_ / 8 + turn * kRowsAtOnce, work.tile.rows - 1);
      const std::int64_t at = work.tile.row + row;
      const std::int64_t token = params.row_token == nullptr ? at : params.row_token[at];
      from_[turn] = params.rows + token * params.depth;
    }
  }
  __device__ __forceinline__ void fetch(int chunk, int rows) const {
    if (chunk < context_.num_chunks) {
      const int k = chunk * kChunk + thread_ % 8 * 4;
      const bool inside = k < context_.params.depth;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int row = thread_ / 8 + turn * kRowsAtOnce;
        if (row < rows) {
          ptx::cp_async_16(raw(chunk) + place(row, thread_ % 8), from_[turn] + (inside ? k : 0),
                           inside ? 16 : 0);
        }
      }
    }
    ptx::cp_async_commit();
  }

  /// 16 values of a row, laid out as the registers of the weights ask: lane t of those holds values
  /// 4t to 4t + 3.
  __device__ __forceinline__ void split(std::uint32_t from, int row, int half) const {
    int4 q[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) q[t] = ptx::load_shared_16(from + place(row, half * 4 + t));
    const auto piece = [&](int c, int v0, int v1, int v2, int v3) {
      const int value[4] = {v0, v1, v2, v3};
      float high[4];
      float low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        high[i] = __uint_as_float(static_cast<std::uint32_t>(value[i]) & 0xffffe000U);
        low[i] = __int_as_float(value[i]) - high[i];
      }
      const std::uint32_t to = context_.tokens(cursor_) + place(row, half * 4 + c);
      ptx::store_shared_16(to, high);
      ptx::store_shared_16(to + kTermBytes, low);
    };
    piece(0, q[0].x, q[1].x, q[2].x, q[3].x);
    piece(1, q[0].y, q[1].y, q[2].y, q[3].y);
    piece(2, q[0].z, q[1].z, q[2].z, q[3].z);
    piece(3, q[0].w, q[1].w, q[2].w, q[3].w);
  }

  const Context& context_;
  int thread_;
  Cursor cursor_;
  const float* from_[kTurns];
};

}  // namespace switchyard::f32_sm90
