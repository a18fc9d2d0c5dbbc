#pragma once

// What host and kernels of the exchange between GPUs share.

#include <cstdint>

#include "comm/device/limits.hpp"
#include "comm/exchange_layout.hpp"

namespace switchyard {

enum class DevicePhase : std::uint32_t {
  kNone,
  kCounts,
  kRows,
  kResults,
  kWeights,  ///< Of a way back, as the next four.
  kParts,
  kSums,
  kForward,     ///< Rank `rank` goes back through forward `seen`, this one through `expected`.
  kParameters,  ///< Likewise which parameters' gradients are asked for.
  kExpertId,
};

/// In pinned memory: why the kernels of this rank have left.
struct DeviceFailure {
  std::uint32_t set;  ///< 0: nothing; 1: this rank; 2: another rank has given up.
  DevicePhase phase;
  std::int32_t rank;       ///< Waited for, or of another mind. kExpertId: this rank.
  std::uint64_t expected;  ///< kExpertId: the token.
  std::uint64_t seen;      ///< kExpertId: the id.
};

/// On the device, this rank's own: advanced by the kernels, so that a graph can be replayed.
struct DeviceExchangeState {
  std::uint64_t dispatches;
  std::uint64_t combines;  ///< By push.
  std::uint64_t pulls;
  std::uint64_t weights;        ///< Of a way back: gradients of weights that have come home,
  std::uint64_t sums;           ///< and sums over ranks.
  std::uint32_t dispatch_done;  ///< Blocks of the running kernel that have ended.
  std::uint32_t combine_done;
  std::uint32_t reported;
  std::uint32_t dispatch_taken;  ///< Pieces of rows that its warps have taken; kThroughput.
  std::int64_t num_rows;
  std::int64_t dropped_rows;
  std::int64_t source_begin[kMaxDeviceRanks];  ///< First row of each source in the last dispatch.
  std::int64_t source_rows[kMaxDeviceRanks];
  std::int64_t counts[kMaxDeviceRanks * kMaxDeviceRanks];  ///< [R, R] rows from s to d.
};

struct DeviceExchangeParams {
  ExchangeLayout layout;
  ExchangePlaces places;               ///< Of `layout`.
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

/// Index lists for the experts, made while the rows are on their way; kLowLatency only.
struct DeviceRowLists {
  std::int32_t* expert_begin;    ///< [El+1]; null: none are made.
  std::int32_t* expert_rows;     ///< [El].
  std::int32_t* row_x;           ///< [S max], with row_weight sorted by expert, then place, then k.
  float* row_weight;             ///< [S max].
  std::int32_t* assignment_row;  ///< [N max, K] the row of a place's assignment, where it has one.
  std::int32_t first_expert;
  std::int32_t num_experts;  ///< El.
  std::int32_t room;         ///< In shared memory; set by the launch.
};

struct DeviceDispatchParams {
  DeviceExchangeParams exchange;
  const void* x;               ///< [T / copies, H].
  const std::int32_t* expert;  ///< [T, K].
  const float* weight;         ///< [T, K].
  const std::uint8_t* kept;    ///< [T, K] or null.
  std::int32_t copies;         ///< Tokens that share a row of x: token t's is t / copies.
  const std::int64_t* counts;  ///< [R, R] rows from s to d, where they are known; else null.
  DeviceRowLists lists;
  std::int32_t first_expert[kMaxDeviceRanks];  ///< Of each rank; of those beyond R a large number.
  std::uint32_t inverse_experts;               ///< ceil(2^32 / E); 0 where E is 1.
};

/// The experts' outputs, which are summed while they are sent; kLowLatency only.
struct DeviceExpertRows {
  const void* rows;                    ///< [S max, H] unweighted; null: `partials` are sent.
  const std::int32_t* assignment_row;  ///< Of the lists of the last dispatch.
  DType dtype;
  std::int32_t width;                    ///< Of the tree over this rank's groups.
  std::int32_t border[kMaxDeviceRanks];  ///< First expert of the group behind group g.
};

struct DeviceCombineParams {
  DeviceExchangeParams exchange;
  const void* partials;             ///< [N max << group_bits, H].
  const std::int32_t* partial_row;  ///< [N max] where row i is in partials; null: row i.
  const float* shared;              ///< [T, H] or null.
  void* out;                        ///< [T, H].
  DType out_type;
  DeviceExpertRows expert;
};

/// How the blocks of a low-latency dispatch share its work: the first `planners` send ids and make
/// lists, the last `senders` send rows.
struct LowLatencyBlocks {
  int senders;
  int planners;
};
[[nodiscard]] constexpr LowLatencyBlocks low_latency_blocks(int ctas) {
  return ctas < 8 ? LowLatencyBlocks{ctas, ctas} : LowLatencyBlocks{ctas - ctas / 4, ctas / 4};
}

/// Blocks of a combine by pull where the caller has chosen none and a dispatch has `ctas`. Few fill
/// the wire, more get in each other's way: 4096 tokens of 7168 values took 496 us on 16, 494 on 24,
/// 509 on 32 and 511 on 64 of each of 4 H200s, on 2 of them 186, 186, 186, 190. Fewer values were
/// not measured.
[[nodiscard]] constexpr int pull_blocks(std::int64_t num_tokens, std::int64_t hidden, int ctas) {
  const bool measured = num_tokens * hidden >= std::int64_t{4096} * 7168;
  return measured && ctas > 16 ? 16 : ctas;
}
static_assert(pull_blocks(4096, 7168, 64) == 16 && pull_blocks(4096, 7168, 8) == 8);
static_assert(pull_blocks(4095, 7168, 64) == 64);

/// Planners that make lists: not the first, which waits for the rows, nor the last, which clears
/// what is not used, where there are others.
struct LowLatencyLists {
  int first;
  int blocks;
};
[[nodiscard]] constexpr LowLatencyLists low_latency_lists(int planners) {
  if (planners == 1) return {0, 1};
  return {1, planners > 3 ? planners - 2 : planners - 1};
}

/// What a word of a result is before it has come; kLowLatency only. It is a NaN of every wire type,
/// which is sent as another one.
inline constexpr std::uint32_t kNoResult = 0xffffffff;

/// Reduction groups of a rank whose rows a low-latency combine can add up, where a token has so
/// many parts at home.
[[nodiscard]] constexpr int most_groups(int num_parts) {
  if (num_parts == 1) return 1;
  return num_parts == 2 ? 4 : (num_parts <= 4 ? 2 : 1);
}

/// Gradients of weights on their way home: the experts' ranks have them in the place of the weights
/// that came with the rows, and the tokens' ranks fetch them.
struct DeviceWeightsParams {
  DeviceExchangeParams exchange;
  const std::int32_t* expert;  ///< [T, K], and
  const std::uint8_t* kept;    ///< [T, K] or null, as dispatched.
  float* dweight;              ///< [T, K], or null: not wanted here.
  std::uint64_t forward;       ///< Which forward is gone back through,
  std::uint64_t parameters;    ///< and which sums are asked for: alike on all ranks.
  std::int32_t first_expert[kMaxDeviceRanks];  ///< Of each rank; of those beyond R a large number.
};

/// The first `count` values of what ranks add up.
struct DeviceSumParams {
  DeviceExchangeParams exchange;
  std::int64_t count;
};

struct ExchangeLaunch {
  int ctas;
  bool overlapped;  ///< Begin while the kernel before ends: not where ranks share a GPU.
  void* stream;
};

// Launches; in dispatch_exchange_cuda.cu, combine_exchange_cuda.cu and combine_pull_cuda.cu.
void load_dispatch_kernels(const DeviceExchangeParams& params, DType dtype);
void launch_dispatch(const DeviceDispatchParams& params, DType dtype, int ctas, void* stream);
/// `num_parts`: rows that come home for a token, ranks times groups; at most kMaxDeviceRanks.
void load_combine_kernels(DType wire, int num_parts);
void launch_combine(const DeviceCombineParams& params, int ctas, void* stream);
/// By pull: partials are result(0) and following of every rank's window. Hopper only, throughput
/// mode, a wire of 16 or 32 bits, no partial_row.
void load_pull_kernels(DType wire, int num_parts);
void launch_pull(const DeviceCombineParams& params, int ctas, void* stream);

// Of a way back, in any mode; in gradients/.
void load_weights_home_kernel();
void load_sum_kernel(int num_ranks);
void launch_weights_home(const DeviceWeightsParams& params, int ctas, void* stream);
void launch_sum_over_ranks(const DeviceSumParams& params, int ctas, void* stream);

// For kLowLatency; in dispatch_low_latency_cuda.cu and combine_low_latency_cuda.cu.
void load_dispatch_low_latency_kernels(DType dtype, DType wire);
void launch_dispatch_low_latency(DeviceDispatchParams params, DType dtype,
                                 const ExchangeLaunch& launch);
void load_combine_low_latency_kernels(DType wire, int num_parts);
void launch_combine_low_latency(const DeviceCombineParams& params, const ExchangeLaunch& launch);

}  // namespace switchyard
