#pragma once

// The experts' index lists of what a rank has received, by the blocks of the dispatch itself while
// the rows are still on their way. Bound by latency: a few blocks, no barrier between them.

#include "comm/dispatch_counts.cuh"

namespace switchyard {

inline constexpr int kTeamWarps = 4;  // make the list of one expert
inline constexpr int kTeams = kExchangeWarps / kTeamWarps;

struct ListShared {
  std::int32_t less[kTeams][kTeamWarps];
  std::int32_t equal[kTeams][kTeamWarps];
};

/// What has come from each source, as one row of numbers: [begin[s], begin[s + 1]) are the
/// assignments of source s, and shift[s] away lie its first ids.
struct Arrived {
  int begin[kMaxDeviceRanks + 1];
  int shift[kMaxDeviceRanks];

  __device__ __forceinline__ Arrived(const DeviceExchangeParams& p, const ExchangeCounts& shared) {
    begin[0] = 0;
#pragma unroll
    for (int s = 0; s < kMaxDeviceRanks; ++s) {
      const bool there = s < p.layout.num_ranks;
      const int rows = there ? static_cast<int>(shared.counts[s * kMaxDeviceRanks + p.rank]) : 0;
      shift[s] = s * static_cast<int>(p.max_tokens) * p.layout.top_k - begin[s];
      begin[s + 1] = begin[s] + rows * p.layout.top_k;
    }
  }
  [[nodiscard]] __device__ __forceinline__ int size() const { return begin[kMaxDeviceRanks]; }
  /// Where assignment i lies among the ids of all places.
  [[nodiscard]] __device__ __forceinline__ int place(int i) const {
    int by = shift[0];
#pragma unroll
    for (int s = 1; s < kMaxDeviceRanks; ++s) by = i >= begin[s] ? shift[s] : by;
    return i + by;
  }
};

/// Waits for the other warps of the team.
__device__ __forceinline__ void meet_team(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kTeamWarps * 32) : "memory");
}

/// What a block keeps of the assignments that have come: the local expert of each.
struct ListedExperts {
  std::uint16_t* kept;  // [room] in shared memory
  int room;

  static constexpr std::uint16_t kElsewhere = 0xffff;
};

/// The whole block, all at once: as many as there is room for.
__device__ inline void keep_experts(const DeviceDispatchParams& args, const Arrived& arrived,
                                    const std::int32_t* ids, const ListedExperts& listed) {
  const int size = min(arrived.size(), listed.room);
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kExchangeThreads) {
    const std::int32_t id = ids[arrived.place(i)];
    listed.kept[i] = id < 0 ? ListedExperts::kElsewhere
                            : static_cast<std::uint16_t>(id - args.lists.first_expert);
  }
  __syncthreads();
}

/// The lists of every `blocks`-th team's experts, this block being number `block` of them: a stable
/// counting sort by expert, in which every team counts for itself how many assignments go before
/// its own.
__device__ inline void make_lists(const DeviceDispatchParams& args, const ExchangeCounts& counts,
                                  ListShared& shared, const ListedExperts& listed, int block,
                                  int blocks, std::int64_t buffer) {
  const DeviceExchangeParams& p = args.exchange;
  const DeviceRowLists& lists = args.lists;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int team = static_cast<int>(threadIdx.x) / 32 / kTeamWarps;
  const int warp = static_cast<int>(threadIdx.x) / 32 % kTeamWarps;
  const Arrived arrived(p, counts);
  const std::byte* const window = p.window[p.rank];
  const auto* const ids = reinterpret_cast<const std::int32_t*>(window + p.places.ids(buffer, 0));
  const auto* const weights = reinterpret_cast<const float*>(window + p.places.weights(buffer, 0));
  keep_experts(args, arrived, ids, listed);
  // Those there was no room for are looked up where they came.
  const auto expert_of = [&](int i) {
    if (i < listed.room) return static_cast<int>(listed.kept[i]);
    const std::int32_t id = ids[arrived.place(i)];
    return id < 0 ? int{ListedExperts::kElsewhere} : id - lists.first_expert;
  };
  const int share = (arrived.size() + 32 * kTeamWarps - 1) / (32 * kTeamWarps) * 32;
  const int begin = min(arrived.size(), share * warp);
  const int end = min(arrived.size(), begin + share);
  if (lists.num_experts == 0 && block == 0 && threadIdx.x == 0) lists.expert_begin[0] = 0;
  for (int e = block * kTeams + team; e < lists.num_experts; e += blocks * kTeams) {
    int less = 0;
    int equal = 0;
#pragma unroll 4
    for (int i = begin + lane; i < end; i += 32) {
      const int seen = expert_of(i);
      less += seen < e ? 1 : 0;
      equal += seen == e ? 1 : 0;
    }
    less = __reduce_add_sync(0xffffffffU, less);
    equal = __reduce_add_sync(0xffffffffU, equal);
    if (lane == 0) {
      shared.less[team][warp] = less;
      shared.equal[team][warp] = equal;
    }
    meet_team(team);
    int row = 0;
    int rows = 0;
#pragma unroll
    for (int w = 0; w < kTeamWarps; ++w) {
      row += shared.less[team][w];
      rows += shared.equal[team][w];
    }
    if (warp == 0 && lane == 0) {
      lists.expert_begin[e] = row;
      lists.expert_rows[e] = rows;
      if (e == lists.num_experts - 1) lists.expert_begin[e + 1] = row + rows;
    }
#pragma unroll
    for (int w = 0; w < kTeamWarps; ++w) row += w < warp ? shared.equal[team][w] : 0;
    meet_team(team);  // the counts may be written anew
    // A weight is stored when the lane finds its next one: nobody waits for it before.
    int weighted = -1;
    float weight = 0.0F;
    for (int first = begin; first < end && equal > 0; first += 32) {
      const int i = first + lane;
      const bool its = i < end && expert_of(i) == e;
      const std::uint32_t all = __ballot_sync(0xffffffffU, its);
      if (its) {
        const int place = arrived.place(i);
        const int at = row + __popc(all & ((1U << lane) - 1));
        if (weighted >= 0) lists.row_weight[weighted] = weight;
        weighted = at;
        weight = weights[place];
        lists.row_x[at] = place / p.layout.top_k;
        lists.assignment_row[place] = at;
      }
      row += __popc(all);
    }
    if (weighted >= 0) lists.row_weight[weighted] = weight;
  }
}

}  // namespace switchyard
