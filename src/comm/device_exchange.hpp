#pragma once

// What host and kernels of the exchange between GPUs share.

#include <cstdint>

#include "comm/exchange_layout.hpp"

namespace switchyard {

inline constexpr int kMaxDeviceRanks = 8;
inline constexpr int kMaxDeviceExperts = 4096;

enum class DevicePhase : std::uint32_t { kNone, kCounts, kRows, kResults, kExpertId };

/// In pinned memory: why the kernels of this rank have left.
struct DeviceFailure {
  std::uint32_t set;  ///< 0: nothing; 1: this rank; 2: another rank has given up.
  DevicePhase phase;
  std::int32_t rank;       ///< Waited for. kExpertId: this rank.
  std::uint64_t expected;  ///< kExpertId: the token.
  std::uint64_t seen;      ///< kExpertId: the id.
};

/// On the device, this rank's own: advanced by the kernels, so that a graph can be replayed.
struct DeviceExchangeState {
  std::uint64_t dispatches;
  std::uint64_t combines;  ///< By push.
  std::uint64_t pulls;
  std::uint32_t dispatch_done;  ///< Blocks of the running kernel that have ended.
  std::uint32_t combine_done;
  std::uint32_t reported;
  std::int64_t num_rows;
  std::int64_t dropped_rows;
  std::int64_t source_begin[kMaxDeviceRanks];  ///< First row of each source in the last dispatch.
  std::int64_t source_rows[kMaxDeviceRanks];
  std::int64_t counts[kMaxDeviceRanks * kMaxDeviceRanks];  ///< [R, R] rows from s to d.
};

struct DeviceExchangeParams {
  ExchangeLayout layout;
  std::byte* window[kMaxDeviceRanks];  ///< Each rank's part, as this rank's device sees it.
  DeviceExchangeState* state;
  DeviceFailure* failure;
  std::int32_t*
      slot;  ///< [max tokens, R] which of this rank's rows to rank d a token is; -1: none.
  std::uint64_t timeout_ns;
  std::int64_t max_tokens;
  std::int32_t rank;
  std::int32_t num_experts;
  std::int32_t chunks;
  std::int32_t fixed_places;  ///< kLowLatency.
  std::int32_t bulk_copies;   ///< kThroughput, all GPUs are Hopper's.
  std::int32_t group_bits;    ///< log2 of the rows that come home for one that was received.
  std::int64_t num_tokens;    ///< T.
};

struct DeviceDispatchParams {
  DeviceExchangeParams exchange;
  const void* x;               ///< [T / copies, H].
  const std::int32_t* expert;  ///< [T, K].
  const float* weight;         ///< [T, K].
  const std::uint8_t* kept;    ///< [T, K] or null.
  std::int32_t copies;         ///< Tokens that share a row of x: token t's is t / copies.
};

struct DeviceCombineParams {
  DeviceExchangeParams exchange;
  const void* partials;             ///< [N max << group_bits, H].
  const std::int32_t* partial_row;  ///< [N max] where row i is in partials; null: row i.
  const float* shared;              ///< [T, H] or null.
  void* out;                        ///< [T, H].
  DType out_type;
};

// Launches; in dispatch_exchange_cuda.cu, combine_exchange_cuda.cu and combine_pull_cuda.cu.
void load_dispatch_kernels(const DeviceExchangeParams& params, DType dtype, int ctas);
void launch_dispatch(const DeviceDispatchParams& params, DType dtype, int ctas, void* stream);
/// `num_parts`: rows that come home for a token, ranks times groups; at most 8.
void load_combine_kernels(DType wire, int num_parts);
void launch_combine(const DeviceCombineParams& params, int ctas, void* stream);
/// By pull: partials are result(0) and following of every rank's window. Hopper only, throughput
/// mode, a wire of 16 or 32 bits, no partial_row.
void load_pull_kernels(DType wire, int num_parts);
void launch_pull(const DeviceCombineParams& params, int ctas, void* stream);

}  // namespace switchyard
