// Dispatch between GPUs in one launch. Every block derives the places of all rows from the routing
// by itself (no grid barrier: T * K ids from L2), block 0 publishes the counts, then block b sends
// tokens b, b + G, b + 2G, ...: a warp loads a piece of a row once and stores it to each distinct
// destination, each rank starting at another one; many tokens by bulk copies (dispatch_bulk.cuh).
// Bound by the wire; 8 to 16 blocks fill it.
#include <type_traits>

#include "comm/dispatch_bulk.cuh"
#include "core/check.hpp"
#include "core/cuda_check.hpp"
#include "core/cuda_device.hpp"

namespace switchyard {
namespace {

__device__ __noinline__ void report_id(const DeviceExchangeParams& p, int token, std::int32_t id) {
  give_up(p, 1, DevicePhase::kExpertId, p.rank, static_cast<std::uint64_t>(token),
          static_cast<std::uint64_t>(id));
}

/// The rank that has an expert, of `ranks`: floor(((id + 1) R - 1) / E) by a product.
struct OwnerOf {
  std::uint32_t ranks, inverse;

  __device__ __forceinline__ OwnerOf(int num_ranks, int num_experts)
      : ranks(static_cast<std::uint32_t>(num_ranks)),
        inverse(
            static_cast<std::uint32_t>((0x100000000ULL + static_cast<unsigned>(num_experts) - 1) /
                                       static_cast<unsigned>(num_experts))) {}
  __device__ __forceinline__ std::uint32_t operator()(std::int32_t id) const {
    return __umulhi(static_cast<std::uint32_t>(id) * ranks + ranks - 1, inverse);
  }
};

/// As mark_destinations, for ids in fours at 16 bytes and of which all are kept: a thread takes
/// whole tokens.
__device__ void mark_whole_tokens(const DeviceDispatchParams& p, std::uint8_t* masks) {
  const auto num_tokens = static_cast<int>(p.exchange.num_tokens);
  const auto num_experts = static_cast<std::uint32_t>(p.exchange.num_experts);
  const int fours = p.exchange.layout.top_k / 4;
  const OwnerOf owner_of(p.exchange.layout.num_ranks, p.exchange.num_experts);
  const auto* const ids = reinterpret_cast<const int4*>(p.expert);
  constexpr int kBatch = 4;  // tokens
  int wrong_token = -1;
  std::int32_t wrong_id = 0;
  for (int first = static_cast<int>(threadIdx.x); first < num_tokens;
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
          to[j] |= known ? 1U << owner_of(id) : 0;
          if (known || id == -1) continue;
          wrong_token = first + j * kExchangeThreads;
          wrong_id = id;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int token = first + j * kExchangeThreads;
      if (token < num_tokens) masks[token] = static_cast<std::uint8_t>(to[j]);
    }
  }
  if (wrong_token >= 0) report_id(p.exchange, wrong_token, wrong_id);
  __syncthreads();
}

/// Destinations of each token, a bit each in a byte of `masks`. Neighbouring threads take
/// neighbouring assignments, so that the ids come in whole lines. Where all of a token's lie in one
/// warp its lanes join their bits by shuffles: atomics would meet in one word, 32 at a time. An id
/// out of range makes all ranks leave.
__device__ void mark_destinations(const DeviceDispatchParams& p, const DispatchShared& shared,
                                  std::uint32_t* masks) {
  const auto num_tokens = static_cast<int>(p.exchange.num_tokens);
  const int top_k = p.exchange.layout.top_k;
  const int size = num_tokens * top_k;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (top_k % 4 == 0 && p.kept == nullptr && p.exchange.num_experts > 1 &&
      reinterpret_cast<std::uintptr_t>(p.expert) % 16 == 0) {
    return mark_whole_tokens(p, reinterpret_cast<std::uint8_t*>(masks));
  }
  const bool joined = 32 % top_k == 0;
  if (!joined) {
    for (int i = static_cast<int>(threadIdx.x); i < (num_tokens + 3) / 4; i += kExchangeThreads) {
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
          reinterpret_cast<std::uint8_t*>(masks)[token] = static_cast<std::uint8_t>(to);
        }
      } else if (to != 0) {
        atomicOr(&masks[token / 4], to << token % 4 * 8);
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

/// How many rows to each rank come before this thread's tokens, and in `shared` how many there are.
/// A thread's tokens are `share` in a row.
__device__ void count_rows(const DeviceDispatchParams& p, DispatchShared& shared,
                           const std::uint8_t* masks, int share,
                           std::int32_t (&before)[kMaxDeviceRanks]) {
  const auto num_tokens = static_cast<int>(p.exchange.num_tokens);
  const int begin = min(num_tokens, share * static_cast<int>(threadIdx.x));
  const int end = min(num_tokens, begin + share);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::int32_t rows[kMaxDeviceRanks] = {};
  for (int token = begin; token < end; ++token) {
    const std::uint32_t ranks = masks[token];
#pragma unroll
    for (int d = 0; d < kMaxDeviceRanks; ++d) rows[d] += static_cast<std::int32_t>(ranks >> d & 1U);
  }
#pragma unroll
  for (int d = 0; d < kMaxDeviceRanks; ++d) {
    std::int32_t sum = rows[d];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const std::int32_t other = __shfl_up_sync(0xffffffffU, sum, distance);
      if (lane >= distance) sum += other;
    }
    before[d] = sum - rows[d];
    if (lane == 31) shared.warp_rows[warp][d] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int d = 0; d < kMaxDeviceRanks; ++d) {
    const std::int32_t of_warp = lane < kExchangeWarps ? shared.warp_rows[lane][d] : 0;
    before[d] += __reduce_add_sync(0xffffffffU, lane < warp ? of_warp : 0);
    const std::int32_t all = __reduce_add_sync(0xffffffffU, of_warp);
    if (threadIdx.x == 0) shared.rows_to[d] = all;
  }
  __syncthreads();
}

/// slots[token / G][d] for this block's tokens: the how-manieth row to d it is, in token order.
__device__ void make_slots(const DeviceDispatchParams& p, const std::uint8_t* masks, int share,
                           std::int32_t (&before)[kMaxDeviceRanks], std::uint16_t* slots) {
  const auto num_tokens = static_cast<int>(p.exchange.num_tokens);
  const int begin = min(num_tokens, share * static_cast<int>(threadIdx.x));
  const int end = min(num_tokens, begin + share);
  const auto blocks = static_cast<int>(gridDim.x);
  int of_block = begin / blocks;  // and which block's it is:
  int block = begin % blocks;
  for (int token = begin; token < end; ++token) {
    const std::uint32_t ranks = masks[token];
    const bool mine = block == static_cast<int>(blockIdx.x);
    std::uint16_t* const out = slots + of_block * kMaxDeviceRanks;
#pragma unroll
    for (int d = 0; d < kMaxDeviceRanks; ++d) {
      const bool goes = (ranks >> d & 1U) != 0;
      if (mine) out[d] = goes ? static_cast<std::uint16_t>(before[d]) : kNoSlot;
      before[d] += goes ? 1 : 0;
    }
    if (++block == blocks) {
      block = 0;
      ++of_block;
    }
  }
  __syncthreads();
}

/// Tells every rank how many rows this one sends to each.
__device__ void publish_counts(const DeviceExchangeParams& p, const DispatchShared& shared,
                               std::uint64_t epoch) {
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  std::byte* const to =
      write_counts(p, lane < p.layout.num_ranks ? shared.rows_to[lane] : 0, epoch);
  __syncwarp();
  if (to != nullptr && lane == 0) store_release_system(to + p.layout.counts_flag(p.rank), epoch);
}

template <typename In, typename Wire>
__device__ void send_piece(const DeviceDispatchParams& args, const DispatchShared& shared,
                           const std::uint16_t* slots, std::int64_t token, int piece,
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
    const std::uint16_t slot = slots[to];
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
                                       const DispatchShared& shared, const std::uint16_t* slots,
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
      send_piece<In, Wire>(args, shared, slots + q * kMaxDeviceRanks, blockIdx.x + q * blocks,
                           i % pieces, buffer);
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
  // Masks of all tokens, slots[tokens of this block, kMaxDeviceRanks], the rings of bulk copies.
  extern __shared__ __align__(128) std::uint32_t masks[];
  auto* const slots = reinterpret_cast<std::uint16_t*>(masks + (args.exchange.num_tokens + 3) / 4);
  __shared__ DispatchShared shared;
  [[maybe_unused]] __shared__ BulkShared bulk;
  if constexpr (kBulk) begin_bulk(bulk);
  const DeviceExchangeParams& p = args.exchange;
  const int ranks = p.layout.num_ranks;
  const std::uint64_t epoch = *static_cast<volatile std::uint64_t*>(&p.state->dispatches) + 1;
  const std::int64_t buffer = p.layout.buffer_in_turn(epoch);
  for (int rank = 0; rank < ranks; ++rank) {
    const int end = static_cast<int>((rank + 1) * std::int64_t{p.num_experts} / ranks);
    for (int e = static_cast<int>(rank * std::int64_t{p.num_experts} / ranks) +
                 static_cast<int>(threadIdx.x);
         e < end; e += kExchangeThreads) {
      shared.owner[e] = static_cast<std::uint8_t>(rank);
    }
  }
  __syncthreads();
  mark_destinations(args, shared, masks);
  const auto* const of_tokens = reinterpret_cast<const std::uint8_t*>(masks);
  const auto share = static_cast<int>((p.num_tokens + kExchangeThreads - 1) / kExchangeThreads);
  std::int32_t before[kMaxDeviceRanks];
  count_rows(args, shared, of_tokens, share, before);
  if (blockIdx.x == 0) publish_counts(p, shared, epoch);  // others wait for it
  make_slots(args, of_tokens, share, before, slots);
  if (!read_counts(p, shared, epoch, epoch, WholeBlock{})) return;
  if (static_cast<int>(threadIdx.x) < ranks) {
    const int to = static_cast<int>(threadIdx.x);
    shared.base[to] = rows_before(shared, p.rank, to);
  }
  __syncthreads();

  if constexpr (kBulk) {
    send_in_bulk<In, Wire>(args, shared, bulk, slots, rings_after(masks, p, gridDim.x), buffer);
  } else {
    send_through_registers<In, Wire>(args, shared, slots, buffer);
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

/// For the places of rows.
std::int64_t place_bytes(std::int64_t tokens, int ctas) {
  constexpr auto kSlotBytes = static_cast<std::int64_t>(kMaxDeviceRanks * sizeof(std::uint16_t));
  return (tokens + 3) / 4 * 4 + (tokens + ctas - 1) / ctas * kSlotBytes;
}

/// 0: not in bulk.
std::int64_t ring_bytes(const DeviceExchangeParams& p, DType dtype, std::int64_t tokens, int ctas) {
  const ExchangeLayout& layout = p.layout;
  if (p.bulk_copies == 0 || layout.row_bytes() % 16 != 0) return 0;
  const std::int64_t rings =
      kExchangeWarps * kBulkStages * bulk_stage_bytes(layout.hidden, dtype, layout.dispatch_wire);
  const std::int64_t all = ExchangeLayout::align(place_bytes(tokens, ctas)) + rings;
  return all <= kMostBulkShared ? rings : 0;
}

}  // namespace

void load_dispatch_kernels(const DeviceExchangeParams& params, DType dtype, int ctas) {
  const DType wire = params.layout.dispatch_wire;
  for (const bool in_bulk : {false, true}) {
    if (in_bulk && ring_bytes(params, dtype, 0, ctas) == 0) continue;
    const int most = allow_most_shared_memory(
        reinterpret_cast<const void*>(dispatch_kernel_of(dtype, wire, in_bulk)));
    const std::int64_t needed = place_bytes(params.max_tokens, ctas);
    if (needed <= most) continue;
    fail(ErrorCode::kUnsupported,
         "max_tokens={} on {} blocks want {} bytes of shared memory each, a block has {}",
         params.max_tokens, ctas, needed, most);
  }
}

void launch_dispatch(const DeviceDispatchParams& params, DType dtype, int ctas, void* stream) {
  const DeviceExchangeParams& p = params.exchange;
  const std::int64_t rings = ring_bytes(p, dtype, p.num_tokens, ctas);
  const std::int64_t places = place_bytes(p.num_tokens, ctas);
  const DispatchKernel kernel = dispatch_kernel_of(dtype, p.layout.dispatch_wire, rings > 0);
  kernel<<<static_cast<unsigned>(ctas), kExchangeThreads,
           static_cast<std::size_t>(rings > 0 ? ExchangeLayout::align(places) + rings : places),
           static_cast<cudaStream_t>(stream)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
