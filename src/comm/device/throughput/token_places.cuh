#pragma once

// Which ranks each token of a throughput dispatch goes to, and the how-manieth row there it is: of
// all tokens, in every block, so that any block can send any token. Bound by reading T * K ids from
// the L2 in each block.

#include "comm/device/dispatch_counts.cuh"

namespace switchyard {

inline constexpr std::uint16_t kNoSlot = 0xffff;

/// What a block knows of the places of rows.
struct DispatchShared : ExchangeCounts {
  std::uint8_t owner[kMaxDeviceExperts];
  std::int32_t rows_to[kMaxDeviceRanks];  // this rank's, before dropping
  std::int64_t base[kMaxDeviceRanks];     // first row of this rank at each destination
};

/// Of 32 tokens, by destination: which of them go there, and how many of those before do.
struct alignas(16) TokenGroup {
  std::uint32_t goes[kMaxDeviceRanks];
  std::uint16_t before[kMaxDeviceRanks];
};

/// Of all groups.
[[nodiscard]] __host__ __device__ constexpr std::int64_t group_bytes(std::int64_t tokens) {
  return ExchangeLayout::align((tokens + 31) / 32 * static_cast<std::int64_t>(sizeof(TokenGroup)));
}

/// The how-manieth row to rank `to` a token is, or kNoSlot.
__device__ __forceinline__ std::uint16_t slot_of(const TokenGroup* groups, int token, int to) {
  const TokenGroup& group = groups[token / 32];
  const std::uint32_t goes = group.goes[to];
  const std::uint32_t bit = 1U << token % 32;
  if ((goes & bit) == 0) return kNoSlot;
  return static_cast<std::uint16_t>(group.before[to] + __popc(goes & (bit - 1)));
}

static __device__ __noinline__ void report_id(const DeviceExchangeParams& p, int token,
                                              std::int32_t id) {
  give_up(p, 1, DevicePhase::kExpertId, p.rank, static_cast<std::uint64_t>(token),
          static_cast<std::uint64_t>(id));
}

/// Of tokens 32 * group + lane, in all lanes, from a bit for each rank that this lane's goes to.
__device__ __forceinline__ void set_group(TokenGroup& group, std::uint32_t ranks) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int d = 0; d < kMaxDeviceRanks; ++d) {
    const std::uint32_t goes = __ballot_sync(0xffffffffU, ranks >> d & 1U);
    if (lane == d) group.goes[d] = goes;
  }
}

/// As mark_destinations, for ids in fours at 16 bytes and of which all are kept: a thread takes
/// whole tokens. The owner of an expert is floor(((id + 1) R - 1) / E), by a product.
__device__ inline void mark_whole_tokens(const DeviceDispatchParams& p, TokenGroup* groups) {
  const auto num_tokens = static_cast<int>(p.exchange.num_tokens);
  const auto num_experts = static_cast<std::uint32_t>(p.exchange.num_experts);
  const int fours = p.exchange.layout.top_k / 4;
  const auto num_ranks = static_cast<std::uint32_t>(p.exchange.layout.num_ranks);
  const auto* const ids = reinterpret_cast<const int4*>(p.expert);
  constexpr int kBatch = 8;  // tokens
  int wrong_token = -1;
  std::int32_t wrong_id = 0;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int first = static_cast<int>(threadIdx.x); first - lane < num_tokens;
       first += kBatch * kExchangeThreads) {
    std::uint32_t to[kBatch] = {};
#pragma unroll 2
    for (int four = 0; four < fours; ++four) {
      int4 of[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int token = first + j * kExchangeThreads;
        of[j] = token < num_tokens ? ids[token * fours + four] : int4{-1, -1, -1, -1};
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        for (const std::int32_t id : {of[j].x, of[j].y, of[j].z, of[j].w}) {
          const bool known = static_cast<std::uint32_t>(id) < num_experts;
          const std::uint32_t owner = __umulhi(
              static_cast<std::uint32_t>(id) * num_ranks + num_ranks - 1, p.inverse_experts);
          to[j] |= known ? 1U << owner : 0;
          if (known || id == -1) continue;
          wrong_token = first + j * kExchangeThreads;
          wrong_id = id;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int token = first - lane + j * kExchangeThreads;  // of lane 0
      if (token < num_tokens) set_group(groups[token / 32], to[j]);
    }
  }
  if (wrong_token >= 0) report_id(p.exchange, wrong_token, wrong_id);
}

/// Destinations of each token, as the RankMasks that `masks` is made of. Neighbouring threads take
/// neighbouring assignments, so that the ids come in whole lines. Where all of a token's lie in one
/// warp its lanes join their bits by shuffles: atomics would meet in one word, 32 at a time. An id
/// out of range makes all ranks leave.
__device__ inline void make_masks(const DeviceDispatchParams& p, const DispatchShared& shared,
                                  std::uint32_t* masks) {
  const auto num_tokens = static_cast<int>(p.exchange.num_tokens);
  const int top_k = p.exchange.layout.top_k;
  const int size = num_tokens * top_k;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool joined = 32 % top_k == 0;
  constexpr int kMasks = 32 / kRankMaskBits;  // in a word
  if (!joined) {
    for (int i = static_cast<int>(threadIdx.x); i < (num_tokens + kMasks - 1) / kMasks;
         i += kExchangeThreads) {
      masks[i] = 0;
    }
    __syncthreads();
  }
  constexpr int kBatch = 8;  // loads under way at a time
  // Of assignment `i`; it advances with it.
  int token = static_cast<int>(threadIdx.x) / top_k;
  int choice = static_cast<int>(threadIdx.x) % top_k;
  const int tokens_on = kExchangeThreads / top_k;
  const int choices_on = kExchangeThreads % top_k;
  for (int first = static_cast<int>(threadIdx.x); first - lane < size;
       first += kBatch * kExchangeThreads) {
    std::int32_t ids[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * kExchangeThreads;
      ids[j] = i < size ? p.expert[i] : -1;
      // Also an id out of range has no place kept, and is reported all the same.
      const bool known = ids[j] >= 0 && ids[j] < p.exchange.num_experts;
      if (known && p.kept != nullptr && p.kept[i] == 0) ids[j] = -1;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * kExchangeThreads;
      if (i - lane >= size) break;
      std::uint32_t to = 0;
      if (ids[j] >= 0 && ids[j] < p.exchange.num_experts) {
        to = 1U << shared.owner[ids[j]];
      } else if (ids[j] != -1) {
        report_id(p.exchange, token, ids[j]);
      }
      if (joined) {
        for (int distance = top_k / 2; distance > 0; distance /= 2) {
          to |= __shfl_xor_sync(0xffffffffU, to, distance);
        }
        if (choice == 0 && i < size) {
          reinterpret_cast<RankMask*>(masks)[token] = static_cast<RankMask>(to);
        }
      } else if (to != 0) {
        atomicOr(&masks[token / kMasks], to << token % kMasks * kRankMaskBits);
      }
      token += tokens_on;
      choice += choices_on;
      if (choice >= top_k) {
        choice -= top_k;
        ++token;
      }
    }
  }
  __syncthreads();
}

/// groups[ceil(T / 32)], but for what goes before each; `masks` is room for a RankMask each token.
__device__ inline void mark_destinations(const DeviceDispatchParams& p,
                                         const DispatchShared& shared, std::uint32_t* masks,
                                         TokenGroup* groups) {
  if (p.exchange.layout.top_k % 4 == 0 && p.kept == nullptr && p.exchange.num_experts > 1 &&
      reinterpret_cast<std::uintptr_t>(p.expert) % 16 == 0) {
    mark_whole_tokens(p, groups);
  } else {
    make_masks(p, shared, masks);
    const auto num_tokens = static_cast<int>(p.exchange.num_tokens);
    const auto* const of_tokens = reinterpret_cast<const RankMask*>(masks);
    for (int token = static_cast<int>(threadIdx.x); token / 32 * 32 < num_tokens;
         token += kExchangeThreads) {
      set_group(groups[token / 32], token < num_tokens ? of_tokens[token] : 0);
    }
  }
  __syncthreads();
}

/// The whole block: how many rows go before each group, and in `shared` how many there are.
__device__ inline void count_rows(const DeviceExchangeParams& p, DispatchShared& shared,
                                  TokenGroup* groups) {
  const int num_groups = (static_cast<int>(p.num_tokens) + 31) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  static_assert(kMaxDeviceRanks * 32 <= kExchangeThreads);
  if (warp < kMaxDeviceRanks) {  // warp d counts rows to rank d, a lane in `share` groups in a row
    const int share = (num_groups + 31) / 32;
    const int begin = min(num_groups, share * lane);
    const int end = min(num_groups, begin + share);
    int rows = 0;
    for (int group = begin; group < end; ++group) rows += __popc(groups[group].goes[warp]);
    int up_to = rows;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int lower = __shfl_up_sync(0xffffffffU, up_to, distance);
      up_to += lane >= distance ? lower : 0;
    }
    if (lane == 31) shared.rows_to[warp] = up_to;
    int before = up_to - rows;
    for (int group = begin; group < end; ++group) {
      groups[group].before[warp] = static_cast<std::uint16_t>(before);
      before += __popc(groups[group].goes[warp]);
    }
  }
  __syncthreads();
}

}  // namespace switchyard
