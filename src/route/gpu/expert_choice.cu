// Expert choice on a GPU: probabilities of all tokens, then the C best tokens of each (group,
// expert) by a block, then each token's list. Nothing but the routing's own memory is used:
// probabilities lie where the weights will, marks of what is taken where the ids will. A group of
// up to 16384 tokens is read once: its keys stay in registers, and the least one that is taken is
// found bit by bit, by counting how many are not below it; no two threads meet in a counter. Larger
// groups are read five times, by digits of their keys.
#include <limits>

#include "core/gpu/cuda_device.hpp"
#include "route/gpu/ranked_row.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kDigits = 256;
constexpr int kKeys = 16;  // of a thread, in registers
constexpr int kMostThreads = 1024;

struct ExpertChoiceParams {
  const float* logits;   // [T, E]
  std::int32_t* expert;  // [T, E]; before the last kernel 1 where taken
  float* weight;         // [T, E]; before it probabilities, -1 of a token with a NaN
  DeviceStatus* status;  // or null
  std::int64_t num_tokens;
  std::uint32_t group, capacity;
  std::int32_t num_experts;
};

__global__ void __launch_bounds__(kThreads)
    probabilities_kernel(const __grid_constant__ ExpertChoiceParams p) {
  const std::int64_t token = std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (token >= p.num_tokens) return;
  const RankedRow row{p.logits + token * p.num_experts, p.num_experts};
  const RowPlaces to{p.expert + token * p.num_experts, p.weight + token * p.num_experts,
                     p.num_experts};
  const int nan = row.lowest_nan();
  if (nan < row.size) {
    for (int e = Warp::lane(); e < row.size; e += 32) to.put(e, 0, -1.0F);
    if (Warp::lane() == 0) report_nan(p.status, static_cast<int>(token), nan);
    return;
  }
  const Probabilities probability(row);
  for (int e = Warp::lane(); e < row.size; e += 32) to.put(e, 0, probability.of(e));
}

struct Digit {
  std::uint32_t value;
  std::uint32_t left;  ///< To be taken of those with this digit.
};

/// The digit of the key that is number `left` from above. One warp; `count` [kDigits].
__device__ __forceinline__ Digit find_digit(const std::uint32_t* count, std::uint32_t left) {
  constexpr int kEach = kDigits / 32;
  const int highest = kDigits - 1 - kEach * Warp::lane();  // of this lane's
  std::uint32_t mine = 0;
  for (int i = 0; i < kEach; ++i) mine += count[highest - i];
  std::uint32_t up_to = mine;
  for (int offset = 1; offset < 32; offset *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAll, up_to, static_cast<unsigned>(offset));
    if (Warp::lane() >= offset) up_to += other;
  }
  std::uint32_t above = up_to - mine;
  const int owner = Warp::first(up_to >= left);
  int digit = highest;
  for (int i = 0; i < kEach - 1 && above + count[digit] < left; ++i) above += count[digit--];
  return {static_cast<std::uint32_t>(Warp::from(digit, owner)), left - Warp::from(above, owner)};
}

/// The column that a block chooses from: the probabilities of a group's tokens for an expert.
struct Column {
  const float* weight;
  std::int32_t* expert;
  std::int64_t stride;

  __device__ __forceinline__ explicit Column(const ExpertChoiceParams& p) : stride(p.num_experts) {
    const auto experts = static_cast<std::uint32_t>(p.num_experts);
    const std::int64_t at =
        std::int64_t{blockIdx.x / experts} * p.group * stride + blockIdx.x % experts;
    weight = p.weight + at;
    expert = p.expert + at;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t key(std::uint32_t token) const {
    return to_key(weight[token * stride]);
  }
  __device__ __forceinline__ void take(std::uint32_t token) const { expert[token * stride] = 1; }
};

/// Sums over a block's warps, a barrier each: memory is taken in turns, so that nobody writes what
/// another warp still reads.
struct BlockSums {
  std::uint32_t of_warp[2][32];

  /// Returns what warp number `lane` has put in; every thread of the block calls this.
  __device__ __forceinline__ std::uint32_t exchange(unsigned turn, std::uint32_t of_mine) {
    if (Warp::lane() == 0) of_warp[turn % 2][threadIdx.x / 32] = of_mine;
    __syncthreads();
    return static_cast<unsigned>(Warp::lane()) < blockDim.x / 32 ? of_warp[turn % 2][Warp::lane()]
                                                                 : 0;
  }
};

/// Groups of at most kKeys tokens for each thread of the block, which has neighbouring ones.
__global__ void __launch_bounds__(kMostThreads)
    choose_held_kernel(const __grid_constant__ ExpertChoiceParams p) {
  __shared__ BlockSums sums;
  const Column column(p);
  const std::uint32_t first = threadIdx.x * kKeys;
  std::uint32_t keys[kKeys];  // 0, below all keys, where there is no token
#pragma unroll
  for (std::uint32_t i = 0; i < kKeys; ++i) {
    keys[i] = first + i < p.group ? column.key(first + i) : 0;
  }

  // The largest number that at least `capacity` keys are not below.
  std::uint32_t least = 0;
  bool exact = p.capacity == p.group;
  for (int bit = 31; bit >= 0 && !exact; --bit) {
    const std::uint32_t next = least | 1U << bit;
    std::uint32_t mine = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < kKeys; ++i) mine += keys[i] >= next ? 1U : 0U;
    const std::uint32_t of_lane =
        sums.exchange(static_cast<unsigned>(bit), __reduce_add_sync(kAll, mine));
    const std::uint32_t count = __reduce_add_sync(kAll, of_lane);
    if (count >= p.capacity) least = next;
    exact = count == p.capacity;
  }

  // All above it, and of its equals the first that there is room for: all, where it is exact.
  std::uint32_t above = 0;
  std::uint32_t equal = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < kKeys; ++i) {
    above += keys[i] > least ? 1U : 0U;
    equal += keys[i] == least && first + i < p.group ? 1U : 0U;
  }
  std::uint32_t up_to = equal;  // of the warp's
  for (int offset = 1; offset < 32; offset *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAll, up_to, static_cast<unsigned>(offset));
    if (Warp::lane() >= offset) up_to += other;
  }
  const std::uint32_t warp_above = __reduce_add_sync(kAll, above);
  const std::uint32_t warp_equal = __shfl_sync(kAll, up_to, 31);
  __syncthreads();  // the last count has been read
  const std::uint32_t of_lane = sums.exchange(0, warp_above << 16 | warp_equal);
  const std::uint32_t all_above = __reduce_add_sync(kAll, of_lane >> 16);
  const bool before_mine = static_cast<unsigned>(Warp::lane()) < threadIdx.x / 32;
  std::uint32_t before =
      __reduce_add_sync(kAll, before_mine ? of_lane & 0xffffU : 0U) + up_to - equal;
  const std::uint32_t room = p.capacity - all_above;
#pragma unroll
  for (std::uint32_t i = 0; i < kKeys; ++i) {
    if (first + i >= p.group) break;
    if (keys[i] > least || (keys[i] == least && before++ < room)) column.take(first + i);
  }
}

/// Any group, by a block of kThreads that reads the column again and again.
__global__ void __launch_bounds__(kThreads)
    choose_read_kernel(const __grid_constant__ ExpertChoiceParams p) {
  __shared__ std::uint32_t count[kDigits];
  __shared__ Digit found;
  __shared__ std::uint32_t equal_of[kWarps];
  const auto thread = static_cast<std::uint32_t>(threadIdx.x);
  const Column column(p);

  // The least key that is taken, from its highest digit on.
  std::uint32_t least = 0;
  std::uint32_t known = 0;  // its digits that are
  std::uint32_t left = p.capacity;
  for (int shift = 24; shift >= 0; shift -= 8) {
    count[thread] = 0;
    __syncthreads();
    for (std::uint32_t i = thread; i < p.group; i += kThreads) {
      const std::uint32_t key = column.key(i);
      if ((key & known) == least) atomicAdd(&count[key >> shift & 255U], 1U);
    }
    __syncthreads();
    if (thread < 32) {
      const Digit digit = find_digit(count, left);
      if (thread == 0) found = digit;
    }
    __syncthreads();
    least |= found.value << shift;
    known |= 255U << shift;
    left = found.left;
    __syncthreads();
  }

  // All above it, and of its equals the first `left`.
  std::uint32_t seen = 0;
  for (std::uint32_t base = 0; base < p.group; base += kThreads) {
    const std::uint32_t i = base + thread;
    const std::uint32_t key = i < p.group ? column.key(i) : 0;
    const bool equal = i < p.group && key == least;
    const unsigned equals = __ballot_sync(kAll, equal);
    if (Warp::lane() == 0) equal_of[thread / 32] = static_cast<std::uint32_t>(__popc(equals));
    __syncthreads();
    std::uint32_t before = seen;
    for (std::uint32_t w = 0; w < kWarps; ++w) {
      if (w < thread / 32) before += equal_of[w];
      seen += equal_of[w];
    }
    before += static_cast<std::uint32_t>(__popc(equals & lanes_before()));
    if (key > least || (equal && before < left)) column.take(i);
    __syncthreads();
  }
}

/// A token's list in place of its marks and probabilities: it never overtakes what is read.
__global__ void __launch_bounds__(kThreads)
    write_lists_kernel(const __grid_constant__ ExpertChoiceParams p) {
  const std::int64_t token = std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (token >= p.num_tokens) return;
  const RowPlaces to{p.expert + token * p.num_experts, p.weight + token * p.num_experts,
                     p.num_experts};
  int used = 0;
  for (int first = 0; first < p.num_experts; first += 32) {
    const int e = first + Warp::lane();
    const float weight = e < p.num_experts ? to.weight[e] : -1.0F;
    const bool is = weight >= 0.0F && to.expert[e] != 0;
    const unsigned all = __ballot_sync(kAll, is);
    __syncwarp();
    if (is) to.put(used + __popc(all & lanes_before()), e, weight);
    used += __popc(all);
    __syncwarp();
  }
  to.leave(used);
}

std::optional<std::string> reject(const RouteArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (!std::holds_alternative<ExpertChoiceRouter>(args.config.kind)) {
    return "is for the router expert-choice";
  }
  if (args.logits.size() > std::numeric_limits<std::int32_t>::max()) {
    return "tokens times experts exceed 2^31 - 1";
  }
  return std::nullopt;
}

std::int64_t group_of(const RouteArgs& args) {
  const auto& router = std::get<ExpertChoiceRouter>(args.config.kind);
  return router.group == 0 ? args.logits.shape[0] : router.group;
}

/// Whether a block keeps a column of a group in registers, or reads it again and again.
bool holds_columns(std::int64_t group) { return group <= kMostThreads * kKeys; }

std::string columns_name(const RouteArgs& args) {
  return holds_columns(group_of(args)) ? "columns in registers" : "columns in memory";
}

void run(const RouteArgs& args) {
  const auto [num_tokens, num_experts] = args.logits.shape;
  if (num_tokens == 0) return;
  const auto& router = std::get<ExpertChoiceRouter>(args.config.kind);
  const std::int64_t group = group_of(args);
  const ExpertChoiceParams params{.logits = args.logits.data,
                                  .expert = args.routing.expert.data,
                                  .weight = args.routing.weight.data,
                                  .status = args.execution.status,
                                  .num_tokens = num_tokens,
                                  .group = static_cast<std::uint32_t>(group),
                                  .capacity = static_cast<std::uint32_t>(
                                      tokens_of_expert(router, group, args.config.num_experts)),
                                  .num_experts = args.config.num_experts};
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  const auto by_token = static_cast<unsigned>((num_tokens + kWarps - 1) / kWarps);
  const auto by_column = static_cast<unsigned>(num_tokens / group * num_experts);
  probabilities_kernel<<<by_token, kThreads, 0, stream>>>(params);
  if (holds_columns(group)) {
    const auto warps = static_cast<unsigned>((group + 32 * kKeys - 1) / (32 * kKeys));
    choose_held_kernel<<<by_column, 32 * warps, 0, stream>>>(params);
  } else {
    choose_read_kernel<<<by_column, kThreads, 0, stream>>>(params);
  }
  write_lists_kernel<<<by_token, kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<RouteArgs> kRouteCudaExpertChoice{"cuda.expert_choice", reject, run,
                                                       columns_name};

}  // namespace switchyard
