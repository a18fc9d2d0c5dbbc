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
using Count = unsigned long long;

constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 32;
constexpr int kMaxDevices = 32;
constexpr int kBlocksPerMultiprocessor = 2;
/// Sums of scores are whole numbers of 1/kUnits: up to 2^33 tokens.
constexpr double kUnits = 1 << 30;

/// What blocks share; all zero between calls.
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

/// Of a lane's tokens so far: its experts', in its group of lanes.
template <int kValues, int kLanes>
struct LaneSums {
  using Lane = Lanes<kLanes>;
  using Row = TokenRow<kValues, kLanes>;

  float scores[kValues] = {};
  float squares = 0;    ///< The same in all lanes of a token.
  float entropies = 0;  ///< Likewise.
  unsigned device_tokens = 0;

  /// @param counts  1, or 0 for a token that is there for company.
  __device__ __forceinline__ void add(const Row& row, bool sigmoids, float counts) {
    constexpr float kLog2E = 1.44269504F;
    constexpr float kLn2 = 0.693147181F;
    const float largest = row.largest();
    float p[kValues];
    float dot = 0.0F;  // of exponentials and their exponents to base 2
    float sum = row.sum_of(p, [&](float x) {
      const float exponent = x == largest ? 0.0F : fmaxf(kLog2E * (x - largest), -1000.0F);
      const float value = ptx::exp2_approx(exponent);
      dot += value * exponent;
      return value;
    });
    const float log_sum = __logf(sum);
    const float lse = largest + log_sum;
    squares += counts * (lse * lse);
    float reciprocal = __fdividef(counts, sum);
    float entropy = counts * log_sum - kLn2 * Lane::sum(dot) * reciprocal;
    // Where all sigmoids underflow they are exponentials, as for the weights.
    const bool by_sigmoid = sigmoids && sigmoid(largest) >= kSmallestNormal;
    if (sigmoids) {
      float s[kValues];
      const float inverse = 1.0F / row.sum_of(s, [](float x) { return sigmoid(x); });
      float surprise = 0.0F;
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        const float share = s[v] * inverse;
        if (share > 0.0F) surprise -= share * logf(share);
      }
      surprise = counts * Lane::sum(surprise);
      if (by_sigmoid) {
        reciprocal = counts * inverse;
        entropy = surprise;
#pragma unroll
        for (int v = 0; v < kValues; ++v) p[v] = s[v];
      }
    }
    entropies += entropy;
#pragma unroll
    for (int v = 0; v < kValues; ++v) scores[v] += p[v] * reciprocal;
  }

  /// @param id  Of the lane's choice, -1: none.
  __device__ __forceinline__ void add_choice(const SumsParams& p, int id, unsigned* counts,
                                             unsigned* firsts, unsigned* devices) {
    const bool used = id >= 0 && id < p.num_experts;
    if (!used && id != -1 && p.status != nullptr) atomicAdd(&p.status->bad_ids, 1U);
    if (used) {
      atomicAdd(counts + id, 1U);
      if (Lane::lane() == 0) atomicAdd(firsts + id, 1U);
    }
    const int device = p.devices == 1 || !used ? 0 : id / (p.num_experts / p.devices);
    unsigned sent = used ? 1U << device : 0U;
    for (int offset = 1; offset < kLanes; offset *= 2) {
      sent |= __shfl_xor_sync(kAll, sent, offset);
    }
    if (p.devices == 1) {
      device_tokens += sent;
      return;
    }
    for (int d = Lane::lane(); d < p.devices; d += kLanes) {
      if ((sent >> d & 1U) != 0) atomicAdd(devices + d, 1U);
    }
  }

  /// Adds what the warp's groups of lanes have; what is of tokens, in the lanes of one each.
  __device__ __forceinline__ void join() {
#pragma unroll
    for (int offset = kLanes; offset < 32; offset *= 2) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) scores[v] += __shfl_xor_sync(kAll, scores[v], offset);
      squares += __shfl_xor_sync(kAll, squares, offset);
      entropies += __shfl_xor_sync(kAll, entropies, offset);
      device_tokens += __shfl_xor_sync(kAll, device_tokens, offset);
    }
  }
};

__device__ __forceinline__ Count take(Count* sum) {
  const Count value = __ldcg(sum);
  *sum = 0;
  return value;
}

/// By the block that comes last: all sums are there.
__device__ void write_out(const SumsParams& p) {
  const int size = p.groups * p.num_experts;
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  // The last warps add up what is of tokens, one each, while the first have the experts.
  const int quantity = (threads - 1 - thread) / 32;
  if (quantity < kTokenSums) {
    double sum = 0;
    for (int block = thread % 32; block < static_cast<int>(gridDim.x); block += 32) {
      double* const of_block = p.shared.of_blocks + block * kTokenSums + quantity;
      sum += __ldcg(of_block);
      *of_block = 0;  // other shapes have counts there
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAll, sum, offset);
    if (thread % 32 == 0) p.token_sums[quantity] = sum;
  }
  for (int i = thread; i < size; i += threads) {
    p.counts[i] = static_cast<std::int64_t>(take(p.shared.counts + i));
    p.first_choices[i] = static_cast<std::int64_t>(take(p.shared.firsts + i));
    p.scores[i] = static_cast<double>(take(p.shared.scores + i)) / kUnits;
  }
  for (int i = thread; i < p.groups * p.devices; i += threads) {
    p.device_tokens[i] = static_cast<std::int64_t>(take(p.shared.devices + i));
  }
  if (thread == 0) *p.shared.ticket = 0;
}

template <int kValues, int kLanes>
__global__ void __launch_bounds__(warps_for(kValues) * 32, kValues <= 8 ? 2 : 1)
    routing_sums_kernel(const __grid_constant__ SumsParams p) {
  constexpr int kWarps = warps_for(kValues);
  constexpr int kTokens = kWarps * 32 / kLanes;  // of a block at once
  constexpr int kRow = kValues * kLanes;
  using Row = TokenRow<kValues, kLanes>;
  __shared__ __align__(16) float scores[kWarps][kRow];
  __shared__ unsigned counts[kRow], firsts[kRow], devices[kMaxDevices];
  __shared__ float of_warps[kWarps][kTokenSums];
  __shared__ bool is_last;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = Lanes<kLanes>::lane();
  for (int e = thread; e < kRow; e += kWarps * 32) counts[e] = firsts[e] = 0;
  if (thread < kMaxDevices) devices[thread] = 0;
  __syncthreads();

  const int group = static_cast<int>(blockIdx.x) / p.blocks_per_group;
  const int part = static_cast<int>(blockIdx.x) % p.blocks_per_group;
  const std::int64_t first = std::int64_t{group} * p.per_group;
  const int end = min((part + 1) * p.per_block, p.per_group);
  LaneSums<kValues, kLanes> sums;
  for (int begin = part * p.per_block; begin < end; begin += kTokens) {
    const int next = begin + thread / kLanes;
    const bool active = next < end;
    const std::int64_t token = first + (active ? next : end - 1);
    Row row;
    row.load(p.logits + token * p.num_experts, p.num_experts);
    const int id = active && lane < p.top_k ? p.expert[token * p.top_k + lane] : -1;
    sums.add(row, p.sigmoids, active ? 1.0F : 0.0F);
    sums.add_choice(p, id, counts, firsts, devices);
  }
  sums.join();
  if (thread % 32 < kLanes) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) scores[warp][Row::expert(v)] = sums.scores[v];
  }
  if (thread % 32 == 0) {
    of_warps[warp][0] = sums.squares, of_warps[warp][1] = sums.entropies;
    if (sums.device_tokens != 0) atomicAdd(devices, sums.device_tokens);
  }
  __syncthreads();

  const std::int64_t row = std::int64_t{group} * p.num_experts;
  for (int e = thread; e < p.num_experts; e += kWarps * 32) {
    float sum = 0.0F;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += scores[w][e];
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
    for (int w = 0; w < kWarps; ++w) sum += static_cast<double>(of_warps[w][thread]);
    p.shared.of_blocks[std::int64_t{blockIdx.x} * kTokenSums + thread] = sum;
  }
  __threadfence();
  __syncthreads();
  if (thread == 0) is_last = atomicAdd(p.shared.ticket, 1U) + 1 == gridDim.x;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  write_out(p);
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
  for_row_width(per_group * groups, num_experts, params.top_k, [&]<int kValues, int kLanes>() {
    constexpr int kWarps = warps_for(kValues);
    constexpr int kTokens = kWarps * 32 / kLanes;
    // As many as run at once, none without tokens for each lane.
    const std::int64_t wanted = (max_blocks(groups) - groups + groups - 1) / groups;
    const std::int64_t most = std::max<std::int64_t>((per_group + kTokens - 1) / kTokens, 1);
    params.blocks_per_group = static_cast<std::int32_t>(std::min(wanted, most));
    params.per_block = static_cast<std::int32_t>((per_group + params.blocks_per_group - 1) /
                                                 params.blocks_per_group);
    const auto blocks = static_cast<unsigned>(groups * params.blocks_per_group);
    routing_sums_kernel<kValues, kLanes>
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
