// Dispatch between GPUs in one launch. Every block derives the places of all rows from the routing
// by itself (no grid barrier: T * K ids from L2), block 0 publishes the counts, then a warp loads a
// piece of a row once and stores it to each distinct destination, each rank starting at another
// one: on Hopper by bulk copies (dispatch_bulk.cuh), else block b tokens b, b + G, b + 2G, ...
// Bound by the wire; 8 to 16 blocks fill it.
#include <algorithm>
#include <type_traits>

#include "comm/device/throughput/dispatch_bulk.cuh"
#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"

namespace switchyard {
namespace {

/// Tells every rank how many rows this one sends to each.
__device__ void publish_counts(const DeviceExchangeParams& p, const DispatchShared& shared,
                               std::uint64_t epoch) {
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  std::byte* const to =
      write_counts(p, lane < p.layout.num_ranks ? shared.rows_to[lane] : 0, epoch);
  __syncwarp();
  if (to != nullptr && lane == 0) store_release_system(to + p.layout.counts_flag(p.rank), epoch);
}

/// Those of an earlier dispatch of the same routing: nobody waits for a message.
__device__ void take_counts(const DeviceDispatchParams& args, DispatchShared& shared) {
  const int ranks = args.exchange.layout.num_ranks;
  const auto pair = static_cast<int>(threadIdx.x);
  if (pair < ranks * ranks) {
    shared.counts[pair / ranks * kMaxDeviceRanks + pair % ranks] = args.counts[pair];
  }
  __syncthreads();
}

template <typename In, typename Wire>
__device__ void send_piece(const DeviceDispatchParams& args, const DispatchShared& shared,
                           const TokenGroup* groups, std::int64_t token, int piece,
                           std::int64_t buffer) {
  const DeviceExchangeParams& p = args.exchange;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t hidden = p.layout.hidden;
  const auto* row =
      static_cast<const In*>(args.x) + (args.copies == 1 ? token : token / args.copies) * hidden;
  // All of the piece is asked for before any of it is encoded: the compiler moves no load over the
  // shuffles of an encoding, and each would wait for memory by itself.
  Eight<In> in[kPieceSteps];
#pragma unroll
  for (int step = 0; step < kPieceSteps; ++step) {
    const std::int64_t at = std::int64_t{piece} * kPieceValues + step * 256 + lane * 8;
    in[step] = {};
    if (at < hidden) in[step] = *reinterpret_cast<const Eight<In>*>(row + at);
  }
  Eight<Wire> values[kPieceSteps];
  float scale = 1.0F;
  if constexpr (std::is_same_v<In, Wire>) {
#pragma unroll
    for (int step = 0; step < kPieceSteps; ++step) values[step] = in[step];
  } else {
    scale = encode<Wire>(in, values);
  }
  const std::int64_t block = piece * (kPieceValues / kScaleBlock) + block_of_lane();
  const bool has_scale = kIsFp8<Wire> && block_of_lane() >= 0 && block < p.layout.row_scales();
  for (int i = 0; i < p.layout.num_ranks; ++i) {
    const int to = (p.rank + i) % p.layout.num_ranks;
    const std::uint16_t slot = slot_of(groups, static_cast<int>(token), to);
    const std::int64_t place = shared.base[to] + slot;
    const bool fits = slot != kNoSlot && place < p.layout.max_rows;
    if (piece == 0 && lane == 0) {
      p.slot[token * p.layout.num_ranks + to] = fits ? std::int32_t{slot} : -1;
    }
    if (!fits) continue;
    std::byte* const window = p.window[to];
    auto* const out = reinterpret_cast<Wire*>(window + p.layout.row(buffer, place));
#pragma unroll
    for (int step = 0; step < kPieceSteps; ++step) {
      const std::int64_t at = std::int64_t{piece} * kPieceValues + step * 256 + lane * 8;
      if (at >= hidden) continue;
      *reinterpret_cast<Eight<Wire>*>(out + at) = values[step];
    }
    if (has_scale) {
      reinterpret_cast<float*>(window + p.layout.scales(buffer, place))[block] = scale;
    }
    if (piece == 0 && lane < p.layout.top_k) {
      const std::int64_t k = token * p.layout.top_k + lane;
      const std::int32_t id = args.expert[k];
      const bool here = id >= 0 && id < p.num_experts && shared.owner[id] == to &&
                        (args.kept == nullptr || args.kept[k] != 0);
      reinterpret_cast<std::int32_t*>(window + p.layout.ids(buffer, place))[lane] = here ? id : -1;
      reinterpret_cast<float*>(window + p.layout.weights(buffer, place))[lane] =
          here ? args.weight[k] : 0.0F;
    }
  }
}

/// The ids of places that get no row become -1.
__device__ void clear_unused(const DeviceExchangeParams& p, const DispatchShared& shared,
                             std::int64_t buffer) {
  const std::int64_t used = rows_before(shared, p.layout.num_ranks, p.rank);
  auto* const ids = reinterpret_cast<std::int32_t*>(p.window[p.rank] + p.layout.ids(buffer, 0));
  const std::int64_t stride = std::int64_t{gridDim.x} * kExchangeThreads;
  for (std::int64_t i = used * p.layout.top_k + blockIdx.x * kExchangeThreads + threadIdx.x;
       i < p.layout.max_rows * p.layout.top_k; i += stride) {
    ids[i] = -1;
  }
}

/// Pieces through registers, chunk by chunk: any GPU.
template <typename In, typename Wire>
__device__ void send_through_registers(const DeviceDispatchParams& args,
                                       const DispatchShared& shared, const TokenGroup* groups,
                                       std::int64_t buffer) {
  const DeviceExchangeParams& p = args.exchange;
  const int ranks = p.layout.num_ranks;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t blocks = gridDim.x;
  const auto pieces = static_cast<int>((p.layout.hidden + kPieceValues - 1) / kPieceValues);
  const std::int64_t chunk_tokens = (p.max_tokens + p.chunks - 1) / p.chunks;
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    const std::int64_t begin = min(p.num_tokens, chunk * chunk_tokens);
    const std::int64_t end = min(p.num_tokens, begin + chunk_tokens);
    // This block's tokens in [begin, end): b + q * G.
    const std::int64_t first = (begin + blocks - 1 - blockIdx.x) / blocks;
    const std::int64_t last = (end + blocks - 1 - blockIdx.x) / blocks;
    const auto items = static_cast<int>(last - first) * pieces;
    for (int i = warp; i < items; i += kExchangeWarps) {
      const std::int64_t q = first + i / pieces;
      send_piece<In, Wire>(args, shared, groups, blockIdx.x + q * blocks, i % pieces, buffer);
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < ranks) {
      const int to = (p.rank + static_cast<int>(threadIdx.x)) % ranks;
      add_release_system(p.window[to] + p.layout.rows_flag(p.rank, chunk));
    }
  }
}

template <typename In, typename Wire, bool kBulk>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    dispatch_kernel(const __grid_constant__ DeviceDispatchParams args) {
  // The tokens' groups, then the rings of bulk copies; where these lie, first the tokens' masks.
  extern __shared__ __align__(128) std::byte memory[];
  auto* const groups = reinterpret_cast<TokenGroup*>(memory);
  std::byte* const rings = memory + group_bytes(args.exchange.num_tokens);
  __shared__ DispatchShared shared;
  [[maybe_unused]] __shared__ BulkShared bulk;
  if constexpr (kBulk) begin_bulk(bulk);
  const DeviceExchangeParams& p = args.exchange;
  const int ranks = p.layout.num_ranks;
  const std::uint64_t epoch = *static_cast<volatile std::uint64_t*>(&p.state->dispatches) + 1;
  const std::int64_t buffer = p.layout.buffer_in_turn(epoch);
  for (int e = static_cast<int>(threadIdx.x); e < p.num_experts; e += kExchangeThreads) {
    shared.owner[e] = static_cast<std::uint8_t>(owner_of(args, e));
  }
  __syncthreads();
  mark_destinations(args, shared, reinterpret_cast<std::uint32_t*>(rings), groups);
  count_rows(p, shared, groups);
  if (args.counts != nullptr) {
    take_counts(args, shared);
  } else {
    if (blockIdx.x == 0) publish_counts(p, shared, epoch);  // others wait for it
    if (!read_counts(p, shared, epoch, epoch, WholeBlock{})) return;
  }
  if (static_cast<int>(threadIdx.x) < ranks) {
    const int to = static_cast<int>(threadIdx.x);
    shared.base[to] = rows_before(shared, p.rank, to);
  }
  __syncthreads();

  if constexpr (kBulk) {
    send_in_bulk<In, Wire>(args, shared, bulk, groups, rings, buffer);
  } else {
    send_through_registers<In, Wire>(args, shared, groups, buffer);
  }
  clear_unused(p, shared, buffer);
  if (blockIdx.x == 0) {
    bool here = true;
    if (static_cast<int>(threadIdx.x) < ranks * p.chunks) {
      const int from = static_cast<int>(threadIdx.x) / p.chunks;
      here = wait_for(p, p.layout.rows_flag(from, static_cast<int>(threadIdx.x) % p.chunks),
                      epoch * gridDim.x, DevicePhase::kRows, from);
    }
    if (__syncthreads_and(here ? 1 : 0) == 0) return;
    write_state(p, shared);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&p.state->dispatch_done, 1U) == gridDim.x - 1) {
      p.state->dispatch_done = 0;
      p.state->dispatch_taken = 0;
      p.state->dispatches = epoch;
    }
  }
}

using DispatchKernel = void (*)(DeviceDispatchParams);

template <typename In, bool kBulk>
DispatchKernel dispatch_kernel_to(DType wire) {
  switch (wire) {
    case DType::kBF16: return dispatch_kernel<In, __nv_bfloat16, kBulk>;
    case DType::kF16: return dispatch_kernel<In, __half, kBulk>;
    case DType::kF8E4M3: return dispatch_kernel<In, __nv_fp8_e4m3, kBulk>;
    default: return dispatch_kernel<In, float, kBulk>;
  }
}

template <bool kBulk>
DispatchKernel dispatch_kernel_from(DType dtype, DType wire) {
  switch (dtype) {
    case DType::kBF16: return dispatch_kernel_to<__nv_bfloat16, kBulk>(wire);
    case DType::kF16: return dispatch_kernel_to<__half, kBulk>(wire);
    default: return dispatch_kernel_to<float, kBulk>(wire);
  }
}

DispatchKernel dispatch_kernel_of(DType dtype, DType wire, bool in_bulk) {
  return in_bulk ? dispatch_kernel_from<true>(dtype, wire)
                 : dispatch_kernel_from<false>(dtype, wire);
}

/// For the places of rows, and while they are made.
std::int64_t place_bytes(std::int64_t tokens) {
  return group_bytes(tokens) + ExchangeLayout::align(tokens);
}

/// 0: not in bulk.
std::int64_t ring_bytes(const DeviceExchangeParams& p, DType dtype, std::int64_t tokens) {
  const ExchangeLayout& layout = p.layout;
  if (p.bulk_copies == 0 || layout.row_bytes() % 16 != 0) return 0;
  const std::int64_t rings =
      kExchangeWarps * kBulkStages * bulk_stage_bytes(layout.hidden, dtype, layout.dispatch_wire);
  return group_bytes(tokens) + rings <= kMostBulkShared ? rings : 0;
}

}  // namespace

void load_dispatch_kernels(const DeviceExchangeParams& params, DType dtype) {
  const DType wire = params.layout.dispatch_wire;
  for (const bool in_bulk : {false, true}) {
    if (in_bulk && ring_bytes(params, dtype, 0) == 0) continue;
    const int most = allow_most_shared_memory(
        reinterpret_cast<const void*>(dispatch_kernel_of(dtype, wire, in_bulk)));
    const std::int64_t needed = place_bytes(params.max_tokens);
    if (needed <= most) continue;
    fail(ErrorCode::kUnsupported,
         "max_tokens={} want {} bytes of shared memory in each block, it has {}", params.max_tokens,
         needed, most);
  }
}

void launch_dispatch(const DeviceDispatchParams& params, DType dtype, int ctas, void* stream) {
  const DeviceExchangeParams& p = params.exchange;
  const std::int64_t rings = ring_bytes(p, dtype, p.num_tokens);
  const std::int64_t bytes = std::max(place_bytes(p.num_tokens), group_bytes(p.num_tokens) + rings);
  const DispatchKernel kernel = dispatch_kernel_of(dtype, p.layout.dispatch_wire, rings > 0);
  kernel<<<static_cast<unsigned>(ctas), kExchangeThreads, static_cast<std::size_t>(bytes),
           static_cast<cudaStream_t>(stream)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
