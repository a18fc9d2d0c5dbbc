#pragma once

// Both halves of the experts of a few tokens in one kernel: the copies of w2 follow those of w13
// without a pause, where two kernels leave memory idle for some microseconds between them.
//
// Blocks claim items of the first half from a counter, so one that waits for rows of the
// intermediate waits only for blocks that run already: nothing depends on which of them are
// resident together. A hit's rows are there when all its items have been counted.

#include "experts/gpu/streaming/down.cuh"
#include "experts/gpu/streaming/up.cuh"
#include "plan/gpu/few.cuh"

namespace switchyard::streaming {

inline constexpr int kClaimSlots = 4;

/// Item numbers on their way from the warp that claims them to those that work on them; -1: no
/// more.
struct Claims {
  std::uint32_t barriers;
  volatile int* items;
  __device__ __forceinline__ std::uint32_t full(int slot) const { return barriers + 16 * slot; }
  __device__ __forceinline__ std::uint32_t empty(int slot) const { return full(slot) + 8; }
};

__device__ __forceinline__ void init_claims(const Claims& claims) {
  for (int slot = 0; slot < kClaimSlots; ++slot) {
    ptx::mbarrier_init(claims.full(slot), 1);
    ptx::mbarrier_init(claims.empty(slot), UsualCrew::kWarps - 1);
  }
}

// The copies that follow are far more than an item has: none of them lets the next kernel in.
inline constexpr int kManyItems = 1 << 16;

/// Where the weight warp has its items from; the others are told.
struct ClaimedItems {
  const Claims& claims;
  StreamingSync* sync;
  int first;  // lane 0 has claimed it
  int num_items;

  template <typename Body>
  __device__ __forceinline__ void for_each(Body&& body) const {
    const bool leads = threadIdx.x % 32 == 0;
    Cursor at;
    int mine = first;
    while (true) {
      const int i = __shfl_sync(~0U, mine, 0);
      ptx::mbarrier_wait(claims.empty(at.slot), at.phase ^ 1);
      if (leads) {
        claims.items[at.slot] = i < num_items ? i : -1;
        ptx::mbarrier_arrive(claims.full(at.slot));
      }
      __syncwarp();
      at.advance(kClaimSlots);
      if (i >= num_items) {
        // The last claim of all: the next kernel claims only after every block has come by.
        if (leads && i == num_items + static_cast<int>(gridDim.x) - 1) {
          atomicExch(&sync->claimed, 0U);
          __threadfence();
        }
        return;
      }
      // The answer comes while this item is fetched.
      if (leads) mine = static_cast<int>(atomicAdd(&sync->claimed, 1U));
      body(i, kManyItems);
    }
  }
};

struct ToldItems {
  const Claims& claims;

  template <typename Body>
  __device__ __forceinline__ void for_each(Body&& body) const {
    Cursor at;
    while (true) {
      ptx::mbarrier_wait(claims.full(at.slot), at.phase);
      const int i = claims.items[at.slot];
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(claims.empty(at.slot));
      at.advance(kClaimSlots);
      if (i < 0) return;
      body(i, 0);
    }
  }
};

/// Tells all blocks that an item of the hit is stored; the whole warp calls it.
__device__ __forceinline__ void count_item(StreamingSync* sync, int hit) {
  ptx::fence_proxy_async_global();  // they read it by bulk copies
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::add_release(&sync->stored[hit], 1U);
}

/// Waits for hits in ascending order; the whole warp calls it. One trip to the L2 cache tells of 32
/// hits: a trip for each would take as long as their weights.
struct StoredHits {
  const StreamingSync* sync;
  int items_of_hit;
  int num_hits;
  int ready = 0;  // hits before this one are stored
  __device__ __forceinline__ void operator()(int hit) {
    if (hit < ready) return;
    do {
      const int mine = ready + static_cast<int>(threadIdx.x) % 32;
      const bool stored = mine < num_hits && ptx::load_acquire(&sync->stored[mine]) ==
                                                 static_cast<std::uint32_t>(items_of_hit);
      const unsigned missing = ~__ballot_sync(~0U, stored);
      ready += missing == 0 ? 32 : __ffs(static_cast<int>(missing)) - 1;
    } while (hit >= ready);
    __syncwarp();
    ptx::fence_proxy_async_global();
  }
};

/// This block waits for nothing any more; the last one puts the counters back to zero.
__device__ __forceinline__ void leave(StreamingSync* sync, int num_hits) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  unsigned left = 0;
  if (lane == 0) left = atomicAdd(&sync->left, 1U);
  left = __shfl_sync(~0U, left, 0);
  if (left != gridDim.x - 1) return;
  __threadfence();
  for (int hit = lane; hit < num_hits; hit += 32) sync->stored[hit] = 0;
  if (lane == 0) sync->left = 0;
}

/// What a block knows of the plan in its shared memory.
struct PlanHere {
  int* experts;          // [assignments]
  std::int32_t* tokens;  // of each row
  std::int32_t* begins;
  Term* terms;
};

/// The plan of a few assignments, made by every block for itself; the first also writes it where
/// others read it. All threads of the block call it; the block's next barrier completes it.
__device__ __forceinline__ void make_plan_here(const WholeArgs& args, const PlanHere& here) {
  const planning::PlanParams& p = args.plan;
  const int thread = static_cast<int>(threadIdx.x);
  const int count = p.num_tokens * p.top_k;
  planning::Item item{};
  if (thread < count) {
    item = planning::load_item(p, thread, true);
    if (blockIdx.x == 0) planning::count_bad_id(p, thread, true);
    here.experts[thread] = item.expert < 0 ? planning::kNoExpert : item.expert;
  }
  __syncthreads();
  if (thread >= count) return;
  const planning::FewPlace at = planning::place_among(here.experts, thread, count, p.top_k);
  if (blockIdx.x == 0) planning::store_few(p, thread, at, item);
  const int token = thread / p.top_k;
  if (thread == token * p.top_k) here.begins[token] = at.listed;
  if (thread == 0) here.begins[p.num_tokens] = at.all;
  if (item.expert < 0) return;
  here.tokens[at.row] = token;
  here.terms[at.listed + at.place] = {item.weight, at.row | group_of(args.down, item.expert) << 24};
}

__device__ __forceinline__ ExpertRows rows_here(const WholeArgs& args, const int* experts,
                                                int expert) {
  const planning::FewRows rows =
      planning::rows_among(experts, expert, args.plan.num_tokens * args.plan.top_k);
  if (blockIdx.x == 0) {
    args.plan.expert_begin[expert] = rows.before;
    args.plan.expert_rows[expert] = rows.count;
    if (expert == args.plan.num_experts - 1) {
      args.plan.expert_begin[expert + 1] = rows.before + rows.count;
    }
  }
  return {rows.before, rows.count};
}

template <typename T, int kUpTiles, int kDownTiles, bool kByItem>
__global__ void __launch_bounds__(UsualCrew::kThreads, 2)
    streaming_whole_kernel(const __grid_constant__ WholeArgs args) {
  static_assert(kUpTiles <= 2);
  extern __shared__ __align__(128) unsigned char shared[];
  Hit* up_hits = reinterpret_cast<Hit*>(shared + args.up.hits_at);
  Hit* down_hits = reinterpret_cast<Hit*>(shared + args.down.hits_at);
  std::int32_t* tokens = reinterpret_cast<std::int32_t*>(shared + args.up.tokens_at);
  float4* parts = reinterpret_cast<float4*>(shared + args.up.parts_at);
  unsigned char* row_group = shared + args.down.groups_at;
  std::int32_t* begins = reinterpret_cast<std::int32_t*>(shared + args.down.begins_at);
  Term* terms = reinterpret_cast<Term*>(shared + args.down.terms_at);
  T* y = reinterpret_cast<T*>(shared + args.down.y_at);
  const Ring ring{shared + args.up.ring_at, ptx::shared_address(shared),
                  ptx::shared_address(shared + args.up.ring_at), args.up.pieces.num_stages,
                  args.up.pieces.stage_bytes};
  const Claims claims{ptx::shared_address(shared + args.claims_at),
                      reinterpret_cast<int*>(shared + args.claims_at + 16 * kClaimSlots)};
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int first = 0;
  if (threadIdx.x == 32 * UsualCrew::kWeightWarp) {
    first = static_cast<int>(atomicAdd(&args.sync->claimed, 1U));
    ptx::prefetch_tensor_map(&args.up.w13_map[0]);
    ptx::prefetch_tensor_map(&args.down.w2_map[0][0]);
    ptx::prefetch_tensor_map(&args.down.w2_map[1][0]);
  }
  if (threadIdx.x == 0) {
    init_claims(claims);
    init_ring<true>(ring);
  }
  if (!args.up.plan_is_older) ptx::wait_for_previous_kernel();
  int* experts = reinterpret_cast<int*>(shared + args.experts_at);
  if (args.makes_plan) {
    make_plan_here(args, {experts, tokens, begins, terms});
  } else if (args.up.row_token != nullptr) {
    for (int r = static_cast<int>(threadIdx.x); r < args.up.max_rows; r += UsualCrew::kThreads) {
      tokens[r] = args.up.row_token[r];
    }
  }
  const int num_hits = for_each_hit(
      args.up.num_experts, args.up.pass_rows, reinterpret_cast<int*>(shared + kTotalsAt),
      [&](int expert) {
        if (args.makes_plan) return rows_here(args, experts, expert);
        return ExpertRows{args.up.expert_begin[expert], args.up.expert_rows[expert]};
      },
      [&](int at, int expert, const ExpertRows& rows) {
        up_hits[at] = make_hit(args.up.pieces, expert, rows);
        down_hits[at] = make_hit(args.down.pieces, expert, rows);
      });
  __syncthreads();
  const UpWork<T, kUpTiles> up(args.up, up_hits, num_hits);
  const DownWork<T, kDownTiles, kByItem> down(args.down, down_hits, num_hits);
  const ToldItems items{claims};
  Cursor cursor;
  Cursor part;
  if (warp == UsualCrew::kWeightWarp) {
    up_load_weights<T, kUpTiles, true>(
        args.up, up, ring, ClaimedItems{claims, args.sync, first, up.num_items}, cursor);
    down_load_weights<T, true>(args.down, down, ring, cursor);
  } else if (warp == UsualCrew::kTokenWarp) {
    ptx::wait_for_previous_kernel();  // for the tokens
    up_load_tokens<T, kUpTiles, true>(args.up, up, ring, tokens, items, cursor);
    down_load_tokens<T, true>(args.down, down, ring, StoredHits{args.sync, up.per_hit, num_hits},
                              cursor);
    leave(args.sync, num_hits);
  } else if (warp == UsualCrew::kFinishWarp) {
    ptx::wait_for_previous_kernel();  // until `act` is free
    if (args.makes_plan && blockIdx.x == 0 && threadIdx.x % 32 == 0) {
      report_plan(args.down.report, args.down.status, begins[args.plan.num_tokens]);
    }
    up_finish(
        args.up, up, ring, parts, items, [&](int hit) { count_item(args.sync, hit); }, part);
    down_finish(args.down, down, ring, parts, y, part);
  } else {
    if (!args.makes_plan) list_terms(args.down, down_hits, num_hits, row_group, begins, terms);
    up_multiply(args.up, up, ring, parts, items, cursor, part);
    down_multiply<T, kDownTiles, 4, kByItem>(args.down, down, ring, parts, y, cursor, part);
  }
  // All kernels before this one are complete now, also those that read `sums`.
  ptx::wait_for_previous_kernel();
  __syncthreads();
  add_up(args.down, Rows<T>{down.first_row, down.rows, begins, terms, y});
}

}  // namespace switchyard::streaming
