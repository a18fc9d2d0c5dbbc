// Combine of few tokens between GPUs in one launch. Results tell by themselves that they have come:
// before, every word of their places is a NaN that is never sent, so no flag and no fence is waited
// for, and a token is added up as soon as its parts are here, in fp32 by the binary tree over
// ranks, by warps of their own where much is sent; then the places are made ready for the next
// time. The experts' rows may be summed on their way out. Bound by latency: a launch, two dependent
// loads, the way to the other GPU.
#include <type_traits>

#include "comm/device/low_latency/arriving_parts.cuh"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/ptx.cuh"

namespace switchyard {
namespace {

constexpr int kSendSteps = 2;  // vectors of 8 values that a lane sends
constexpr int kSendWidth = kSendSteps * 32 * 8;
/// Rows of experts asked for at a time: as many as there are registers for beside the sums.
template <typename In, int kGroups>
constexpr int kBatch = (sizeof(In) == 2 ? 4 : 2) / (kGroups == 4 ? 2 : 1);
/// Where each warp has more than so many pieces to send, the first results come long before the
/// last is sent: then some warps of a block add tokens up from the start.
constexpr int kManyPieces = 4;
constexpr int kAdders = 4;

/// What the rows of `partials` are where they travel as Wire.
template <typename Wire>
using Partial = std::conditional_t<kIsFp8<Wire>, float, Wire>;

/// A row that is to go home, and the piece of it that this warp takes.
struct Item {
  int home;
  int row;             // of those from that source
  int piece;           // of the row
  std::int64_t first;  // the lane's first value

  __device__ __forceinline__ Item(const DeviceExchangeParams& p, int item, int pieces) {
    row = item / pieces / p.layout.num_ranks;
    home = (p.rank + item / pieces) % p.layout.num_ranks;
    piece = item % pieces;
    first = std::int64_t{piece} * kSendWidth + static_cast<int>(threadIdx.x) % 32 * 8;
  }
};

/// A piece of a result, at its place.
template <typename Wire, typename In>
__device__ __forceinline__ void store_result(const DeviceExchangeParams& p, const Item& item,
                                             const Eight<In> (&in)[kSendSteps]) {
  std::byte* const window = p.window[item.home];
  const std::int64_t place = (p.rank * p.max_tokens << p.group_bits) + item.row;
  auto* const to = reinterpret_cast<Wire*>(window + p.places.result(place));
  Eight<Wire> out[kSendSteps];
  float scale = 1.0F;
  if constexpr (std::is_same_v<In, Wire>) {
#pragma unroll
    for (int step = 0; step < kSendSteps; ++step) out[step] = in[step];
  } else {
    scale = encode<Wire>(in, out);
  }
#pragma unroll
  for (int step = 0; step < kSendSteps; ++step) {
    const std::int64_t at = item.first + step * 256;
    if (at >= p.layout.hidden) continue;
    avoid_no_result(out[step]);
    *reinterpret_cast<Eight<Wire>*>(to + at) = out[step];
  }
  if constexpr (kIsFp8<Wire>) {
    const int lane_block = block_of_lane();
    const std::int64_t block = item.piece * (kSendWidth / kScaleBlock) + lane_block;
    if (lane_block < 0 || lane_block >= 2 * kSendSteps || block >= p.layout.result_scales()) return;
    std::uint32_t word = __float_as_uint(scale);
    if (word == kNoResult) word = kOtherNan;
    reinterpret_cast<std::uint32_t*>(window + p.places.result_scale(place))[block] = word;
  }
}

template <typename Wire>
__device__ void send_partial(const DeviceCombineParams& args, const Item& item,
                             std::int64_t source_row) {
  const DeviceExchangeParams& p = args.exchange;
  const std::int64_t hidden = p.layout.hidden;
  const std::int64_t partial =
      args.partial_row == nullptr ? source_row : args.partial_row[source_row];
  const auto* from = static_cast<const Partial<Wire>*>(args.partials) + partial * hidden;
  Eight<Partial<Wire>> in[kSendSteps];
#pragma unroll
  for (int step = 0; step < kSendSteps; ++step) {
    const std::int64_t at = item.first + step * 256;
    in[step] = {};
    if (at < hidden) in[step] = *reinterpret_cast<const Eight<Partial<Wire>>*>(from + at);
  }
  store_result<Wire>(p, item, in);
}

/// A lane's assignment of the row that is summed.
struct Assignment {
  std::uint32_t row;  // of the experts' outputs; kNone: not here
  float weight;
  int group;

  static constexpr std::uint32_t kNone = 0xffffffff;
};

__device__ __forceinline__ Assignment load_assignment(const DeviceCombineParams& args,
                                                      std::int64_t buffer, std::int64_t place) {
  const DeviceExchangeParams& p = args.exchange;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::byte* const window = p.window[p.rank];
  Assignment mine{.row = Assignment::kNone, .weight = 0.0F, .group = 0};
  if (lane >= p.layout.top_k) return mine;
  const std::int32_t id =
      reinterpret_cast<const std::int32_t*>(window + p.places.ids(buffer, place))[lane];
  mine.weight = reinterpret_cast<const float*>(window + p.places.weights(buffer, place))[lane];
  const std::int32_t row = args.expert.assignment_row[place * p.layout.top_k + lane];
  if (id < 0) return mine;
  mine.row = static_cast<std::uint32_t>(row);
#pragma unroll
  for (int g = 0; g < kMaxDeviceRanks - 1; ++g) mine.group += id >= args.expert.border[g] ? 1 : 0;
  return mine;
}

/// Asks for the piece of the lowest row that is left, and takes it from the lane that has it.
template <typename In>
__device__ __forceinline__ void take_first(Assignment& mine, const void* rows, std::int64_t hidden,
                                           std::int64_t first, Eight<In> (&in)[kSendSteps],
                                           float& weight, int& group) {
  const std::uint32_t row = __reduce_min_sync(0xffffffffU, mine.row);
  const int lane = __ffs(static_cast<int>(__ballot_sync(0xffffffffU, mine.row == row))) - 1;
  weight = __shfl_sync(0xffffffffU, mine.weight, lane);
  group = __shfl_sync(0xffffffffU, mine.group, lane);
  // One lane only: after a dispatch that gave up, the old lists may have a row twice.
  if (static_cast<int>(threadIdx.x) % 32 == lane) mine.row = Assignment::kNone;
  const auto* const from = static_cast<const In*>(rows) + std::int64_t{row} * hidden + first;
#pragma unroll
  for (int step = 0; step < kSendSteps; ++step) {
    in[step] = {};
    if (first + step * 256 < hidden)
      in[step] = *reinterpret_cast<const Eight<In>*>(from + step * 256);
  }
}

/// The weighted sum of a row's assignments in the order of their experts, group by group, and of
/// the groups by the tree; a group without one is +0.
template <typename Wire, typename In, int kGroups>
__device__ void send_sum(const DeviceCombineParams& args, const Item& item, Assignment mine) {
  constexpr int kValues = kSendSteps * 8;
  constexpr int kRows = kBatch<In, kGroups>;
  const std::int64_t hidden = args.exchange.layout.hidden;
  float sum[kGroups][kValues] = {};
  int left = __popc(__ballot_sync(0xffffffffU, mine.row != Assignment::kNone));
  for (; left > 0; left -= kRows) {
    Eight<In> in[kRows][kSendSteps];
    float weight[kRows];
    int group[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      group[j] = -1;
      weight[j] = 0.0F;
      if (j < left) {
        take_first(mine, args.expert.rows, hidden, item.first, in[j], weight[j], group[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
#pragma unroll
      for (int pair = 0; pair < kValues / 2; ++pair) {
        const float2 y = get_pair(in[j][pair / 4], pair % 4);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          // Chosen by value: by a branch the compiler would keep the sums in memory.
          const float2 more = {__fmaf_rn(weight[j], y.x, sum[g][2 * pair]),
                               __fmaf_rn(weight[j], y.y, sum[g][2 * pair + 1])};
          sum[g][2 * pair] = group[j] == g ? more.x : sum[g][2 * pair];
          sum[g][2 * pair + 1] = group[j] == g ? more.y : sum[g][2 * pair + 1];
        }
      }
    }
  }
#pragma unroll
  for (int apart = 1; apart < kGroups; apart *= 2) {
    if (apart >= args.expert.width) continue;
#pragma unroll
    for (int g = 0; g < kGroups; g += 2 * apart) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) sum[g][i] = __fadd_rn(sum[g][i], sum[g + apart][i]);
    }
  }
  Eight<float> out[kSendSteps];
#pragma unroll
  for (int i = 0; i < kValues; ++i) out[i / 8].word[i % 8] = __float_as_uint(sum[0][i]);
  store_result<Wire>(args.exchange, item, out);
}

/// What goes home from this rank: lane s has the rows of source s.
struct Sources {
  int rows = 0, begin = 0;
  int pieces;  // of a row
  int items;   // at most: pieces of as many rows of each source as one has

  __device__ __forceinline__ explicit Sources(const DeviceExchangeParams& p)
      : pieces(static_cast<int>((p.layout.hidden + kSendWidth - 1) / kSendWidth)) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < p.layout.num_ranks) {
      rows = static_cast<int>(p.state->source_rows[lane] << p.group_bits);
      begin = static_cast<int>(p.state->source_begin[lane] << p.group_bits);
    }
    items = __reduce_max_sync(0xffffffffU, rows) * p.layout.num_ranks * pieces;
  }
  /// Some warps are to add from the start.
  [[nodiscard]] __device__ __forceinline__ bool are_many() const {
    return items > kManyPieces * static_cast<int>(gridDim.x) * kExchangeWarps;
  }
};

/// By the first `warps` of each block: send(item, row among those received).
template <typename Send>
__device__ __forceinline__ void for_each_piece(const DeviceExchangeParams& p,
                                               const Sources& sources, int warps, Send&& send) {
  const int stride = static_cast<int>(gridDim.x) * warps;
  for (int i = static_cast<int>(blockIdx.x + gridDim.x * (threadIdx.x / 32)); i < sources.items;
       i += stride) {
    const Item item(p, i, sources.pieces);
    if (item.row >= __shfl_sync(0xffffffffU, sources.rows, item.home)) continue;
    send(item, std::int64_t{__shfl_sync(0xffffffffU, sources.begin, item.home) + item.row});
  }
}

template <typename Wire, typename In, int kParts>
__device__ __forceinline__ void send_sums(const DeviceCombineParams& args, const Sources& sources,
                                          int warps) {
  const DeviceExchangeParams& p = args.exchange;
  const std::int64_t buffer = p.layout.buffer_in_turn(p.state->dispatches);
  for_each_piece(p, sources, warps, [&](const Item& item, std::int64_t row) {
    send_sum<Wire, In, most_groups(kParts)>(args, item, load_assignment(args, buffer, row));
  });
}

/// A loop for each type: with the types told apart inside of one, registers are written to memory.
template <typename Wire, int kParts>
__device__ void send_results(const DeviceCombineParams& args, const Sources& sources, int warps) {
  if (args.expert.rows == nullptr) {
    for_each_piece(args.exchange, sources, warps, [&](const Item& item, std::int64_t row) {
      send_partial<Wire>(args, item, row);
    });
    return;
  }
  switch (args.expert.dtype) {
    case DType::kBF16: return send_sums<Wire, __nv_bfloat16, kParts>(args, sources, warps);
    case DType::kF16: return send_sums<Wire, __half, kParts>(args, sources, warps);
    default: return send_sums<Wire, float, kParts>(args, sources, warps);
  }
}

/// Pieces of tokens, dealt out to the warps; where some of them add `early`, to blocks, whose warps
/// count in `taken` those that they take as they come.
template <typename Wire, int kParts>
__device__ bool add_tokens(const DeviceCombineParams& args, int& taken, bool early) {
  // Vectors that a lane has under way per part; 32 registers hold them.
  constexpr int kPartRegisters = 2 * static_cast<int>(sizeof(Wire)) + (kIsFp8<Wire> ? 1 : 0);
  constexpr int kSteps = 32 / (kParts * kPartRegisters) >= 2 ? 2 : 1;
  constexpr int kWidth = kSteps * 256;
  const DeviceExchangeParams& p = args.exchange;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t hidden = p.layout.hidden;
  const auto pieces = static_cast<int>((hidden + kWidth - 1) / kWidth);
  const int items = static_cast<int>(p.num_tokens) * pieces;
  int number = static_cast<int>(threadIdx.x) / 32;  // of the block's
  for (;; number += kExchangeWarps) {
    if (early) {
      if (lane == 0) number = atomicAdd(&taken, 1);
      number = __shfl_sync(0xffffffffU, number, 0);
    }
    const int i = static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) * number;
    if (i >= items) return true;
    const std::int64_t token = i / pieces;
    const std::int64_t first = std::int64_t{i % pieces} * kWidth + lane * 8;
    Parts<Wire, kParts, kSteps> parts(p, token, first);
    if (!parts.wait(p, early)) return false;
    parts.forget();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::int64_t at = first + step * 256;
      if (at >= hidden) continue;
      float sum[8];
      add_parts<Wire, kParts>(parts.part[step], sum);
      if (args.shared != nullptr) {
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          sum[v] = __fadd_rn(sum[v], args.shared[token * hidden + at + v]);
        }
      }
      store_out(args, token * hidden + at, sum);
    }
  }
}

/// The last warp of all: tells every rank that this one has begun, so that what dispatch has left
/// here may be written over once all have, and waits for them.
__device__ void begin_together(const DeviceExchangeParams& p, std::uint64_t epoch) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane < p.layout.num_ranks) {
    const int to = (p.rank + lane) % p.layout.num_ranks;
    store_release_system(p.window[to] + p.places.results_flag(p.rank), epoch);
  }
}

template <typename Wire, int kParts>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    combine_low_latency_kernel(const __grid_constant__ DeviceCombineParams args) {
  __shared__ int taken;
  const DeviceExchangeParams& p = args.exchange;
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const bool last_warp = blockIdx.x == gridDim.x - 1 && warp == kExchangeWarps - 1;
  if (threadIdx.x == 0) taken = 0;
  __syncthreads();
  ptx::start_after_previous_kernel();
  std::uint64_t epoch = 0;
  if (last_warp) {
    epoch = *static_cast<volatile std::uint64_t*>(&p.state->combines) + 1;
    begin_together(p, epoch);
  }
  const Sources sources(p);
  const bool early = sources.are_many();
  const int senders = early ? kExchangeWarps - kAdders : kExchangeWarps;
  if (warp < senders) send_results<Wire, kParts>(args, sources, senders);
  if (!add_tokens<Wire, kParts>(args, taken, early) || !last_warp) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool here = lane >= p.layout.num_ranks ||
                    wait_for(p, p.places.results_flag(lane), epoch, DevicePhase::kResults, lane);
  if (!__all_sync(0xffffffffU, here) || lane != 0) return;
  // A rank that has given up before it sent may have sent other sums.
  if (load_relaxed_system(p.window[p.rank] + p.places.abort_flag()) != 0) {
    give_up(p, 2, DevicePhase::kResults, p.rank, epoch, epoch);
  }
  p.state->combines = epoch;
}

using CombineKernel = void (*)(DeviceCombineParams);

CombineKernel combine_kernel_of(DType wire, int num_parts) {
  return for_wire_and_parts(wire, num_parts,
                            []<typename Wire, int kParts>(Wire, NumParts<kParts>) -> CombineKernel {
                              return combine_low_latency_kernel<Wire, kParts>;
                            });
}

}  // namespace

void load_combine_low_latency_kernels(DType wire, int num_parts) {
  cudaFuncAttributes attributes;
  SWITCHYARD_CUDA(cudaFuncGetAttributes(&attributes, combine_kernel_of(wire, num_parts)));
}

void launch_combine_low_latency(const DeviceCombineParams& params, const ExchangeLaunch& launch) {
  const ExchangeLayout& layout = params.exchange.layout;
  const int num_parts = layout.num_ranks << params.exchange.group_bits;
  launch_exchange(combine_kernel_of(layout.combine_wire, num_parts), launch, 0, params);
}

}  // namespace switchyard
