// Combine between GPUs in one launch: rows that hold the experts' sums go straight home, the
// sources interleaved row by row (sorted by source the same took twice as long), each rank starting
// at another one; then every block waits for all owners and adds the parts of its tokens by the
// binary tree over ranks, in fp32. Bound by the wire, then by memory.
#include <algorithm>
#include <type_traits>

#include "comm/device/combine_parts.cuh"
#include "core/gpu/cuda_check.hpp"

namespace switchyard {
namespace {

/// What the rows of `partials` are where they travel as Wire.
template <typename Wire>
using Partial = std::conditional_t<kIsFp8<Wire>, float, Wire>;

/// Vectors of a row that a lane sends at a time: 7168 values are 7 whole pieces.
constexpr int kSendSteps = 4;
constexpr int kSendValues = kSendSteps * 256;

template <typename Wire>
__device__ void send_result(const DeviceCombineParams& args, const ResultPlaces& places, int home,
                            std::int64_t row, std::int64_t place, int piece) {
  const DeviceExchangeParams& p = args.exchange;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t hidden = p.layout.hidden;
  const std::int64_t partial = args.partial_row == nullptr ? row : args.partial_row[row];
  const auto* from = static_cast<const Partial<Wire>*>(args.partials) + partial * hidden;
  std::byte* const window = p.window[home];
  auto* const to = reinterpret_cast<Wire*>(window + places.rows + place * places.row_bytes);
  const std::int64_t first = std::int64_t{piece} * kSendValues + lane * 8;
  Eight<Partial<Wire>> in[kSendSteps];
#pragma unroll
  for (int step = 0; step < kSendSteps; ++step) {
    const std::int64_t at = first + step * 256;
    in[step] = {};
    if (at < hidden) in[step] = *reinterpret_cast<const Eight<Partial<Wire>>*>(from + at);
  }
  if constexpr (kIsFp8<Wire>) {
    Eight<Wire> out[kSendSteps];
    const float scale = encode<Wire>(in, out);
#pragma unroll
    for (int step = 0; step < kSendSteps; ++step) {
      const std::int64_t at = first + step * 256;
      if (at < hidden) *reinterpret_cast<Eight<Wire>*>(to + at) = out[step];
    }
    const int of_piece = block_of_lane();
    const std::int64_t block = piece * (kSendValues / kScaleBlock) + of_piece;
    if (of_piece >= 0 && of_piece < kSendValues / kScaleBlock && block < places.row_scales) {
      reinterpret_cast<float*>(window + places.scales)[place * places.row_scales + block] = scale;
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSendSteps; ++step) {
      const std::int64_t at = first + step * 256;
      if (at < hidden) *reinterpret_cast<Eight<Wire>*>(to + at) = in[step];
    }
  }
}

template <typename Wire>
__device__ void send_results(const DeviceCombineParams& args) {
  const DeviceExchangeParams& p = args.exchange;
  __shared__ std::int64_t begin[kMaxDeviceRanks];
  __shared__ int rows[kMaxDeviceRanks];
  const int ranks = p.layout.num_ranks;
  const ResultPlaces places(p.layout);
  if (static_cast<int>(threadIdx.x) < ranks) {
    begin[threadIdx.x] = p.state->source_begin[threadIdx.x] << p.group_bits;
    rows[threadIdx.x] = static_cast<int>(p.state->source_rows[threadIdx.x] << p.group_bits);
  }
  __syncthreads();
  int most = 0;
  for (int s = 0; s < ranks; ++s) most = max(most, rows[s]);
  const auto pieces = static_cast<int>((p.layout.hidden + kSendValues - 1) / kSendValues);
  const int stride = static_cast<int>(gridDim.x) * kExchangeWarps;
  const int warp = static_cast<int>(blockIdx.x + gridDim.x * (threadIdx.x / 32));
  for (int i = warp; i < most * ranks * pieces; i += stride) {
    const int row = i / pieces / ranks;
    const int home = (p.rank + i / pieces) % ranks;
    if (row >= rows[home]) continue;
    send_result<Wire>(args, places, home, begin[home] + row,
                      (p.rank * p.max_tokens << p.group_bits) + row, i % pieces);
  }
}

template <typename Wire, int kParts>
__device__ void add_tokens(const DeviceCombineParams& args) {
  // Vectors that a lane has under way per part: all of them are asked for before one is used.
  // 64 registers hold them; with more the compiler spills.
  constexpr int kPartRegisters = 2 * static_cast<int>(sizeof(Wire)) + (kIsFp8<Wire> ? 1 : 0);
  constexpr int kFit = 64 / (kParts * kPartRegisters);
  constexpr int kSteps = kFit >= 4 ? 4 : (kFit >= 2 ? 2 : 1);
  constexpr int kValues = kSteps * 256;
  const DeviceExchangeParams& p = args.exchange;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t hidden = p.layout.hidden;
  const auto pieces = static_cast<int>((hidden + kValues - 1) / kValues);
  const ResultPlaces places(p.layout);
  const int stride = static_cast<int>(gridDim.x) * kExchangeWarps;
  const int items = static_cast<int>(p.num_tokens) * pieces;
  for (int i = static_cast<int>(blockIdx.x + gridDim.x * (threadIdx.x / 32)); i < items;
       i += stride) {
    const std::int64_t token = i / pieces;
    const std::int64_t first = i % pieces * kValues + lane * 8;
    std::int32_t slot[kParts];  // all asked for before one is used
#pragma unroll
    for (int r = 0; r < kParts; ++r) {
      const int rank = r >> p.group_bits;
      slot[r] = rank < p.layout.num_ranks ? p.slot[token * p.layout.num_ranks + rank] : -1;
    }
    Part<Wire> part[kSteps][kParts];
#pragma unroll
    for (int r = 0; r < kParts; ++r) {
      const HomeRow row = home_row(p, places, r, slot[r]);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const std::int64_t at = first + step * 256;
        part[step][r] = load_part<Wire>(at < hidden ? row : HomeRow{}, at);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::int64_t at = first + step * 256;
      if (at >= hidden) continue;
      float sum[8];
      add_parts<Wire, kParts>(part[step], sum);
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

template <typename Wire, int kParts>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    combine_kernel(const __grid_constant__ DeviceCombineParams args) {
  const DeviceExchangeParams& p = args.exchange;
  const int ranks = p.layout.num_ranks;
  const std::uint64_t epoch = *static_cast<volatile std::uint64_t*>(&p.state->combines) + 1;
  send_results<Wire>(args);
  __syncthreads();
  bool here = true;
  if (static_cast<int>(threadIdx.x) < ranks) {
    const int to = (p.rank + static_cast<int>(threadIdx.x)) % ranks;
    add_release_system(p.window[to] + p.layout.results_flag(p.rank));
    const int from = static_cast<int>(threadIdx.x);
    here = wait_for(p, p.layout.results_flag(from), epoch * gridDim.x, DevicePhase::kResults, from);
  }
  if (__syncthreads_and(here ? 1 : 0) == 0) return;
  // A rank that has given up before it sent may have sent other sums.
  if (blockIdx.x == 0 && threadIdx.x == 0 &&
      load_relaxed_system(p.window[p.rank] + p.layout.abort_flag()) != 0) {
    give_up(p, 2, DevicePhase::kResults, p.rank, epoch, epoch);
  }
  add_tokens<Wire, kParts>(args);
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&p.state->combine_done, 1U) == gridDim.x - 1) {
    p.state->combine_done = 0;
    p.state->combines = epoch;
  }
}

using CombineKernel = void (*)(DeviceCombineParams);

CombineKernel combine_kernel_of(DType wire, int num_parts) {
  return for_wire_and_parts(wire, num_parts,
                            []<typename Wire, int kParts>(Wire, NumParts<kParts>) -> CombineKernel {
                              return combine_kernel<Wire, kParts>;
                            });
}

}  // namespace

void load_combine_kernels(DType wire, int num_parts) {
  cudaFuncAttributes attributes;
  SWITCHYARD_CUDA(cudaFuncGetAttributes(&attributes, combine_kernel_of(wire, num_parts)));
}

void launch_combine(const DeviceCombineParams& params, int ctas, void* stream) {
  const ExchangeLayout& layout = params.exchange.layout;
  const int num_parts = layout.num_ranks << params.exchange.group_bits;
  combine_kernel_of(layout.combine_wire,
                    num_parts)<<<static_cast<unsigned>(ctas), kExchangeThreads, 0,
                                 static_cast<cudaStream_t>(stream)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
