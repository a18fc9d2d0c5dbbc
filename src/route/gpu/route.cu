// Selection on a GPU: 8 or 32 lanes a token, the fewer the more tokens share an instruction. A
// lane holds neighbouring experts, so that the lowest lane of a tie has the lowest expert; each of
// the K rounds is one maximum over the lanes. The same keys are compared as on the CPU
// (route_cpu.cpp). AdaMoE's null experts are experts until the choice is made. Bound by
// instructions. DeepSeek-V3's selection is in groups.cu.
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/ptx.cuh"
#include "route/gpu/choice.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;

constexpr int kWarps = 4;
constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 32;

/// The sum of exp(x - largest) over the token's experts, the first `count` of this lane: leaves of
/// neighbours, then a tree. 32 lanes or fewer, the order is the same. kFast: where no score that is
/// compared hangs on the sum.
template <int kValues, int kLanes, bool kFast>
__device__ __forceinline__ float sum_of_exp(const float (&x)[kValues], float largest, int count) {
  constexpr int kLeaf = kValues * kLanes / 32;
  float leaf[kValues / kLeaf];
#pragma unroll
  for (int i = 0; i < kValues / kLeaf; ++i) {
    leaf[i] = 0.0F;
#pragma unroll
    for (int v = i * kLeaf; v < (i + 1) * kLeaf; ++v) {
      if (v < count) {
        leaf[i] += kFast ? fast_exp_below(x[v], largest) : exp_below(x[v], largest);
      }
    }
  }
#pragma unroll
  for (int width = 1; width < kValues / kLeaf; width *= 2) {
#pragma unroll
    for (int i = 0; i < kValues / kLeaf; i += 2 * width) leaf[i] += leaf[i + width];
  }
  return Lanes<kLanes>::sum(leaf[0]);
}

/// Plain loads: the read-only path may not be used for what the previous kernel writes.
template <int kValues>
__device__ __forceinline__ void load_row(const float* row, int first, int num_experts,
                                         float (&x)[kValues]) {
  constexpr int kVector = kValues < 4 ? kValues : 4;
  if (num_experts % kVector == 0) {
#pragma unroll
    for (int v = 0; v < kValues; v += kVector) {
      const bool inside = first + v < num_experts;
      if constexpr (kVector == 4) {
        const float4 four =
            inside ? *reinterpret_cast<const float4*>(row + first + v) : make_float4(0, 0, 0, 0);
        x[v] = four.x, x[v + 1] = four.y, x[v + 2] = four.z, x[v + 3] = four.w;
      } else if constexpr (kVector == 2) {
        const float2 two =
            inside ? *reinterpret_cast<const float2*>(row + first) : make_float2(0, 0);
        x[0] = two.x, x[1] = two.y;
      } else {
        x[0] = inside ? row[first] : 0.0F;
      }
    }
    return;
  }
#pragma unroll
  for (int v = 0; v < kValues; ++v) x[v] = first + v < num_experts ? row[first + v] : 0.0F;
}

/// Logits become the scores that are compared. Whole loops for each kind: so a lane's values are
/// under way together.
template <int kValues>
__device__ __forceinline__ void score(const RouteParams& p, int begin, int count, float largest,
                                      float sum, float (&x)[kValues]) {
  if (p.config.score == Score::kSigmoid) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) x[v] = fast_sigmoid(x[v]);
  } else if (p.config.score == Score::kSoftmax) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) x[v] = exp_below(x[v], largest) / sum;
  }
  if (p.selection_bias == nullptr) return;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    if (v < count) x[v] += __ldg(p.selection_bias + begin + v);
  }
}

/// Clears the keys of experts outside the best groups; groups lie in whole lanes, a power of two
/// each.
template <int kValues, int kLanes>
__device__ __forceinline__ void mask_lane_groups(const TopKRule& config, int lane,
                                                 const float (&score)[kValues],
                                                 std::uint32_t (&key)[kValues]) {
  const int lanes = config.num_experts / config.groups / kValues;
  float first = kMinusInf;
  float second = kMinusInf;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    const float x = key[v] == 0 ? kMinusInf : score[v];
    second = fmaxf(second, fminf(first, x));
    first = fmaxf(first, x);
  }
  for (int offset = 1; offset < lanes; offset *= 2) {
    const float other = __shfl_xor_sync(kAll, first, offset);
    second = fmaxf(fmaxf(second, __shfl_xor_sync(kAll, second, offset)), fminf(first, other));
    first = fmaxf(first, other);
  }
  const bool alone = config.group_score == GroupScore::kMax || lanes * kValues == 1;
  const float mine = alone ? first : group_sum(first, second);
  const int group = lane / lanes;
  int rank = 0;
  for (int g = 0; g < config.groups; ++g) {
    const float other = Lanes<kLanes>::from(mine, g * lanes);
    rank += other > mine || (other == mine && g < group) ? 1 : 0;
  }
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    if (rank >= config.top_groups) key[v] = 0;
  }
}

/// The same for groups of any size, one after the other; their scores lie in shared memory.
template <int kValues, int kLanes>
__device__ __forceinline__ void mask_any_groups(const TopKRule& config, int lane,
                                                const float (&score)[kValues],
                                                std::uint32_t (&key)[kValues], float* scores) {
  const int width = config.num_experts / config.groups;
  const int begin = lane * kValues;
  for (int g = 0; g < config.groups; ++g) {
    std::uint32_t first = 0;
    std::uint32_t second = 0;
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const bool inside = begin + v >= g * width && begin + v < (g + 1) * width;
      const std::uint32_t x = inside && key[v] != 0 ? to_key(score[v]) : 0;
      second = max(second, min(first, x));
      first = max(first, x);
    }
    const std::uint32_t best = Lanes<kLanes>::max(first);
    const int owner = Lanes<kLanes>::first(first == best);
    const std::uint32_t next = Lanes<kLanes>::max(lane == owner ? second : first);
    const bool alone = config.group_score == GroupScore::kMax || width == 1;
    if (lane == 0) {
      scores[g] = alone ? from_key(best) : group_sum(from_key(best), from_key(next));
    }
  }
  __syncwarp();
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    const int group = min((begin + v) / width, config.groups - 1);
    int rank = 0;
    for (int g = 0; g < config.groups; ++g) {
      rank += scores[g] > scores[group] || (scores[g] == scores[group] && g < group) ? 1 : 0;
    }
    if (rank >= config.top_groups) key[v] = 0;
  }
  __syncwarp();
}

/// Lane k's choice as AdaMoE has it: null experts are left out, their places come last with -1, and
/// weights are a softmax over the others.
template <int kLanes>
struct WithoutNulls {
  int place;
  float weight;

  /// @param mine  Lanes below top_k. @param is_null  Its expert is one.
  __device__ __forceinline__ WithoutNulls(int top_k, float logit, bool mine, bool is_null) {
    using Lane = Lanes<kLanes>;
    const bool used = mine && !is_null;
    const int begin = static_cast<int>(threadIdx.x) % 32 / kLanes * kLanes;
    const unsigned all = __ballot_sync(kAll, used) >> begin & (kAll >> (32 - kLanes));
    const unsigned before = (1U << Lane::lane()) - 1;
    place = used ? __popc(all & before) : __popc(all) + __popc(~all & before);
    // The first that is used has the largest logit.
    const float largest = Lane::from(logit, all == 0 ? 0 : __ffs(static_cast<int>(all)) - 1);
    const float power = used ? exp_below(logit, largest) : 0.0F;
    const float sum = Lane::sum_of_first(power, top_k);
    weight = used ? power / sum : 0.0F;
  }
};

/// kAllThere: every value of every lane is an expert's. kFew: top_k <= 2.
template <int kValues, int kLanes, bool kAllThere, bool kFew>
__global__ void __launch_bounds__(kWarps * 32) route_kernel(const __grid_constant__ RouteParams p) {
  extern __shared__ float group_scores[];
  using Lane = Lanes<kLanes>;
  constexpr int kTokens = kWarps * 32 / kLanes;  // of a block
  const int lane = Lane::lane();
  const int place = static_cast<int>(threadIdx.x) / kLanes;
  const int token = static_cast<int>(blockIdx.x) * kTokens + place;
  // Lanes without a token go along with the last one and write nothing.
  const bool active = token < p.num_tokens;
  const TopKRule& config = p.config;
  const int begin = lane * kValues;
  const float* row = p.logits + std::int64_t{min(token, p.num_tokens - 1)} * config.num_experts;
  float x[kValues];
  ptx::start_after_previous_kernel();
  load_row(row, begin, config.num_experts, x);

  const int count = kAllThere ? kValues : config.num_experts - begin;  // of this lane's experts
  float largest = kMinusInf;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    if (v < count) largest = ptx::max_nan(largest, x[v]);
  }
  int nan = kMaxExperts;
  const bool any_nan = __any_sync(kAll, isnan(largest));
  if (any_nan) {
    largest = kMinusInf;
#pragma unroll
    for (int v = kValues - 1; v >= 0; --v) {
      if (v >= count) continue;
      if (isnan(x[v])) nan = begin + v;
      largest = fmaxf(largest, x[v]);
    }
    nan = kMaxExperts - static_cast<int>(Lane::max(static_cast<std::uint32_t>(kMaxExperts - nan)));
  }
  const bool needs_top = p.top_score != nullptr;
  const bool needs_sum =
      config.score != Score::kSigmoid &&
      (!p.by_logit || needs_top || (config.score == Score::kSoftmax && !config.renormalize));
  if (needs_sum || needs_top) largest = Lane::max(largest);
  float sum = 0.0F;
  if (needs_sum) {
    sum = p.by_logit ? sum_of_exp<kValues, kLanes, true>(x, largest, count)
                     : sum_of_exp<kValues, kLanes, false>(x, largest, count);
  }

  if (!p.by_logit) score(p, begin, count, largest, sum, x);
  std::uint32_t key[kValues];
#pragma unroll
  for (int v = 0; v < kValues; ++v) key[v] = v < count ? to_key(x[v]) : 0;
  if (config.top_groups < config.groups) {
    const int width = config.num_experts / config.groups;
    const int lanes = width / kValues;
    if (width % kValues == 0 && (lanes & (lanes - 1)) == 0) {
      mask_lane_groups<kValues, kLanes>(config, lane, x, key);
    } else {
      mask_any_groups<kValues, kLanes>(config, lane, x, key, group_scores + place * config.groups);
    }
  }
  // With NaNs about, keys may run out; what is read then is not used.
  int chosen = 0;
  if constexpr (kFew) {
    chosen = choose_two<kValues, kLanes>(config.top_k, lane, key).expert;
  } else {
    chosen = choose<kValues, kLanes>(config.top_k, lane, key).expert;
  }
  chosen = min(chosen, config.num_experts - 1);
  const bool mine = lane < config.top_k;
  const float logit = mine ? row[chosen] : 0.0F;
  float weight = 0.0F;
  int at = lane;
  if (p.null_experts > 0) {
    const bool is_null = chosen >= config.num_experts - p.null_experts;
    const WithoutNulls<kLanes> choice(config.top_k, logit, mine, is_null);
    weight = choice.weight;
    at = choice.place;
    if (is_null) chosen = -1;
  } else {
    weight = weigh<kLanes>(config, logit, mine, largest, sum, p.by_logit) * config.scale;
  }
  if (!active) return;
  const bool broken = any_nan && nan != kMaxExperts;
  const std::int64_t out = std::int64_t{token} * config.top_k + at;
  if (mine) {
    p.expert[out] = broken ? -1 : chosen;
    p.weight[out] = broken ? 0.0F : weight;
  }
  if (lane != 0) return;
  if (broken) report_nan(p.status, token, nan);
  if (needs_top) {
    const float top = config.score == Score::kSigmoid ? sigmoid(largest) : 1.0F / sum;
    p.top_score[token] = broken ? 0.0F : top;
  }
}

using RouteKernel = void (*)(RouteParams);

struct Choice {
  RouteKernel kernel;
  int lanes;  // a token
};

template <int kValues, int kLanes, bool kAllThere = false, bool kFew = false>
constexpr Choice kChoice{route_kernel<kValues, kLanes, kAllThere, kFew>, kLanes};

/// A warp a token, which answers soonest; where tokens fill the device, a quarter of one.
Choice choice_for(std::int32_t num_tokens, std::int32_t num_experts, std::int32_t top_k) {
  constexpr std::int32_t kMany = 4096;
  const bool share = num_tokens >= kMany && top_k <= 8;
  const bool few = top_k <= 2;
  if (num_experts <= 32) return share ? kChoice<4, 8> : kChoice<1, 32>;
  if (num_experts <= 64) return share ? kChoice<8, 8> : kChoice<2, 32>;
  if (num_experts <= 128) {
    if (!share) return kChoice<4, 32>;
    if (num_experts < 128) return few ? kChoice<16, 8, false, true> : kChoice<16, 8>;
    return few ? kChoice<16, 8, true, true> : kChoice<16, 8, true>;
  }
  if (num_experts < 256) return share && few ? kChoice<16, 16, false, true> : kChoice<8, 32>;
  if (num_experts == 256) return kChoice<8, 32, true>;
  if (num_experts <= 384) return kChoice<12, 32>;
  if (num_experts <= 512) return kChoice<16, 32>;
  return kChoice<32, 32>;
}

/// AdaMoE's call as one of top-k among all logits.
RouteArgs among_all(const RouteArgs& args) {
  if (!std::holds_alternative<AdaMoeRouter>(args.config.kind)) return args;
  RouteArgs all = args;
  all.config = among_all_logits(args.config);
  return all;
}

std::optional<std::string> reject(const RouteArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (auto reason = reject_room(args)) return reason;
  if (!std::holds_alternative<AdaMoeRouter>(args.config.kind)) {
    if (auto reason = reject_other_than_top_k(args.config)) return reason;
    if (args.config.as_top_k().score == Score::kSparseMixer) return "no score sparse-mixer";
  }
  if (args.config.num_logits() > kMaxExperts) return "num_experts exceeds 1024";
  if (args.config.top_k() > kMaxTopK) return "top_k exceeds 32";
  if (!is_aligned_16(args.logits.data)) return "logits are not aligned to 16 bytes";
  return std::nullopt;
}

void run(const RouteArgs& args) {
  RouteParams params = params_of(among_all(args));
  params.null_experts = args.config.num_logits() - args.config.num_experts;
  const std::int32_t num_tokens = params.num_tokens;
  if (num_tokens == 0) return;
  const Choice choice = choice_for(num_tokens, params.config.num_experts, params.config.top_k);
  const int tokens_per_block = kWarps * 32 / choice.lanes;
  const auto blocks = static_cast<unsigned>((num_tokens + tokens_per_block - 1) / tokens_per_block);
  const std::size_t shared = sizeof(float) * static_cast<std::size_t>(tokens_per_block) *
                             static_cast<std::size_t>(params.config.groups);
  launch_overlapped(choice.kernel, blocks, kWarps * 32, shared,
                    static_cast<cudaStream_t>(args.execution.stream), params);
}

}  // namespace

const Implementation<RouteArgs> kRouteCudaWarp{"cuda.warp", reject, run};

}  // namespace switchyard
