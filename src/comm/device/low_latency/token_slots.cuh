#pragma once

// Which ranks a token goes to, and the how-manieth row there it is: by ballots of 32 tokens, which
// every block makes for itself, one token a lane.

#include "comm/device/exchange.cuh"

namespace switchyard {

/// Ballots of 32 tokens each, by destination: which of them have a row there.
using Ballots = std::uint32_t[kMaxDeviceRanks];

/// A bit for each rank that holds an expert of the token. An id out of range makes all ranks leave.
__device__ inline std::uint32_t destinations(const DeviceDispatchParams& args, int token) {
  constexpr int kBatch = 8;  // ids asked for at a time
  const DeviceExchangeParams& p = args.exchange;
  const int top_k = p.layout.top_k;
  const std::int32_t* const expert = args.expert + std::int64_t{token} * top_k;
  const std::uint8_t* const kept =
      args.kept == nullptr ? nullptr : args.kept + std::int64_t{token} * top_k;
  std::uint32_t ranks = 0;
  for (int first = 0; first < top_k; first += kBatch) {
    std::int32_t ids[kBatch];
    bool stays[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) ids[j] = first + j < top_k ? expert[first + j] : -1;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      stays[j] = kept == nullptr || first + j >= top_k || kept[first + j] != 0;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (ids[j] < -1 || ids[j] >= p.num_experts) {
        give_up(p, 1, DevicePhase::kExpertId, p.rank, static_cast<std::uint64_t>(token),
                static_cast<std::uint64_t>(ids[j]));
        continue;
      }
      if (ids[j] >= 0 && stays[j]) ranks |= 1U << owner_of(args, ids[j]);
    }
  }
  return ranks;
}

/// The whole block: ballots of all tokens.
__device__ inline void mark_destinations(const DeviceDispatchParams& args, Ballots* ballots) {
  const auto num_tokens = static_cast<int>(args.exchange.num_tokens);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int first = static_cast<int>(threadIdx.x) - lane; first < num_tokens;
       first += kExchangeThreads) {
    const int token = first + lane;
    const std::uint32_t ranks = token < num_tokens ? destinations(args, token) : 0;
#pragma unroll
    for (int d = 0; d < kMaxDeviceRanks; ++d) {
      const std::uint32_t ballot = __ballot_sync(0xffffffffU, ranks >> d & 1U);
      if (lane == d) ballots[first / 32][d] = ballot;
    }
  }
}

/// Rows to destination `lane` % kMaxDeviceRanks of the tokens before `token`; all lanes of the
/// warp.
__device__ inline std::int32_t rows_before_token(const Ballots* ballots, int token) {
  static_assert(4 * kMaxDeviceRanks == 32, "lanes that share a destination join by two shuffles");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int d = lane % kMaxDeviceRanks;
  std::int32_t rows = 0;
  for (int group = lane / kMaxDeviceRanks; group < token / 32; group += 32 / kMaxDeviceRanks) {
    rows += __popc(ballots[group][d]);
  }
  rows += __shfl_xor_sync(0xffffffffU, rows, kMaxDeviceRanks);
  rows += __shfl_xor_sync(0xffffffffU, rows, 2 * kMaxDeviceRanks);
  if (token % 32 != 0) rows += __popc(ballots[token / 32][d] & ((1U << token % 32) - 1));
  return rows;
}

/// The token's row at destination `lane` % kMaxDeviceRanks, or -1.
__device__ __forceinline__ std::int32_t slot_of(const Ballots* ballots, int token) {
  const int d = static_cast<int>(threadIdx.x) % kMaxDeviceRanks;
  const std::int32_t before = rows_before_token(ballots, token);
  return (ballots[token / 32][d] >> token % 32 & 1U) != 0 ? before : -1;
}

}  // namespace switchyard
