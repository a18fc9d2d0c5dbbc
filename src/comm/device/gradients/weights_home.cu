// Gradients of weights on their way home: each rank's experts have left theirs in its own window,
// in the place of the weights that came with the rows, and the tokens' ranks fetch the K of a token
// from there. A few bytes a token: bound by one trip over the wire.
//
// Why nobody overwrites what is still read: ranks meet at the end of a way back (rank_sums.cu).
#include "comm/device/exchange.cuh"
#include "core/gpu/cuda_check.hpp"

namespace switchyard {
namespace {

/// First row of this rank at `owner`.
__device__ std::int64_t first_row_at(const DeviceExchangeParams& p, int owner) {
  if (p.fixed_places != 0) return p.rank * p.max_tokens;
  std::int64_t row = 0;
  for (int source = 0; source < p.rank; ++source) {
    row += p.state->counts[source * p.layout.num_ranks + owner];
  }
  return row;
}

/// Ranks that go back through different things say so.
__device__ void compare_openings(const DeviceWeightsParams& args, int from) {
  const DeviceExchangeParams& p = args.exchange;
  const auto* const said = reinterpret_cast<const volatile std::uint64_t*>(
      p.window[p.rank] + p.layout.weights_flag(from));
  const std::uint64_t forward = said[1];
  const std::uint64_t parameters = said[2];
  if (forward != args.forward) {
    give_up(p, 1, DevicePhase::kForward, from, args.forward, forward);
  } else if (parameters != args.parameters) {
    give_up(p, 1, DevicePhase::kParameters, from, args.parameters, parameters);
  }
}

__device__ float fetch(const DeviceWeightsParams& args, const std::int64_t* first_row,
                       std::int64_t choice) {
  const DeviceExchangeParams& p = args.exchange;
  const std::int32_t id = args.expert[choice];
  if (id < 0 || id >= p.num_experts) return 0.0F;
  if (args.kept != nullptr && args.kept[choice] == 0) return 0.0F;
  const int owner = owner_of(args, id);
  const std::int64_t token = choice / p.layout.top_k;
  const std::int32_t slot = p.slot[token * p.layout.num_ranks + owner];
  if (slot < 0) return 0.0F;
  const auto* const row = reinterpret_cast<const volatile float*>(
      p.window[owner] + p.layout.weights(0, first_row[owner] + slot));
  return row[choice - token * p.layout.top_k];
}

__global__ void __launch_bounds__(kExchangeThreads)
    weights_home_kernel(const __grid_constant__ DeviceWeightsParams args) {
  __shared__ std::int64_t first_row[kMaxDeviceRanks];
  const DeviceExchangeParams& p = args.exchange;
  const int ranks = p.layout.num_ranks;
  const auto thread = static_cast<int>(threadIdx.x);
  const std::uint64_t epoch = *static_cast<volatile std::uint64_t*>(&p.state->weights) + 1;
  // This rank's gradients are there: the kernels that made them have ended.
  if (blockIdx.x == 0 && thread < ranks) {
    std::byte* const flag = p.window[(p.rank + thread) % ranks] + p.layout.weights_flag(p.rank);
    auto* const words = reinterpret_cast<volatile std::uint64_t*>(flag);
    words[1] = args.forward;
    words[2] = args.parameters;
    store_release_system(flag, epoch);
  }
  bool here = true;
  if (thread < ranks) {
    here = wait_for(p, p.layout.weights_flag(thread), epoch, DevicePhase::kWeights, thread);
    if (here) compare_openings(args, thread);  // in each block: before one sees others leave
    first_row[thread] = first_row_at(p, thread);
  }
  if (__syncthreads_and(here ? 1 : 0) == 0) return;
  if (args.dweight != nullptr) {
    const std::int64_t choices = p.num_tokens * p.layout.top_k;
    const std::int64_t stride = std::int64_t{gridDim.x} * kExchangeThreads;
    for (std::int64_t i = std::int64_t{blockIdx.x} * kExchangeThreads + thread; i < choices;
         i += stride) {
      args.dweight[i] = fetch(args, first_row, i);
    }
  }
  __syncthreads();
  // A rank that has given up meanwhile may have gone on to make other ones.
  if (thread == 0 && load_relaxed_system(p.window[p.rank] + p.layout.abort_flag()) != 0) {
    give_up(p, 2, DevicePhase::kWeights, p.rank, epoch, epoch);
  }
  if (thread == 0 && atomicAdd(&p.state->combine_done, 1U) == gridDim.x - 1) {
    p.state->combine_done = 0;
    p.state->weights = epoch;
  }
}

}  // namespace

void load_weights_home_kernel() {
  cudaFuncAttributes attributes;
  SWITCHYARD_CUDA(cudaFuncGetAttributes(&attributes, weights_home_kernel));
}

void launch_weights_home(const DeviceWeightsParams& params, int ctas, void* stream) {
  weights_home_kernel<<<static_cast<unsigned>(ctas), kExchangeThreads, 0,
                        static_cast<cudaStream_t>(stream)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
