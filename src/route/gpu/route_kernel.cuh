#pragma once

// What the kernels of select share: their parameters, keys that sort as floats do, what lanes agree
// on, and the weights of the chosen.

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "core/gpu/ptx.cuh"
#include "route/implementations.hpp"
#include "switchyard/device.hpp"
#include "switchyard/route.hpp"

namespace switchyard::routing {

constexpr unsigned kAll = 0xffffffffU;
constexpr float kMinusInf = -INFINITY;

/// TopKRouter as kernels read it.
struct TopKRule {
  std::int32_t num_experts;
  std::int32_t top_k;
  Score score;
  bool renormalize;
  float scale;
  std::int32_t groups;
  std::int32_t top_groups;
  GroupScore group_score;
};

struct RouteParams {
  const float* logits;          // [T, E]
  const float* selection_bias;  // [E] or null
  std::int32_t* expert;         // [T, K]
  float* weight;                // [T, K]
  float* top_score;             // [T] or null
  DeviceStatus* status;         // or null
  std::int32_t num_tokens;
  TopKRule config;
  bool by_logit;
  /// Of AdaMoE: so many of the config's experts do no work and are left out behind the choice.
  std::int32_t null_experts;
};

[[nodiscard]] inline TopKRule rule_of(const RouterConfig& config) {
  const TopKRouter& router = config.as_top_k();
  return {.num_experts = config.num_experts,
          .top_k = router.top_k,
          .score = router.score,
          .renormalize = router.renormalize,
          .scale = router.scale,
          .groups = router.groups,
          .top_groups = router.top_groups,
          .group_score = router.group_score};
}

[[nodiscard]] inline RouteParams params_of(const RouteArgs& args) {
  return {.logits = args.logits.data,
          .selection_bias = args.selection_bias.data,
          .expert = args.routing.expert.data,
          .weight = args.routing.weight.data,
          .top_score = args.request.top_score.data,
          .status = args.execution.status,
          .num_tokens = static_cast<std::int32_t>(args.logits.shape[0]),
          .config = rule_of(args.config),
          .by_logit = compares_logits(args),
          .null_experts = 0};
}

/// A float as an integer that sorts as it does; both zeros are one; 0 is below all floats.
__device__ __forceinline__ std::uint32_t to_key(float x) {
  const int bits = __float_as_int(x + 0.0F);
  return static_cast<std::uint32_t>(bits ^ (bits >> 31 | INT32_MIN));
}

__device__ __forceinline__ float from_key(std::uint32_t key) {
  return __uint_as_float((key & 0x80000000U) != 0 ? key & 0x7fffffffU : ~key);
}

/// What kLanes neighbouring lanes of a warp, one token's, agree on.
template <int kLanes>
struct Lanes {
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }

  static __device__ __forceinline__ std::uint32_t max(std::uint32_t x) {
    if constexpr (kLanes == 32) {
      return __reduce_max_sync(kAll, x);
    } else {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        x = ::max(x, __shfl_xor_sync(kAll, x, offset));
      }
      return x;
    }
  }
  static __device__ __forceinline__ float max(float x) {
    if constexpr (kLanes == 32) {
      return from_key(max(to_key(x)));
    } else {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        x = fmaxf(x, __shfl_xor_sync(kAll, x, offset));
      }
      return x;
    }
  }

  static __device__ __forceinline__ float sum(float x) { return sum_of_first(x, kLanes); }

  /// Of two numbers, under way together.
  static __device__ __forceinline__ void sum_both(float& x, float& y) {
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
      const float other = __shfl_xor_sync(kAll, x, offset);
      y += __shfl_xor_sync(kAll, y, offset);
      x += other;
    }
  }

  /// The sum over lanes below `count`; valid in those.
  static __device__ __forceinline__ float sum_of_first(float x, int count) {
    for (int offset = 1; offset < count; offset *= 2) x += __shfl_xor_sync(kAll, x, offset);
    return x;
  }

  /// The lowest lane for which `is` holds; there is one.
  static __device__ __forceinline__ int first(bool is) {
    const unsigned all = __ballot_sync(kAll, is);
    const int begin = static_cast<int>(threadIdx.x) % 32 / kLanes * kLanes;
    return __ffs(static_cast<int>(all >> begin)) - 1;
  }

  static __device__ __forceinline__ bool any(bool is) {
    const unsigned all = __ballot_sync(kAll, is);
    const int begin = static_cast<int>(threadIdx.x) % 32 / kLanes * kLanes;
    return (all >> begin & (kAll >> (32 - kLanes))) != 0;
  }

  template <typename T>
  static __device__ __forceinline__ T from(T x, int lane) {
    return __shfl_sync(kAll, x, lane, kLanes);
  }
};

__device__ __forceinline__ float exp_below(float x, float largest) {
  return x == largest ? 1.0F : expf(x - largest);
}

/// The same to about 2^-21 of exp(x) or, for x far below, of less: for the terms of a sum. Zero far
/// below, and where both are infinite as above.
__device__ __forceinline__ float fast_exp_below(float x, float largest) {
  return x == largest ? 1.0F : ptx::exp2_approx(1.44269504F * (x - largest));
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

/// The same to about 2^-22, in five instructions: what only ranks need not be weighed.
__device__ __forceinline__ float fast_sigmoid(float x) {
  return __fdividef(1.0F, 1.0F + ptx::exp2_approx(-1.44269504F * x));
}

__device__ __forceinline__ float group_sum(float first, float second) {
  return second == kMinusInf ? kMinusInf : first + second;
}

template <int kLanes>
__device__ __forceinline__ float softmax_of_chosen(const TopKRule& config, float logit, bool mine,
                                                   bool by_logit) {
  // Where logits are compared, the first chosen is the largest.
  const float best =
      by_logit ? Lanes<kLanes>::from(logit, 0) : Lanes<kLanes>::max(mine ? logit : kMinusInf);
  const float e = mine ? exp_below(logit, best) : 0.0F;
  return e / Lanes<kLanes>::sum_of_first(e, config.top_k);
}

/// The same for sigmoids of logits.
template <int kLanes>
__device__ __forceinline__ float weigh_sigmoid(const TopKRule& config, float logit, bool mine,
                                               bool by_logit) {
  const float s = sigmoid(logit);
  if (!config.renormalize) return s;
  const float total =
      Lanes<kLanes>::from(Lanes<kLanes>::sum_of_first(mine ? s : 0.0F, config.top_k), 0);
  // Where all of them underflow sigmoid(x) = exp(x) to float accuracy: the ratios survive below.
  const bool fine = total >= 1.17549435e-38F;
  if (__all_sync(kAll, fine)) return s / total;
  const float ratio = softmax_of_chosen<kLanes>(config, logit, mine, by_logit);
  return fine ? s / total : ratio;
}

/// The weight of lane k's expert, for lanes below top_k.
template <int kLanes>
__device__ __forceinline__ float weigh(const TopKRule& config, float logit, bool mine,
                                       float largest, float sum, bool by_logit) {
  if (config.score == Score::kSoftmax && !config.renormalize) {
    return exp_below(logit, largest) / sum;
  }
  if (config.score == Score::kSigmoid) {
    return weigh_sigmoid<kLanes>(config, logit, mine, by_logit);
  }
  return softmax_of_chosen<kLanes>(config, logit, mine, by_logit);
}

__device__ __forceinline__ void report_nan(DeviceStatus* status, int token, int expert) {
  if (status == nullptr) return;
  const auto place =
      static_cast<unsigned long long>(token) << 32 | static_cast<unsigned long long>(expert);
  atomicMin(reinterpret_cast<unsigned long long*>(&status->nan_logit), place);
}

}  // namespace switchyard::routing
