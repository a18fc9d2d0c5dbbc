// What a router said of its tokens, added up on a GPU in one launch: a warp a token, whose lanes
// keep their experts' sums in registers. Blocks add theirs in fixed point, which has one sum in any
// order; the last block writes what has come together and leaves zeros. Bound by reading the
// logits, which the router has just written: from the L2 cache where they fit.
#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "route/gpu/token_row.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;
using Lane = Lanes<32>;
using Count = unsigned long long;

constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 32;
constexpr int kMaxDevices = 32;
constexpr int kBlocksPerMultiprocessor = 2;
/// Sums of scores are whole numbers of 1/kUnits: up to 2^33 tokens.
constexpr double kUnits = 1 << 30;

/// What blocks share; zero between calls but for `of_blocks`.
struct Shared {
  unsigned* ticket;
  Count* counts;      // [S, E]
  Count* firsts;      // [S, E]
  Count* scores;      // [S, E] in 1/kUnits
  Count* devices;     // [S, D]
  double* of_blocks;  // [blocks, kTokenSums]
};

struct SumsParams {
  const float* logits;          // [T, E]
  const std::int32_t* expert;   // [T, K]
  std::int64_t* counts;         // out [S, E]
  std::int64_t* first_choices;  // out [S, E]
  std::int64_t* device_tokens;  // out [S, D]
  double* scores;               // out [S, E]
  double* token_sums;           // out [kTokenSums]
  DeviceStatus* status;         // or null
  Shared shared;
  std::int32_t num_experts, top_k, devices;
  std::int32_t groups, per_group, blocks_per_group, per_block;  // tokens
  bool sigmoids;
};

constexpr int warps_for(int values) { return values <= 16 ? 16 : 8; }

/// A warp's tokens so far: of the lane's experts, and of the device with the lane's number.
template <int kValues>
struct WarpSums {
  float scores[kValues] = {};
  double squares = 0;  ///< The same in all lanes.
  double entropies = 0;
  unsigned device_tokens = 0;

  __device__ __forceinline__ void add(const TokenRow<kValues>& row, bool sigmoids) {
    const float largest = row.largest();
    float p[kValues];
    float sum = row.sum_of(p, [&](float x) { return fast_exp_below(x, largest); });
    const float log_sum = logf(sum);
    const auto lse = static_cast<double>(largest + log_sum);
    squares += lse * lse;
    // Where all sigmoids underflow they are exponentials, as for the weights.
    const bool by_sigmoid = sigmoids && sigmoid(largest) >= kSmallestNormal;
    if (by_sigmoid) sum = row.sum_of(p, [](float x) { return sigmoid(x); });
    const float reciprocal = 1.0F / sum;
    float entropy = 0.0F;
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const float share = p[v] * reciprocal;
      scores[v] += share;
      const float surprise = by_sigmoid ? -logf(share) : log_sum - (row.x[v] - largest);
      if (share > 0.0F) entropy += share * surprise;
    }
    entropies += static_cast<double>(entropy);
  }

  /// @param id  Of the lane's choice, -1: none.
  __device__ __forceinline__ void add_choice(const SumsParams& p, int id, unsigned* counts,
                                             unsigned* firsts) {
    const bool used = id >= 0 && id < p.num_experts;
    if (!used && id != -1 && p.status != nullptr) atomicAdd(&p.status->bad_ids, 1U);
    if (used) {
      atomicAdd(counts + id, 1U);
      if (Lane::lane() == 0) atomicAdd(firsts + id, 1U);
    }
    const int device = p.devices == 1 ? 0 : id / (p.num_experts / p.devices);
    const unsigned devices = __reduce_or_sync(kAll, used ? 1U << device : 0U);
    device_tokens += devices >> Lane::lane() & 1U;
  }
};

__device__ __forceinline__ Count take(Count* sum) {
  const Count value = __ldcg(sum);
  *sum = 0;
  return value;
}

/// By the block that comes last: all sums are there.
__device__ void write_out(const SumsParams& p, double (*of_threads)[kTokenSums]) {
  const int size = p.groups * p.num_experts;
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  for (int i = thread; i < size; i += threads) {
    p.counts[i] = static_cast<std::int64_t>(take(p.shared.counts + i));
    p.first_choices[i] = static_cast<std::int64_t>(take(p.shared.firsts + i));
    p.scores[i] = static_cast<double>(take(p.shared.scores + i)) / kUnits;
  }
  for (int i = thread; i < p.groups * p.devices; i += threads) {
    p.device_tokens[i] = static_cast<std::int64_t>(take(p.shared.devices + i));
  }
  double sums[kTokenSums] = {};
  for (int block = thread; block < static_cast<int>(gridDim.x); block += threads) {
    for (int i = 0; i < kTokenSums; ++i) {
      sums[i] += __ldcg(p.shared.of_blocks + block * kTokenSums + i);
    }
  }
  for (int i = 0; i < kTokenSums; ++i) of_threads[thread][i] = sums[i];
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread >= half) continue;
    for (int i = 0; i < kTokenSums; ++i) of_threads[thread][i] += of_threads[thread + half][i];
  }
  __syncthreads();
  if (thread < kTokenSums) p.token_sums[thread] = of_threads[0][thread];
  if (thread == 0) *p.shared.ticket = 0;
}

template <int kValues>
__global__ void __launch_bounds__(warps_for(kValues) * 32)
    routing_sums_kernel(const __grid_constant__ SumsParams p) {
  constexpr int kWarps = warps_for(kValues);
  constexpr int kTogether = kValues <= 4 ? 4 : kValues <= 8 ? 2 : 1;  // rows under way
  union Memory {
    float scores[kWarps][kValues * 32];
    double of_threads[kWarps * 32][kTokenSums];
  };
  __shared__ Memory memory;
  __shared__ unsigned counts[kValues * 32], firsts[kValues * 32], devices[kMaxDevices];
  __shared__ double of_warps[kWarps][kTokenSums];
  __shared__ bool is_last;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = Lane::lane();
  for (int e = thread; e < kValues * 32; e += kWarps * 32) counts[e] = firsts[e] = 0;
  if (thread < kMaxDevices) devices[thread] = 0;
  __syncthreads();

  const int group = static_cast<int>(blockIdx.x) / p.blocks_per_group;
  const int part = static_cast<int>(blockIdx.x) % p.blocks_per_group;
  const std::int64_t first = std::int64_t{group} * p.per_group;
  const int end = min((part + 1) * p.per_block, p.per_group);
  WarpSums<kValues> sums;
  for (int next = part * p.per_block + warp; next < end; next += kWarps * kTogether) {
    TokenRow<kValues> rows[kTogether];
    int ids[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const std::int64_t token = first + min(next + i * kWarps, end - 1);
      rows[i].load(p.logits + token * p.num_experts, p.num_experts);
      ids[i] = lane < p.top_k ? p.expert[token * p.top_k + lane] : -1;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (next + i * kWarps >= end) break;
      sums.add(rows[i], p.sigmoids);
      sums.add_choice(p, ids[i], counts, firsts);
    }
  }
#pragma unroll
  for (int v = 0; v < kValues; ++v) memory.scores[warp][lane * kValues + v] = sums.scores[v];
  for (int offset = 16; offset > 0; offset /= 2) {
    sums.entropies += __shfl_xor_sync(kAll, sums.entropies, offset);
  }
  if (lane == 0) of_warps[warp][0] = sums.squares, of_warps[warp][1] = sums.entropies;
  if (sums.device_tokens != 0) atomicAdd(devices + lane, sums.device_tokens);
  __syncthreads();

  const std::int64_t row = std::int64_t{group} * p.num_experts;
  for (int e = thread; e < p.num_experts; e += kWarps * 32) {
    float sum = 0.0F;
    for (int w = 0; w < kWarps; ++w) sum += memory.scores[w][e];
    atomicAdd(p.shared.scores + row + e,
              static_cast<Count>(__double2ll_rn(static_cast<double>(sum) * kUnits)));
    if (counts[e] != 0) atomicAdd(p.shared.counts + row + e, Count{counts[e]});
    if (firsts[e] != 0) atomicAdd(p.shared.firsts + row + e, Count{firsts[e]});
  }
  if (thread < p.devices && devices[thread] != 0) {
    atomicAdd(p.shared.devices + group * p.devices + thread, Count{devices[thread]});
  }
  if (thread < kTokenSums) {
    double sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += of_warps[w][thread];
    p.shared.of_blocks[std::int64_t{blockIdx.x} * kTokenSums + thread] = sum;
  }
  __threadfence();
  __syncthreads();
  if (thread == 0) is_last = atomicAdd(p.shared.ticket, 1U) + 1 == gridDim.x;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  write_out(p, memory.of_threads);
}

/// Blocks of a launch for so many groups, at most.
std::int64_t max_blocks(std::int64_t groups) {
  return std::int64_t{kBlocksPerMultiprocessor} * num_multiprocessors() + groups;
}

Shared shared_of(std::byte* workspace, std::int64_t groups, std::int64_t num_experts,
                 std::int64_t devices) {
  auto* const counts = reinterpret_cast<Count*>(workspace) + 1;
  const std::int64_t size = groups * num_experts;
  return {.ticket = reinterpret_cast<unsigned*>(workspace),
          .counts = counts,
          .firsts = counts + size,
          .scores = counts + 2 * size,
          .devices = counts + 3 * size,
          .of_blocks = reinterpret_cast<double*>(counts + 3 * size + groups * devices)};
}

std::optional<std::string> reject(const RoutingSumsArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  const auto* const dense = std::get_if<DenseAssignments>(&args.assignments);
  const auto [groups, num_experts] = args.sums.counts.shape;
  const std::int64_t devices = args.sums.device_tokens.shape[1];
  if (dense == nullptr) return "no lists";
  if (num_experts > kMaxExperts) return "num_experts exceeds 1024";
  if (dense->expert.shape[1] > kMaxTopK) return "top_k exceeds 32";
  if (devices > kMaxDevices) return "devices exceed 32";
  if (!is_aligned_16(args.logits.data)) return "the logits are not aligned to 16 bytes";
  const std::int64_t want = routing_sums_workspace_bytes(groups, num_experts, devices);
  if (args.execution.workspace_bytes < want) {
    return fmt::format("the workspace has {} bytes, want {}", args.execution.workspace_bytes, want);
  }
  return std::nullopt;
}

void run(const RoutingSumsArgs& args) {
  const RoutingSums& sums = args.sums;
  const Matrix<const std::int32_t>& expert = std::get<DenseAssignments>(args.assignments).expert;
  const auto [groups, num_experts] = sums.counts.shape;
  const std::int64_t per_group = args.logits.shape[0] / groups;
  SumsParams params{.logits = args.logits.data,
                    .expert = expert.data,
                    .counts = sums.counts.data,
                    .first_choices = sums.first_choices.data,
                    .device_tokens = sums.device_tokens.data,
                    .scores = sums.scores.data,
                    .token_sums = sums.tokens.data,
                    .status = args.execution.status,
                    .shared = shared_of(static_cast<std::byte*>(args.execution.workspace), groups,
                                        num_experts, sums.device_tokens.shape[1]),
                    .num_experts = static_cast<std::int32_t>(num_experts),
                    .top_k = static_cast<std::int32_t>(expert.shape[1]),
                    .devices = static_cast<std::int32_t>(sums.device_tokens.shape[1]),
                    .groups = static_cast<std::int32_t>(groups),
                    .per_group = static_cast<std::int32_t>(per_group),
                    .sigmoids = args.score == Score::kSigmoid};
  for_row_width(params.num_experts, [&]<int kValues>() {
    constexpr int kWarps = warps_for(kValues);
    // As many as run at once, none without a token for each warp.
    const std::int64_t wanted = (max_blocks(groups) - groups + groups - 1) / groups;
    const std::int64_t most = std::max<std::int64_t>((per_group + kWarps - 1) / kWarps, 1);
    params.blocks_per_group = static_cast<std::int32_t>(std::min(wanted, most));
    params.per_block = static_cast<std::int32_t>((per_group + params.blocks_per_group - 1) /
                                                 params.blocks_per_group);
    const auto blocks = static_cast<unsigned>(groups * params.blocks_per_group);
    routing_sums_kernel<kValues>
        <<<blocks, kWarps * 32, 0, static_cast<cudaStream_t>(args.execution.stream)>>>(params);
  });
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

std::int64_t routing_sums_workspace_bytes(std::int64_t groups, std::int64_t num_experts,
                                          std::int64_t devices) {
  return 8 * (1 + 3 * groups * num_experts + groups * devices + kTokenSums * max_blocks(groups));
}

const Implementation<RoutingSumsArgs> kRoutingSumsCuda{"cuda.warp", reject, run};

}  // namespace switchyard
