// Expert choice on a GPU: probabilities of all tokens, then the C best tokens of each (group,
// expert) by a block, then each token's list. Nothing but the routing's own memory is used: the
// first kernel leaves probabilities where the weights will be, and where the ids will be the same
// as whole numbers, column by column, so that a block reads its column as it lies; the second finds
// the least key that is taken, digit by digit, and marks what it takes by the probability's sign. A
// group of up to 16384 tokens is read once: its keys stay in registers. Bound by launches and what
// a block has to wait for.
#include <algorithm>
#include <limits>

#include "core/gpu/cuda_device.hpp"
#include "route/gpu/ranked_row.cuh"
#include "route/gpu/tile_rows.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;

constexpr int kTileWarps = 16;
constexpr int kTileTokens = kTileWarps * kTokensOfWarp;
constexpr int kTileExperts = 32;
constexpr int kDigitBits = 10;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kPasses = 3;  // digits of a key
constexpr int kParts = kDigits / 32;
constexpr int kKeys = 16;  // of a thread, in registers
constexpr int kMostThreads = 1024;
constexpr std::uint32_t kSign = 0x80000000U;

struct ExpertChoiceParams {
  const float* logits;   // [T, E]
  std::int32_t* expert;  // [T, E]; before the last kernel keys [T / group, E, group]
  float* weight;         // [T, E]; before it probabilities, with a sign where taken
  DeviceStatus* status;  // or null
  std::int64_t num_tokens;
  std::uint32_t group, capacity;
  std::int32_t num_experts;
};

/// Probabilities in their order, below 2^30; 0, below all of them, is that of a token with a NaN.
__device__ __forceinline__ std::uint32_t key_of(float probability) {
  return __float_as_uint(probability) + 1;
}
__device__ __forceinline__ float probability_of(std::uint32_t key) {
  return __uint_as_float(key - 1);
}

/// A tile of tokens by kTileExperts at a time: rows are written as they come, columns through
/// shared memory.
template <int kHeld>
__global__ void __launch_bounds__(32 * kTileWarps)
    probabilities_kernel(const __grid_constant__ ExpertChoiceParams p) {
  __shared__ std::uint32_t keys[kTileTokens][kTileExperts + 1];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = Warp::lane();
  const std::int64_t tile = std::int64_t{blockIdx.x} * kTileTokens;
  const std::int64_t first = tile + warp * kTokensOfWarp;
  // Where the columns of this thread's tokens of a column lie.
  std::int64_t column[kTileTokens / 32];
#pragma unroll
  for (int i = 0; i < kTileTokens / 32; ++i) {
    const auto token = static_cast<std::uint32_t>(tile + 32 * i + lane);
    const std::uint32_t group = token / p.group;
    column[i] = std::int64_t{group} * p.group * p.num_experts + (token - group * p.group);
  }
  ptx::start_after_previous_kernel();
  const TileRows<kHeld> rows(p.logits, p.num_experts, p.num_tokens, first, p.status);
  float* const weight = p.weight + first * p.num_experts + lane;
  const int parts = (p.num_experts + kTileExperts - 1) / kTileExperts;
  const auto write_part = [&](int part) {
    const bool has = kTileExperts * part + lane < p.num_experts;
#pragma unroll
    for (int i = 0; i < kTokensOfWarp; ++i) {
      const float probability = has ? rows.probability(i, part) : 0.0F;
      if (has && first + i < p.num_tokens) {
        weight[i * p.num_experts + kTileExperts * part] = probability;
      }
      keys[warp * kTokensOfWarp + i][lane] = probability > 1.0F ? 0 : key_of(probability);
    }
    __syncthreads();
    for (int c = warp; c < kTileExperts; c += kTileWarps) {
      const int e = kTileExperts * part + c;
      if (e >= p.num_experts) break;
#pragma unroll
      for (int i = 0; i < kTileTokens / 32; ++i) {
        if (tile + 32 * i + lane >= p.num_tokens) continue;
        p.expert[column[i] + std::int64_t{e} * p.group] =
            static_cast<std::int32_t>(keys[32 * i + lane][c]);
      }
    }
    __syncthreads();
  };
  if constexpr (kHeld == 0) {
    for (int part = 0; part < parts; ++part) write_part(part);
  } else {
#pragma unroll
    for (int part = 0; part < kHeld; ++part) {
      if (part < parts) write_part(part);
    }
  }
}

struct Digit {
  std::uint32_t value;
  std::uint32_t left;  ///< To be taken of those with this digit.
  std::uint32_t all;   ///< With this digit.
};

/// The sum over lanes up to this one.
__device__ __forceinline__ std::uint32_t sum_up_to(std::uint32_t x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAll, x, static_cast<unsigned>(offset));
    if (Warp::lane() >= offset) x += other;
  }
  return x;
}

/// The column that a block chooses from: the keys of a group's tokens for an expert.
struct Column {
  const std::int32_t* keys;
  float* weight;
  std::uint32_t stride;  // tokens times experts are below 2^31

  __device__ __forceinline__ explicit Column(const ExpertChoiceParams& p)
      : keys(p.expert + std::int64_t{blockIdx.x} * p.group),
        stride(static_cast<std::uint32_t>(p.num_experts)) {
    weight = p.weight + blockIdx.x / stride * p.group * stride + blockIdx.x % stride;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t key(std::uint32_t token) const {
    return static_cast<std::uint32_t>(keys[token]);
  }
  __device__ __forceinline__ void take(std::uint32_t token, std::uint32_t key) const {
    if (key != 0) weight[token * stride] = -probability_of(key);
  }
};

/// A column's keys: those of a thread lie blockDim.x apart. kHeld: in registers, at most kKeys.
template <bool kHeld>
struct ColumnKeys {
  const Column& column;
  std::uint32_t group;
  std::uint32_t held[kHeld ? kKeys : 1];

  __device__ __forceinline__ ColumnKeys(const Column& of, std::uint32_t size)
      : column(of), group(size) {
    if constexpr (kHeld) {
#pragma unroll
      for (std::uint32_t i = 0; i < kKeys; ++i) {
        const std::uint32_t at = i * blockDim.x + threadIdx.x;
        held[i] = at < group ? column.key(at) : 0;
      }
    }
  }
  /// visit(token, key), in ascending order of a thread's tokens; where there is none with `group`
  /// for a token, so that all threads visit equally often.
  template <typename Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) const {
    if constexpr (kHeld) {
#pragma unroll
      for (std::uint32_t i = 0; i < kKeys; ++i) {
        visit(min(i * blockDim.x + threadIdx.x, group), held[i]);
      }
    } else {
      for (std::uint32_t base = 0; base < group; base += blockDim.x) {
        const std::uint32_t at = min(base + threadIdx.x, group);
        visit(at, at < group ? column.key(at) : 0);
      }
    }
  }
};

/// Takes the first `left` tokens whose key is `equal`, all threads of the block together: keys that
/// are read again, for equals at the border are rare.
__device__ void take_first(const ColumnKeys<false>& keys, std::uint32_t equal, std::uint32_t left) {
  __shared__ std::uint32_t of_warp[2][32];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  std::uint32_t seen = 0;
  unsigned turn = 0;
  keys.for_each([&](std::uint32_t token, std::uint32_t key) {
    const bool is = token < keys.group && key == equal;
    const unsigned all = __ballot_sync(kAll, is);
    // In turns, so that nobody writes what another warp still reads.
    std::uint32_t* const counts = of_warp[turn++ % 2];
    if (Warp::lane() == 0) counts[warp] = static_cast<std::uint32_t>(__popc(all));
    __syncthreads();
    const std::uint32_t count =
        static_cast<unsigned>(Warp::lane()) < blockDim.x / 32 ? counts[Warp::lane()] : 0;
    const std::uint32_t before = seen + __reduce_add_sync(kAll, Warp::lane() < warp ? count : 0) +
                                 static_cast<std::uint32_t>(__popc(all & lanes_before()));
    if (is && before < left) keys.column.take(token, key);
    seen += __reduce_add_sync(kAll, count);
  });
}

/// How many keys have a digit: memory of a block, for each of a key's digits its own.
struct Counts {
  std::uint32_t of_digit[kPasses][kDigits];
  std::uint32_t of_part[kPasses][kParts];  ///< 32 neighbouring digits, from above.
  std::uint32_t candidate[kMostThreads];
  std::uint32_t candidates;

  __device__ __forceinline__ void clear() {
    for (std::uint32_t d = threadIdx.x; d < kPasses * kDigits; d += blockDim.x) of_digit[0][d] = 0;
    if (threadIdx.x == 0) candidates = 0;
    __syncthreads();
  }
  __device__ __forceinline__ void add(int pass, std::uint32_t key) {
    atomicAdd(&of_digit[pass][key >> shift_of(pass) & (kDigits - 1)], 1U);
  }
  static __device__ __forceinline__ int shift_of(int pass) {
    return (kPasses - 1 - pass) * kDigitBits;
  }

  /// The digit of the key that is number `left` from above, in every thread.
  __device__ __forceinline__ Digit find(int pass, std::uint32_t left) {
    const std::uint32_t* const highest = of_digit[pass] + kDigits - 1 - Warp::lane();
    __syncthreads();
    for (int part = static_cast<int>(threadIdx.x) / 32; part < kParts; part += blockDim.x / 32) {
      const std::uint32_t sum = __reduce_add_sync(kAll, highest[-32 * part]);
      if (Warp::lane() == 0) of_part[pass][part] = sum;
    }
    __syncthreads();
    std::uint32_t mine = of_part[pass][Warp::lane()];
    std::uint32_t up_to = sum_up_to(mine);
    const int part = Warp::first(up_to >= left);
    left -= Warp::from(up_to - mine, part);
    mine = highest[-32 * part];
    up_to = sum_up_to(mine);
    const int place = Warp::first(up_to >= left);
    return {static_cast<std::uint32_t>(kDigits - 1 - 32 * part - place),
            left - Warp::from(up_to - mine, place), Warp::from(mine, place)};
  }
};
static_assert(kParts == 32);

template <bool kHeld>
__global__ void __launch_bounds__(kMostThreads)
    choose_kernel(const __grid_constant__ ExpertChoiceParams p) {
  __shared__ Counts counts;
  counts.clear();
  ptx::start_after_previous_kernel();
  const Column column(p);
  const ColumnKeys<kHeld> keys(column, p.group);

  // The least key that is taken, from its highest digit on, while not all with its digits are.
  // Where there is no token keys are 0, which is no matter: those are not taken.
  std::uint32_t least = 0;
  std::uint32_t known = 0;  // its digits that are
  bool listed = false;
  Digit digit{.value = 0, .left = p.capacity, .all = p.group};
  for (int pass = 0; pass < kPasses && digit.left != digit.all; ++pass) {
    if (pass == 1 && digit.all <= kMostThreads) {
      // Few are left: the passes behind are over them alone.
      listed = true;
      keys.for_each([&](std::uint32_t /*token*/, std::uint32_t key) {
        if ((key & known) == least) counts.candidate[atomicAdd(&counts.candidates, 1U)] = key;
      });
      __syncthreads();
    }
    if (listed) {
      for (std::uint32_t i = threadIdx.x; i < counts.candidates; i += blockDim.x) {
        const std::uint32_t key = counts.candidate[i];
        if ((key & known) == least) counts.add(pass, key);
      }
    } else {
      keys.for_each([&](std::uint32_t /*token*/, std::uint32_t key) {
        if ((key & known) == least) counts.add(pass, key);
      });
    }
    digit = counts.find(pass, digit.left);
    least |= digit.value << Counts::shift_of(pass);
    known |= (kDigits - 1U) << Counts::shift_of(pass);
  }

  // All above it, and of its equals the first: or all, where there is room.
  const std::uint32_t above = digit.left == digit.all ? least : least + 1;
  keys.for_each([&](std::uint32_t token, std::uint32_t key) {
    if (key >= above) column.take(token, key);
  });
  if (above > least) take_first(ColumnKeys<false>(column, p.group), least, digit.left);
}

/// A token's list in place of its marks: it never overtakes what is read.
__global__ void __launch_bounds__(kMostThreads)
    write_lists_kernel(const __grid_constant__ ExpertChoiceParams p) {
  const std::int64_t stride = std::int64_t{gridDim.x} * (kMostThreads / 32);
  std::int64_t token =
      std::int64_t{blockIdx.x} * (kMostThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  ptx::start_after_previous_kernel();
  for (; token < p.num_tokens; token += stride) {
    const RowPlaces to{p.expert + token * p.num_experts, p.weight + token * p.num_experts,
                       p.num_experts};
    int used = 0;
    for (int first = 0; first < p.num_experts; first += 32) {
      const int e = first + Warp::lane();
      const std::uint32_t bits = e < p.num_experts ? __float_as_uint(to.weight[e]) : 0;
      const bool is = (bits & kSign) != 0;
      const unsigned all = __ballot_sync(kAll, is);
      __syncwarp();
      if (is) to.put(used + __popc(all & lanes_before()), e, __uint_as_float(bits & ~kSign));
      used += __popc(all);
      __syncwarp();
    }
    to.leave(used);
  }
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

using ExpertChoiceKernel = void (*)(ExpertChoiceParams);

ExpertChoiceKernel probabilities_for(std::int64_t num_experts) {
  if (num_experts <= 64) return probabilities_kernel<2>;
  return num_experts <= 256 ? probabilities_kernel<8> : probabilities_kernel<0>;
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
  const auto tiles = static_cast<unsigned>((num_tokens + kTileTokens - 1) / kTileTokens);
  const auto columns = static_cast<unsigned>(num_tokens / group * num_experts);
  launch_overlapped(probabilities_for(num_experts), tiles, 32 * kTileWarps, 0, stream, params);
  if (holds_columns(group)) {
    const auto warps = static_cast<int>((group + 32 * kKeys - 1) / (32 * kKeys));
    launch_overlapped(choose_kernel<true>, columns, 32 * warps, 0, stream, params);
  } else {
    launch_overlapped(choose_kernel<false>, columns, kMostThreads, 0, stream, params);
  }
  constexpr std::int64_t kListTokens = kMostThreads / 32;
  const std::int64_t lists = std::min<std::int64_t>((num_tokens + kListTokens - 1) / kListTokens,
                                                    2 * num_multiprocessors());
  launch_overlapped(write_lists_kernel, static_cast<unsigned>(lists), kMostThreads, 0, stream,
                    params);
}

}  // namespace

const Implementation<RouteArgs> kRouteCudaExpertChoice{"cuda.expert_choice", reject, run,
                                                       columns_name};

}  // namespace switchyard
