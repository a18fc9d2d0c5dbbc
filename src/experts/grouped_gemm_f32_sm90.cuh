#pragma once

// Grouped GEMM of f32 experts on Hopper: out[row] = epilogue(W[e] a[row]), three products of TF32
// terms, the weights as the M side.
//
// Up to 64 rows an expert it is bound by the memory the weights come from, above by the tensor
// cores. A CTA takes 256 rows of weights (128 gate and 128 up ones when gated) by a strip of up to
// 64 token rows: one warp loads weights by TMA, two chunks of 32 values at a time (256 bytes in a
// row of memory), three warps load token rows and split them into both terms in shared memory, two
// warpgroups split weights in registers and multiply 2 x 64 rows each. The tensor cores truncate as
// they add: their sums are of 32 values only, the rest is added outside.

#include "core/wgmma_tf32.cuh"
#include "experts/grouped_epilogue.cuh"
#include "experts/grouped_scheduler.cuh"

namespace switchyard::f32_sm90 {

constexpr int kThreads = 384;
constexpr int kSplitThreads = 96;
constexpr int kSplitRegisters = 72;
constexpr int kMultiplyRegisters = 216;
constexpr int kChunk = 32;  // values along the sum: 128 bytes, one swizzled row
constexpr int kRowBytes = 128;
constexpr int kTileM = 256;
constexpr int kHalfM = kTileM / 2;
constexpr int kWeightStages = 6;
constexpr int kWeightBytes = kTileM * kRowBytes;
constexpr int kTokenStages = 2;
constexpr int kTermBytes = StripCut::kRows * kRowBytes;
constexpr int kTokenBytes = 2 * kTermBytes;
// The loading warp may be as many units ahead as there are stages, and one more is announced.
constexpr int kUnitSlots = 16;

constexpr int kTokensAt = kWeightStages * kWeightBytes;
constexpr int kUnitsAt = kTokensAt + kTokenStages * kTokenBytes;
constexpr int kBarriersAt = kUnitsAt + kUnitSlots * 16;
constexpr int kSharedBytes = kBarriersAt + (2 * kWeightStages + 2 * kTokenStages + kUnitSlots) * 8;
static_assert(kSharedBytes <= 232448, "more shared memory than a CTA can have");
static_assert((kSplitRegisters + 2 * kMultiplyRegisters) * 128 <= 65536);

struct Params {
  ScheduleParams schedule;
  EpilogueParams epilogue;
  const float* rows;              // [N or S, depth]
  const std::int32_t* row_token;  // [S], or null
  std::int32_t depth;
  std::int32_t weight_rows;  // of one expert
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

/// Warps 1 to 3: both terms of the token rows. A thread takes 16 values of a row and lays them out
/// as the registers of the weights ask: lane t of those holds values 4t to 4t + 3 of 16.
__device__ __forceinline__ void run_splitter(const Context& context) {
  constexpr int kTasks = (2 * StripCut::kRows + kSplitThreads - 1) / kSplitThreads;
  const Params& params = context.params;
  const int thread = static_cast<int>(threadIdx.x) - 32;
  Cursor cursor;
  for (std::uint32_t index = 0;; ++index) {
    const Work work = context.receive(index);
    if (work.expert < 0) return;
    const float* from[kTasks];
    float4 q[kTasks][4];
    const auto fetch = [&](int chunk) {
#pragma unroll
      for (int task = 0; task < kTasks; ++task) {
        const int k = chunk * kChunk + (thread & 1) * 16;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          q[task][t] = make_float4(0, 0, 0, 0);
          if (from[task] != nullptr && k + 4 * t < params.depth) {
            q[task][t] = *reinterpret_cast<const float4*>(from[task] + k + 4 * t);
          }
        }
      }
    };
#pragma unroll
    for (int task = 0; task < kTasks; ++task) {
      const int row = (thread + task * kSplitThreads) / 2;
      from[task] = nullptr;
      if (row < work.tile.rows) {
        const std::int64_t at = work.tile.row + row;
        const std::int64_t token = params.row_token == nullptr ? at : params.row_token[at];
        from[task] = params.rows + token * params.depth;
      }
    }
    fetch(0);
    for (int chunk = 0; chunk < context.num_chunks; ++chunk) {
      ptx::mbarrier_wait(context.tokens_empty(cursor), cursor.phase ^ 1);
#pragma unroll
      for (int task = 0; task < kTasks; ++task) {
        const int row = (thread + task * kSplitThreads) / 2;
        if (from[task] == nullptr) continue;
        const auto piece = [&](int c, float v0, float v1, float v2, float v3) {
          const float value[4] = {v0, v1, v2, v3};
          float high[4];
          float low[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            high[i] = __uint_as_float(__float_as_uint(value[i]) & 0xffffe000U);
            low[i] = value[i] - high[i];
          }
          const int place = (thread & 1) * 4 + c;
          const std::uint32_t to = context.tokens(cursor) +
                                   static_cast<std::uint32_t>(row * kRowBytes) +
                                   static_cast<std::uint32_t>((place ^ (row & 7)) << 4);
          ptx::store_shared_16(to, high);
          ptx::store_shared_16(to + kTermBytes, low);
        };
        piece(0, q[task][0].x, q[task][1].x, q[task][2].x, q[task][3].x);
        piece(1, q[task][0].y, q[task][1].y, q[task][2].y, q[task][3].y);
        piece(2, q[task][0].z, q[task][1].z, q[task][2].z, q[task][3].z);
        piece(3, q[task][0].w, q[task][1].w, q[task][2].w, q[task][3].w);
      }
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(context.tokens_full(cursor));
      cursor.advance<kTokenStages>();
      if (chunk + 1 < context.num_chunks) fetch(chunk + 1);
    }
  }
}

}  // namespace switchyard::f32_sm90
