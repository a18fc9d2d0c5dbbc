#pragma once

// The experts' index lists of what a rank has received, by the blocks of the dispatch itself while
// the rows are still on their way. Bound by latency: a few blocks, no barrier between them.

#include "comm/device/dispatch_counts.cuh"

namespace switchyard {

inline constexpr int kTeamWarps = 4;  // make the list of one expert
inline constexpr int kTeams = kExchangeWarps / kTeamWarps;

inline constexpr int kLooked = 8;  // assignments that a lane looks at at a time

/// An assignment, by its number among those that have come, and the row of the lists that it
/// becomes.
struct Listed {
  std::int32_t number, row;
};

struct ListShared {
  std::int32_t less[kTeams][kTeamWarps];
  std::int32_t equal[kTeams][kTeamWarps];
  Listed found[kExchangeWarps][2 * 32];  // what a warp has yet to list
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

/// What a block keeps of the assignments that have come, in shared memory: the weight and the local
/// expert of each, eight of these in 16 bytes.
struct ListedExperts {
  float* weight;        // [room]
  std::uint16_t* kept;  // [room]; a multiple of kLooked
  int room;

  static constexpr std::uint16_t kElsewhere = 0xffff;
  static constexpr std::int64_t kBytes = sizeof(float) + sizeof(std::uint16_t);  // of one
};

/// Local experts of kLooked assignments in a row.
struct Looked {
  std::uint32_t pair[kLooked / 2];

  [[nodiscard]] __device__ __forceinline__ std::uint32_t expert(int i) const {
    return i % 2 == 0 ? pair[i / 2] & 0xffffU : pair[i / 2] >> 16;
  }
};

/// A warp of a team that makes the lists of one expert after the other.
class ListWarp {
 public:
  __device__ __forceinline__ ListWarp(const DeviceDispatchParams& args,
                                      const ExchangeCounts& counts, ListShared& shared,
                                      const ListedExperts& listed, std::int64_t buffer)
      : lists_(args.lists),
        arrived_(args.exchange, counts),
        listed_(listed),
        shared_(shared),
        lane_(static_cast<int>(threadIdx.x) % 32),
        team_(static_cast<int>(threadIdx.x) / 32 / kTeamWarps),
        warp_(static_cast<int>(threadIdx.x) / 32 % kTeamWarps),
        top_k_(args.exchange.layout.top_k) {
    const DeviceExchangeParams& p = args.exchange;
    const std::byte* const window = p.window[p.rank];
    ids_ = reinterpret_cast<const std::int32_t*>(window + p.places.ids(buffer, 0));
    weights_ = reinterpret_cast<const float*>(window + p.places.weights(buffer, 0));
    found_ = shared.found[threadIdx.x / 32];
    constexpr int kShare = kTeamWarps * kLooked;
    const int share = (arrived_.size() + kShare - 1) / kShare * kLooked;
    begin_ = min(arrived_.size(), share * warp_);
    end_ = min(arrived_.size(), begin_ + share);
  }
  [[nodiscard]] __device__ __forceinline__ int team() const { return team_; }

  /// The whole block: as many as there is room for, and the rest of the last eight.
  __device__ __forceinline__ void keep() const {
    if (top_k_ % 4 == 0) {
      keep_by<4, 4>();
    } else {
      keep_by<1, 8>();
    }
    __syncthreads();
  }

  /// All warps of the team.
  __device__ __forceinline__ void list(int expert) {
    const auto e = static_cast<std::uint32_t>(expert);
    int less = 0;
    int equal = 0;
#pragma unroll 1
    for (int i = begin_ + lane_ * kLooked; i < end_; i += 32 * kLooked) {
      const Looked seen = look(i);
#pragma unroll
      for (int j = 0; j < kLooked; ++j) {
        less += seen.expert(j) < e ? 1 : 0;
        equal += seen.expert(j) == e ? 1 : 0;
      }
    }
    less = __reduce_add_sync(0xffffffffU, less);
    equal = __reduce_add_sync(0xffffffffU, equal);
    if (lane_ == 0) {
      shared_.less[team_][warp_] = less;
      shared_.equal[team_][warp_] = equal;
    }
    meet_team(team_);
    int row = 0;
    int rows = 0;
    int before = 0;
#pragma unroll
    for (int w = 0; w < kTeamWarps; ++w) {
      row += shared_.less[team_][w];
      rows += shared_.equal[team_][w];
      before += w < warp_ ? shared_.equal[team_][w] : 0;
    }
    if (warp_ == 0 && lane_ == 0) {
      lists_.expert_begin[expert] = row;
      lists_.expert_rows[expert] = rows;
      if (expert == lists_.num_experts - 1) lists_.expert_begin[expert + 1] = row + rows;
    }
    meet_team(team_);  // the counts may be written anew
    if (equal > 0) find(e, row + before);
  }
  /// All lanes, after the last expert.
  __device__ __forceinline__ void finish() {
    __syncwarp();
    store(held_);
  }

 private:
  template <int kWide>
  struct alignas(4 * kWide) Words {
    std::uint32_t word[kWide];
  };

  /// kWide in a row at a time. All loads of a batch go before its stores: the compiler moves none
  /// over them, and each would wait for memory by itself.
  template <int kWide, int kBatch>
  __device__ __forceinline__ void keep_by() const {
    constexpr int kStride = kExchangeThreads * kWide;
    const int size = arrived_.size();
    const int rounded = min((size + kLooked - 1) / kLooked * kLooked, listed_.room);
#pragma unroll 1
    for (int first = static_cast<int>(threadIdx.x) * kWide; first < rounded;
         first += kBatch * kStride) {
      Words<kWide> ids[kBatch];
      Words<kWide> weights[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
#pragma unroll
        for (int v = 0; v < kWide; ++v) ids[j].word[v] = 0xffffffffU;
        weights[j] = {};
        const int i = first + j * kStride;
        if (i >= size) continue;
        const int place = arrived_.place(i);
        ids[j] = *reinterpret_cast<const Words<kWide>*>(ids_ + place);
        weights[j] = *reinterpret_cast<const Words<kWide>*>(weights_ + place);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = first + j * kStride;
        if (i >= rounded) continue;
#pragma unroll
        for (int v = 0; v < kWide; ++v) {
          listed_.kept[i + v] = local_expert(static_cast<std::int32_t>(ids[j].word[v]));
        }
        *reinterpret_cast<Words<kWide>*>(listed_.weight + i) = weights[j];
      }
    }
  }

  [[nodiscard]] __device__ __forceinline__ std::uint16_t local_expert(std::int32_t id) const {
    return id < 0 ? ListedExperts::kElsewhere
                  : static_cast<std::uint16_t>(id - lists_.first_expert);
  }
  /// Of an assignment where it came.
  [[nodiscard]] __device__ __forceinline__ std::uint16_t look_up(int i) const {
    return local_expert(ids_[arrived_.place(i)]);
  }
  [[nodiscard]] __device__ __forceinline__ Looked look(int i) const {
    Looked seen;
    if (i + kLooked <= listed_.room) {
      const uint4 words = *reinterpret_cast<const uint4*>(listed_.kept + i);
      seen.pair[0] = words.x;
      seen.pair[1] = words.y;
      seen.pair[2] = words.z;
      seen.pair[3] = words.w;
      return seen;
    }
    std::uint64_t four[2] = {~std::uint64_t{0}, ~std::uint64_t{0}};  // there was no room for them
#pragma unroll 1
    for (int j = kLooked - 1; j >= 0; --j) {
      four[1] = four[1] << 16 | four[0] >> 48;
      four[0] = four[0] << 16 | (i + j < end_ ? look_up(i + j) : ListedExperts::kElsewhere);
    }
    seen.pair[0] = static_cast<std::uint32_t>(four[0]);
    seen.pair[1] = static_cast<std::uint32_t>(four[0] >> 32);
    seen.pair[2] = static_cast<std::uint32_t>(four[1]);
    seen.pair[3] = static_cast<std::uint32_t>(four[1] >> 32);
    return seen;
  }

  /// This warp's assignments of an expert become its rows from `row` on.
  __device__ __forceinline__ void find(std::uint32_t expert, int row) {
#pragma unroll 1
    for (int first = begin_; first < end_; first += 32 * kLooked) {
      const int i = first + lane_ * kLooked;
      std::uint32_t its = 0;  // a bit each
      if (i < end_) {
        const Looked seen = look(i);
#pragma unroll
        for (int j = 0; j < kLooked; ++j) its |= seen.expert(j) == expert ? 1U << j : 0;
      }
      std::uint32_t lanes = __ballot_sync(0xffffffffU, its != 0);
      if (lanes == 0) continue;
      int before = __popc(lanes & ((1U << lane_) - 1));  // those of lower lanes, where each has one
      int all = __popc(lanes);
      if (__any_sync(0xffffffffU, (its & (its - 1)) != 0)) {
        int up_to = __popc(its);
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          const int lower = __shfl_up_sync(0xffffffffU, up_to, distance);
          up_to += lane_ >= distance ? lower : 0;
        }
        before = up_to - __popc(its);
        all = __shfl_sync(0xffffffffU, up_to, 31);
      }
      int at = row + before;
      row += all;
      for (; lanes != 0; lanes = __ballot_sync(0xffffffffU, its != 0)) {  // one of each lane
        if (its != 0) {
          const int number = i + __ffs(static_cast<int>(its)) - 1;
          found_[held_ + __popc(lanes & ((1U << lane_) - 1))] = {number, at++};
          its &= its - 1;
        }
        held_ += __popc(lanes);
        if (held_ >= 32) store_some();
      }
    }
  }

  /// All lanes: a warp's worth at once.
  __device__ __forceinline__ void store_some() {
    __syncwarp();
    store(32);
    held_ -= 32;
    const Listed next = found_[32 + lane_];
    __syncwarp();
    if (lane_ < held_) found_[lane_] = next;
  }
  __device__ __forceinline__ void store(int count) const {
    if (lane_ >= count) return;
    const Listed it = found_[lane_];
    const int place = arrived_.place(it.number);
    lists_.row_weight[it.row] =
        it.number < listed_.room ? listed_.weight[it.number] : weights_[place];
    lists_.row_x[it.row] = place / top_k_;
    lists_.assignment_row[place] = it.row;
  }

  const DeviceRowLists& lists_;
  const Arrived arrived_;
  const ListedExperts listed_;
  ListShared& shared_;
  int lane_, team_, warp_, top_k_;
  const std::int32_t* ids_;
  const float* weights_;
  Listed* found_;
  int begin_, end_;  // this warp's share of the assignments
  int held_ = 0;
};

/// The lists of every `blocks`-th team's experts, this block being number `block` of them: a stable
/// counting sort by expert, in which every team counts for itself how many assignments go before
/// its own.
__device__ inline void make_lists(const DeviceDispatchParams& args, const ExchangeCounts& counts,
                                  ListShared& shared, const ListedExperts& listed, int block,
                                  int blocks, std::int64_t buffer) {
  const int experts = args.lists.num_experts;
  ListWarp warp(args, counts, shared, listed, buffer);
  warp.keep();
  if (experts == 0 && block == 0 && threadIdx.x == 0) args.lists.expert_begin[0] = 0;
#pragma unroll 1
  for (int e = block * kTeams + warp.team(); e < experts; e += blocks * kTeams) warp.list(e);
  warp.finish();
}

}  // namespace switchyard
