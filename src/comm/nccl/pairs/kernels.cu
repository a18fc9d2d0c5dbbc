// Around a transfer by ncclSend and ncclRecv: rows are packed for each destination before it, and
// places, counts and sums are made of what has come after it, with the bits of the exchange through
// windows. Bound by memory; nothing here waits for another rank.
#include <algorithm>
#include <type_traits>

#include "comm/device/combine_parts.cuh"
#include "comm/nccl/pairs/kernels.hpp"
#include "core/gpu/cuda_check.hpp"

namespace switchyard {
namespace {

constexpr int kBlockThreads = 1024;  // of kernels in which a block goes over all tokens

__device__ __forceinline__ void tell(std::uint64_t& place, std::uint64_t epoch) {
  *static_cast<volatile std::uint64_t*>(&place) = epoch;
}

struct ExpertRange {
  std::int32_t begin;
  std::int32_t end;
};

__device__ __forceinline__ ExpertRange experts_of(const DeviceExchangeParams& p, int rank) {
  const std::int64_t experts = p.num_experts;
  return {static_cast<std::int32_t>(rank * experts / p.layout.num_ranks),
          static_cast<std::int32_t>((rank + 1) * experts / p.layout.num_ranks)};
}

/// The assignment's expert if it is kept and in `range`, else -1.
__device__ __forceinline__ std::int32_t expert_in(const DeviceDispatchParams& args,
                                                  std::int64_t assignment, ExpertRange range) {
  const std::int32_t id = args.expert[assignment];
  const bool here = id >= range.begin && id < range.end;
  return here && (args.kept == nullptr || args.kept[assignment] != 0) ? id : -1;
}

// ---- dispatch ----------------------------------------------------------------------------------

/// Block d goes over all tokens for rank d.
__global__ void __launch_bounds__(kBlockThreads)
    slots_kernel(const __grid_constant__ DeviceDispatchParams args,
                 const __grid_constant__ Staging staging) {
  __shared__ int warp_rows[kBlockThreads / 32];
  const DeviceExchangeParams& p = args.exchange;
  const int to = static_cast<int>(blockIdx.x);
  const int ranks = p.layout.num_ranks;
  const int top_k = p.layout.top_k;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const ExpertRange range = experts_of(p, to);
  int rows = 0;  // of the tokens before
  for (std::int64_t first = 0; first < p.num_tokens; first += kBlockThreads) {
    const std::int64_t token = first + threadIdx.x;
    bool goes = false;
    for (int k = 0; k < top_k && token < p.num_tokens; ++k) {
      const std::int64_t assignment = token * top_k + k;
      goes = goes || expert_in(args, assignment, range) >= 0;
      const std::int32_t id = args.expert[assignment];
      if (to == 0 && (id < -1 || id >= p.num_experts)) {
        give_up(p, 1, DevicePhase::kExpertId, p.rank, static_cast<std::uint64_t>(token),
                static_cast<std::uint64_t>(id));
      }
    }
    const std::uint32_t going = __ballot_sync(0xffffffffU, goes);
    if (lane == 0) warp_rows[warp] = __popc(going);
    __syncthreads();
    int slot = rows + __popc(going & ((1U << lane) - 1));
    for (int w = 0; w < kBlockThreads / 32; ++w) {
      if (w < warp) slot += warp_rows[w];
      rows += warp_rows[w];
    }
    if (token < p.num_tokens) p.slot[token * ranks + to] = goes ? slot : -1;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const std::uint64_t epoch = p.state->dispatches + 1;
  auto* const message =
      reinterpret_cast<std::uint64_t*>(staging.memory + staging.layout.counts(0, p.rank));
  message[to + 1] = static_cast<std::uint64_t>(rows);
  if (to != 0) return;
  message[0] = epoch;
  message[ranks + 1] = ~epoch;
  tell(staging.progress->packed[0], epoch);
}

/// A warp packs a token: each value is loaded and encoded once.
template <typename In, typename Wire>
__global__ void __launch_bounds__(kExchangeThreads)
    rows_kernel(const __grid_constant__ DeviceDispatchParams args,
                const __grid_constant__ Staging staging) {
  const DeviceExchangeParams& p = args.exchange;
  const ExchangeLayout& layout = staging.layout;
  const int ranks = layout.num_ranks;
  const int top_k = layout.top_k;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t stride = std::int64_t{gridDim.x} * kExchangeWarps;
  for (std::int64_t token = blockIdx.x + gridDim.x * (threadIdx.x / 32); token < p.num_tokens;
       token += stride) {
    const std::int32_t* const slots = p.slot + token * ranks;
    const In* const row = static_cast<const In*>(args.x) + token / args.copies * layout.hidden;
    for (std::int64_t first = 0; first < layout.hidden; first += 256) {
      const std::int64_t at = first + lane * 8;
      Eight<In> in[1] = {};
      if (at < layout.hidden) in[0] = *reinterpret_cast<const Eight<In>*>(row + at);
      Eight<Wire> out[1];
      float scale = 0;
      if constexpr (std::is_same_v<In, Wire>) {
        out[0] = in[0];
      } else {
        scale = encode<Wire>(in, out);
      }
      if (at >= layout.hidden) continue;
      for (int to = 0; to < ranks; ++to) {
        if (slots[to] < 0) continue;
        const std::int64_t place = to * p.max_tokens + slots[to];
        std::byte* const packed = staging.memory + layout.row(0, place);
        *reinterpret_cast<Eight<Wire>*>(reinterpret_cast<Wire*>(packed) + at) = out[0];
        if (kIsFp8<Wire> && at % kScaleBlock == 0) {
          reinterpret_cast<float*>(staging.memory + layout.scales(0, place))[at / kScaleBlock] =
              scale;
        }
      }
    }
    if (lane >= top_k) continue;
    for (int to = 0; to < ranks; ++to) {
      if (slots[to] < 0) continue;
      const std::int64_t place = to * p.max_tokens + slots[to];
      const std::int32_t id = expert_in(args, token * top_k + lane, experts_of(p, to));
      reinterpret_cast<std::int32_t*>(staging.memory + layout.ids(0, place))[lane] = id;
      reinterpret_cast<float*>(staging.memory + layout.weights(0, place))[lane] =
          id >= 0 ? args.weight[token * top_k + lane] : 0.0F;
    }
  }
}

/// One block: rows of each source, and where they begin.
__global__ void __launch_bounds__(kBlockThreads)
    received_kernel(const __grid_constant__ DeviceExchangeParams p,
                    const __grid_constant__ Staging staging, int ctas) {
  __shared__ std::int64_t counts[kMaxDeviceRanks * kMaxDeviceRanks];
  const int thread = static_cast<int>(threadIdx.x);
  const int ranks = p.layout.num_ranks;
  const std::uint64_t epoch = p.state->dispatches + 1;
  const std::int64_t buffer = p.layout.buffer_in_turn(epoch);
  std::byte* const window = p.window[p.rank];
  const int from = thread / (ranks + 2);
  const int word = thread % (ranks + 2);
  bool right = true;
  if (from < ranks) {
    const std::uint64_t value =
        reinterpret_cast<const std::uint64_t*>(window + p.layout.counts(buffer, from))[word];
    if (word == 0) {
      right = value == epoch;
    } else if (word == ranks + 1) {
      right = value == ~epoch;
    } else {
      right = value <= static_cast<std::uint64_t>(p.max_tokens);
      counts[from * ranks + word - 1] = static_cast<std::int64_t>(value);
    }
    if (!right) give_up(p, 1, DevicePhase::kCounts, from, epoch, value);
  }
  if (thread == 0) tell(staging.progress->finished[0], epoch);
  if (__syncthreads_and(right ? 1 : 0) == 0) return;

  const bool fixed = p.fixed_places != 0;
  std::int64_t all = 0;
  for (int source = 0; source < ranks; ++source) {
    const std::int64_t rows = counts[source * ranks + p.rank];
    if (thread == 0) {
      p.state->source_begin[source] = fixed ? source * p.max_tokens : all;
      p.state->source_rows[source] = rows;
    }
    all += rows;
  }
  if (thread < ranks * ranks) p.state->counts[thread] = counts[thread];
  auto* const ids = reinterpret_cast<std::int32_t*>(window + p.layout.ids(buffer, 0));
  for (std::int64_t i = thread; i < p.layout.max_rows * p.layout.top_k; i += kBlockThreads) {
    const std::int64_t row = i / p.layout.top_k;
    const bool used =
        fixed ? row % p.max_tokens < counts[row / p.max_tokens * ranks + p.rank] : row < all;
    if (!used) ids[i] = -1;
  }
  if (thread < ranks * p.chunks) {  // all chunks have come: who looks at the flags finds them so
    store_release_system(window + p.layout.rows_flag(thread / p.chunks, thread % p.chunks),
                         epoch * static_cast<std::uint64_t>(ctas));
  }
  if (thread != 0) return;
  p.state->num_rows = all;
  p.state->dropped_rows = 0;
  p.state->dispatches = epoch;
}

// ---- combine -----------------------------------------------------------------------------------

/// What the rows of `partials` are where they travel as Wire.
template <typename Wire>
using Partial = std::conditional_t<kIsFp8<Wire>, float, Wire>;

/// A warp packs a row of one home.
template <typename Wire>
__global__ void __launch_bounds__(kExchangeThreads)
    results_kernel(const __grid_constant__ DeviceCombineParams args,
                   const __grid_constant__ Staging staging) {
  const DeviceExchangeParams& p = args.exchange;
  const ExchangeLayout& layout = staging.layout;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const std::uint64_t epoch = p.state->combines + 1;
    auto* const message =
        reinterpret_cast<std::uint64_t*>(staging.memory + layout.returned(p.rank));
    message[0] = p.state->reported == 0 ? epoch : 0;  // what a rank that gave up sends is void
    tell(staging.progress->packed[1], epoch);
  }
  const int warp = static_cast<int>(blockIdx.x + gridDim.x * (threadIdx.x / 32));
  const int stride = static_cast<int>(gridDim.x) * kExchangeWarps;
  for (int home = 0; home < layout.num_ranks; ++home) {
    const std::int64_t begin = p.state->source_begin[home] << p.group_bits;
    const std::int64_t rows = p.state->source_rows[home] << p.group_bits;
    for (std::int64_t row = warp; row < rows; row += stride) {
      const std::int64_t place = (home * p.max_tokens << p.group_bits) + row;
      const std::int64_t partial =
          args.partial_row == nullptr ? begin + row : args.partial_row[begin + row];
      const auto* const from =
          static_cast<const Partial<Wire>*>(args.partials) + partial * layout.hidden;
      auto* const packed = reinterpret_cast<Wire*>(staging.memory + layout.result(place));
      for (std::int64_t first = 0; first < layout.hidden; first += 256) {
        const std::int64_t at = first + lane * 8;
        Eight<Partial<Wire>> in[1] = {};
        if (at < layout.hidden) in[0] = *reinterpret_cast<const Eight<Partial<Wire>>*>(from + at);
        Eight<Wire> out[1];
        float scale = 0;
        if constexpr (kIsFp8<Wire>) {
          scale = encode<Wire>(in, out);
        } else {
          out[0] = in[0];
        }
        if (at >= layout.hidden) continue;
        *reinterpret_cast<Eight<Wire>*>(packed + at) = out[0];
        if (kIsFp8<Wire> && at % kScaleBlock == 0) {
          reinterpret_cast<float*>(staging.memory + layout.result_scale(place))[at / kScaleBlock] =
              scale;
        }
      }
    }
  }
}

/// A thread adds 8 values of a token by the binary tree over ranks and groups.
template <typename Wire, int kParts>
__global__ void __launch_bounds__(256) sums_kernel(const __grid_constant__ DeviceCombineParams args,
                                                   const __grid_constant__ Staging staging) {
  const DeviceExchangeParams& p = args.exchange;
  const std::int64_t hidden = p.layout.hidden;
  const int ranks = p.layout.num_ranks;
  const ResultPlaces places(p.layout);
  if (blockIdx.x == 0) {  // no other block reads the epoch
    const std::uint64_t epoch = p.state->combines + 1;
    const int from = static_cast<int>(threadIdx.x);
    if (from < ranks) {
      const std::uint64_t seen =
          *reinterpret_cast<const std::uint64_t*>(p.window[p.rank] + p.layout.returned(from));
      if (seen != epoch) give_up(p, 1, DevicePhase::kResults, from, epoch, seen);
    }
    __syncthreads();
    if (from == 0) {
      p.state->combines = epoch;
      tell(staging.progress->finished[1], epoch);
    }
  }
  const std::int64_t vectors = hidden / 8;
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < p.num_tokens * vectors; i += stride) {
    const std::int64_t token = i / vectors;
    const std::int64_t at = i % vectors * 8;
    Part<Wire> part[kParts];
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      const int rank = n >> p.group_bits;
      const std::int32_t slot = rank < ranks ? p.slot[token * ranks + rank] : -1;
      part[n] = load_part<Wire>(home_row(p, places, n, slot), at);
    }
    float sum[8];
    add_parts<Wire, kParts>(part, sum);
    const std::int64_t place = token * hidden + at;
    if (args.shared != nullptr) {
#pragma unroll
      for (int v = 0; v < 8; ++v) sum[v] = __fadd_rn(sum[v], args.shared[place + v]);
    }
    store_out(args, place, sum);
  }
}

// ---- launches ----------------------------------------------------------------------------------

using RowsKernel = void (*)(DeviceDispatchParams, Staging);
using CombineStep = void (*)(DeviceCombineParams, Staging);

template <typename In>
RowsKernel rows_kernel_to(DType wire) {
  switch (wire) {
    case DType::kBF16: return rows_kernel<In, __nv_bfloat16>;
    case DType::kF16: return rows_kernel<In, __half>;
    case DType::kF8E4M3: return rows_kernel<In, __nv_fp8_e4m3>;
    default: return rows_kernel<In, float>;
  }
}

RowsKernel rows_kernel_of(DType dtype, DType wire) {
  switch (dtype) {
    case DType::kBF16: return rows_kernel_to<__nv_bfloat16>(wire);
    case DType::kF16: return rows_kernel_to<__half>(wire);
    default: return rows_kernel_to<float>(wire);
  }
}

CombineStep results_kernel_of(DType wire) {
  switch (wire) {
    case DType::kBF16: return results_kernel<__nv_bfloat16>;
    case DType::kF16: return results_kernel<__half>;
    case DType::kF8E4M3: return results_kernel<__nv_fp8_e4m3>;
    default: return results_kernel<float>;
  }
}

CombineStep sums_kernel_of(DType wire, int num_parts) {
  return for_wire_and_parts(wire, num_parts,
                            []<typename Wire, int kParts>(Wire, NumParts<kParts>) -> CombineStep {
                              return sums_kernel<Wire, kParts>;
                            });
}

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

void load_pairs_kernels(DType dtype, DType dispatch_wire, DType combine_wire, int num_parts) {
  const auto load = [](auto kernel) {
    cudaFuncAttributes attributes;
    SWITCHYARD_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  };
  load(slots_kernel);
  load(rows_kernel_of(dtype, dispatch_wire));
  load(received_kernel);
  load(results_kernel_of(combine_wire));
  load(sums_kernel_of(combine_wire, num_parts));
}

void launch_pairs_slots(const DeviceDispatchParams& params, const Staging& staging, void* stream) {
  const auto blocks = static_cast<unsigned>(params.exchange.layout.num_ranks);
  slots_kernel<<<blocks, kBlockThreads, 0, stream_of(stream)>>>(params, staging);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void launch_pairs_rows(const DeviceDispatchParams& params, const Staging& staging, DType dtype,
                       int ctas, void* stream) {
  rows_kernel_of(
      dtype,
      staging.layout
          .dispatch_wire)<<<static_cast<unsigned>(ctas), kExchangeThreads, 0, stream_of(stream)>>>(
      params, staging);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void launch_pairs_received(const DeviceExchangeParams& params, const Staging& staging, int ctas,
                           void* stream) {
  received_kernel<<<1, kBlockThreads, 0, stream_of(stream)>>>(params, staging, ctas);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void launch_pairs_results(const DeviceCombineParams& params, const Staging& staging, int ctas,
                          void* stream) {
  results_kernel_of(
      staging.layout
          .combine_wire)<<<static_cast<unsigned>(ctas), kExchangeThreads, 0, stream_of(stream)>>>(
      params, staging);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void launch_pairs_sums(const DeviceCombineParams& params, const Staging& staging, int ctas,
                       void* stream) {
  const auto blocks = static_cast<unsigned>(std::max(1, 4 * ctas));
  const int num_parts = staging.layout.num_ranks << params.exchange.group_bits;
  sums_kernel_of(staging.layout.combine_wire, num_parts)<<<blocks, 256, 0, stream_of(stream)>>>(
      params, staging);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
