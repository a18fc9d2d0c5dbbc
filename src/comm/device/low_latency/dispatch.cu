// Dispatch of few tokens between GPUs in one launch, to fixed places: row j of source s lies at
// s * max_tokens + j, so that nothing is waited for before rows are sent. Bound by latency: a warp
// asks for its piece of a row before the ids are known, every block derives the slots by ballots.
// A few blocks send ids and weights ahead of the rows, and make the experts' index lists of what
// comes while the rows are on their way; the others send rows, a flag a block and destination.
#include <algorithm>
#include <type_traits>

#include "comm/device/low_latency/expert_lists.cuh"
#include "comm/device/low_latency/token_slots.cuh"
#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/ptx.cuh"

namespace switchyard {
namespace {

constexpr int kSteps = 4;  // vectors of 8 values that a lane holds: many warps share a row
constexpr int kPieceWidth = kSteps * 32 * 8;
/// Assignments whose experts and weights a block keeps in shared memory, at most: a few tokens' of
/// all ranks.
constexpr std::int64_t kMostListed = 32 * 1024;

/// Bytes of this rank's rows from which on their values are asked for late: rows that went out at
/// once would fill the wire before the ids are on it, and lists are made of these.
constexpr std::int64_t kManyBytes = 1 << 20;

/// Of the tokens whose ids this warp sends.
__device__ __forceinline__ int first_meta_token(int planners) {
  return static_cast<int>(blockIdx.x) + planners * static_cast<int>(threadIdx.x / 32);
}

/// A lane's assignment of a token.
struct Meta {
  std::int32_t id = -1;  // -1: none, or not kept
  float weight = 0.0F;
};

__device__ __forceinline__ Meta load_meta(const DeviceDispatchParams& args, int token) {
  const DeviceExchangeParams& p = args.exchange;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Meta meta;
  if (lane >= p.layout.top_k || token >= static_cast<int>(p.num_tokens)) return meta;
  const std::int64_t k = std::int64_t{token} * p.layout.top_k + lane;
  const std::int32_t id = args.expert[k];
  meta.weight = args.weight[k];
  const bool kept = args.kept == nullptr || args.kept[k] != 0;
  if (kept && id >= 0 && id < p.num_experts) meta.id = id;
  return meta;
}

/// Ids and weights of this block's tokens, the first of which `meta` is, and where the rows of each
/// are.
__device__ void send_meta(const DeviceDispatchParams& args, const Ballots* ballots, Meta meta,
                          int planners, std::int64_t buffer) {
  const DeviceExchangeParams& p = args.exchange;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int ranks = p.layout.num_ranks;
  for (int token = first_meta_token(planners); token < static_cast<int>(p.num_tokens);
       token += planners * kExchangeWarps) {
    const int owner = meta.id < 0 ? -1 : owner_of(args, meta.id);
    const std::int32_t slots = slot_of(ballots, token);
    if (lane < ranks) p.slot[token * ranks + lane] = slots;
    for (int i = 0; i < ranks; ++i) {
      const int to = (p.rank + i) % ranks;
      const std::int32_t slot = __shfl_sync(0xffffffffU, slots, to);
      if (slot < 0 || lane >= p.layout.top_k) continue;
      const std::int64_t place = p.rank * p.max_tokens + slot;
      std::byte* const window = p.window[to];
      reinterpret_cast<std::int32_t*>(window + p.places.ids(buffer, place))[lane] =
          owner == to ? meta.id : -1;
      reinterpret_cast<float*>(window + p.places.weights(buffer, place))[lane] =
          owner == to ? meta.weight : 0.0F;
    }
    meta = load_meta(args, token + planners * kExchangeWarps);
  }
}

/// Of tokens [begin, end) this warp takes every `stride`-th piece, neighbouring blocks neighbouring
/// ones.
struct Pieces {
  int begin, end, pieces;  // of a token
  int item, stride;

  [[nodiscard]] __device__ __forceinline__ bool done() const {
    return item >= (end - begin) * pieces;
  }
  [[nodiscard]] __device__ __forceinline__ int token() const { return begin + item / pieces; }
  [[nodiscard]] __device__ __forceinline__ std::int64_t first_value() const {
    return std::int64_t{item % pieces} * kPieceWidth + static_cast<int>(threadIdx.x) % 32 * 8;
  }
};

template <typename In>
__device__ __forceinline__ void load_piece(const DeviceDispatchParams& args, const Pieces& at,
                                           Eight<In> (&in)[kSteps]) {
  const std::int64_t hidden = args.exchange.layout.hidden;
  const int token = args.copies == 1 ? at.token() : at.token() / args.copies;
  const auto* const row = static_cast<const In*>(args.x) + token * hidden;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t value = at.first_value() + step * 256;
    in[step] = {};
    if (value < hidden) in[step] = *reinterpret_cast<const Eight<In>*>(row + value);
  }
}

template <typename Wire>
__device__ __forceinline__ void store_piece(const DeviceExchangeParams& p, const Pieces& at,
                                            std::int32_t slots, std::int64_t buffer,
                                            const Eight<Wire> (&values)[kSteps], float scale) {
  const std::int64_t hidden = p.layout.hidden;
  const std::int64_t block = at.item % at.pieces * (kPieceWidth / kScaleBlock) + block_of_lane();
  const bool has_scale = kIsFp8<Wire> && block_of_lane() >= 0 && block_of_lane() < 2 * kSteps &&
                         block < p.layout.row_scales();
  const std::int64_t first = at.first_value();
  for (int i = 0; i < p.layout.num_ranks; ++i) {
    const int to = (p.rank + i) % p.layout.num_ranks;
    const std::int32_t slot = __shfl_sync(0xffffffffU, slots, to);
    if (slot < 0) continue;
    const std::int64_t place = p.rank * p.max_tokens + slot;
    std::byte* const window = p.window[to];
    auto* const out = reinterpret_cast<Wire*>(window + p.places.row(buffer, place));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::int64_t value = first + step * 256;
      if (value >= hidden) continue;
      *reinterpret_cast<Eight<Wire>*>(out + value) = values[step];
    }
    if (has_scale) {
      reinterpret_cast<float*>(window + p.places.scales(buffer, place))[block] = scale;
    }
  }
}

/// The pieces of one chunk of tokens; `in` holds the first one, if there is one.
template <typename In, typename Wire>
__device__ __forceinline__ void send_pieces(const DeviceDispatchParams& args,
                                            const Ballots* ballots, Pieces at, std::int64_t buffer,
                                            Eight<In> (&in)[kSteps]) {
  while (!at.done()) {
    Eight<Wire> values[kSteps];
    float scale = 1.0F;
    if constexpr (std::is_same_v<In, Wire>) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) values[step] = in[step];
    } else {
      scale = encode<Wire>(in, values);
    }
    const Pieces now = at;
    at.item += at.stride;
    if (!at.done()) load_piece(args, at, in);
    store_piece(args.exchange, now, slot_of(ballots, now.token()), buffer, values, scale);
  }
}

/// The ids of places that get no row become -1.
__device__ void clear_unused(const DeviceExchangeParams& p, const ExchangeCounts& shared,
                             std::int64_t buffer) {
  const int top_k = p.layout.top_k;
  auto* ids = reinterpret_cast<std::int32_t*>(p.window[p.rank] + p.places.ids(buffer, 0));
  for (int s = 0; s < p.layout.num_ranks; ++s) {
    const int first = static_cast<int>(shared.counts[s * kMaxDeviceRanks + p.rank]) * top_k;
    for (int i = first + static_cast<int>(threadIdx.x); i < static_cast<int>(p.max_tokens) * top_k;
         i += kExchangeThreads) {
      ids[i] = -1;
    }
    ids += p.max_tokens * top_k;
  }
}

/// Blocks that have to do with ids: what they send first.
__device__ void announce(const DeviceDispatchParams& args, const Ballots* ballots, Meta meta,
                         int planners, std::uint64_t epoch) {
  const DeviceExchangeParams& p = args.exchange;
  const int ranks = p.layout.num_ranks;
  send_meta(args, ballots, meta, planners, p.layout.buffer_in_turn(epoch));
  if (blockIdx.x == 0) {
    const auto groups = static_cast<int>((p.num_tokens + 31) / 32);
    write_counts(p, rows_before_token(ballots, groups * 32), epoch);
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < ranks) {
    const int to = (p.rank + static_cast<int>(threadIdx.x)) % ranks;
    add_release_system(p.window[to] + p.places.counts_flag(p.rank));
  }
}

/// Block 0: until all that was sent to this rank is here; what the next kernels need to know of it.
/// Counts and rows are waited for at once, by different warps. False: leave.
__device__ bool receive(const DeviceExchangeParams& p, ExchangeCounts& shared, std::uint64_t epoch,
                        const LowLatencyBlocks& blocks) {
  bool here = true;
  if (threadIdx.x < kCountWarps * 32) {
    here = read_counts(p, shared, epoch, epoch * blocks.planners, FirstWarps{});
    if (here) write_state(p, shared);
  } else {
    const int flag = static_cast<int>(threadIdx.x) - kCountWarps * 32;
    if (flag < p.layout.num_ranks * p.chunks) {
      const int from = flag / p.chunks;
      here = wait_for(p, p.places.rows_flag(from, flag % p.chunks), epoch * blocks.senders,
                      DevicePhase::kRows, from);
    }
  }
  return __syncthreads_and(here ? 1 : 0) != 0;
}

template <typename In, typename Wire>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    dispatch_low_latency_kernel(const __grid_constant__ DeviceDispatchParams args) {
  extern __shared__ __align__(16)
      Ballots ballots[];  // [ceil(T / 32)], then room for the experts of assignments
  __shared__ ExchangeCounts shared;
  __shared__ ListShared list_shared;
  const DeviceExchangeParams& p = args.exchange;
  const int ranks = p.layout.num_ranks;
  const LowLatencyBlocks blocks = low_latency_blocks(static_cast<int>(gridDim.x));
  const auto block = static_cast<int>(blockIdx.x);
  const int sender = block - (static_cast<int>(gridDim.x) - blocks.senders);
  const bool plans = block < blocks.planners;
  const auto num_tokens = static_cast<int>(p.num_tokens);
  const int chunk_tokens = (static_cast<int>(p.max_tokens) + p.chunks - 1) / p.chunks;
  const auto pieces = static_cast<int>((p.layout.hidden + kPieceWidth - 1) / kPieceWidth);
  const auto pieces_of = [&](int chunk) {
    return Pieces{.begin = min(num_tokens, chunk * chunk_tokens),
                  .end = min(num_tokens, (chunk + 1) * chunk_tokens),
                  .pieces = pieces,
                  .item = sender + blocks.senders * static_cast<int>(threadIdx.x / 32),
                  .stride = blocks.senders * kExchangeWarps};
  };
  ptx::start_after_previous_kernel();
  // All that does not depend on anything is asked for at once.
  const std::uint64_t epoch = *static_cast<volatile std::uint64_t*>(&p.state->dispatches) + 1;
  Eight<In> in[kSteps];
  const bool few = p.num_tokens * p.layout.row_bytes() < kManyBytes;
  if (few && sender >= 0 && !pieces_of(0).done()) load_piece(args, pieces_of(0), in);
  Meta meta;
  if (plans) meta = load_meta(args, first_meta_token(blocks.planners));
  mark_destinations(args, ballots);
  __syncthreads();
  const std::int64_t buffer = p.layout.buffer_in_turn(epoch);
  if (plans) announce(args, ballots, meta, blocks.planners, epoch);
  if (sender >= 0) {
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      const Pieces at = pieces_of(chunk);
      if ((chunk > 0 || !few) && !at.done()) load_piece(args, at, in);
      send_pieces<In, Wire>(args, ballots, at, buffer, in);
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < ranks) {
        const int to = (p.rank + static_cast<int>(threadIdx.x)) % ranks;
        add_release_system(p.window[to] + p.places.rows_flag(p.rank, chunk));
      }
    }
  }
  if (!plans) return;
  if (block == 0) {
    if (!receive(p, shared, epoch, blocks)) return;
    // All blocks of this rank have read the epoch: their flags are among those that have come.
    if (threadIdx.x == 0) p.state->dispatches = epoch;
  } else if (!read_counts(p, shared, epoch, epoch * blocks.planners, WholeBlock{})) {
    return;
  }
  if (block == blocks.planners - 1) clear_unused(p, shared, buffer);
  const LowLatencyLists lists = low_latency_lists(blocks.planners);
  if (args.lists.expert_begin == nullptr || block < lists.first ||
      block >= lists.first + lists.blocks) {
    return;
  }
  const int room = args.lists.room;
  auto* const weights = reinterpret_cast<float*>(ballots + (num_tokens + 31) / 32);
  auto* const kept = reinterpret_cast<std::uint16_t*>(weights + room);
  make_lists(args, shared, list_shared, {.weight = weights, .kept = kept, .room = room},
             block - lists.first, lists.blocks, buffer);
}

using DispatchKernel = void (*)(DeviceDispatchParams);

template <typename In>
DispatchKernel dispatch_kernel_to(DType wire) {
  switch (wire) {
    case DType::kBF16: return dispatch_low_latency_kernel<In, __nv_bfloat16>;
    case DType::kF16: return dispatch_low_latency_kernel<In, __half>;
    case DType::kF8E4M3: return dispatch_low_latency_kernel<In, __nv_fp8_e4m3>;
    default: return dispatch_low_latency_kernel<In, float>;
  }
}

DispatchKernel dispatch_kernel_of(DType dtype, DType wire) {
  switch (dtype) {
    case DType::kBF16: return dispatch_kernel_to<__nv_bfloat16>(wire);
    case DType::kF16: return dispatch_kernel_to<__half>(wire);
    default: return dispatch_kernel_to<float>(wire);
  }
}

}  // namespace

void load_dispatch_low_latency_kernels(DType dtype, DType wire) {
  allow_most_shared_memory(reinterpret_cast<const void*>(dispatch_kernel_of(dtype, wire)));
}

void launch_dispatch_low_latency(DeviceDispatchParams params, DType dtype,
                                 const ExchangeLaunch& launch) {
  const DeviceExchangeParams& p = params.exchange;
  const DispatchKernel kernel = dispatch_kernel_of(dtype, p.layout.dispatch_wire);
  const auto ballots = static_cast<std::size_t>((p.num_tokens + 31) / 32) * sizeof(Ballots);
  std::int64_t room = 0;
  if (params.lists.expert_begin != nullptr) {
    const std::int64_t all = p.layout.max_rows * p.layout.top_k;
    room = std::min<std::int64_t>(kMostListed, (all + kLooked - 1) / kLooked * kLooked);
  }
  params.lists.room = static_cast<std::int32_t>(room);
  launch_exchange(kernel, launch, ballots + static_cast<std::size_t>(room * ListedExperts::kBytes),
                  params);
}

}  // namespace switchyard
