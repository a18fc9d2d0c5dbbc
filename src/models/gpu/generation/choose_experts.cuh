#pragma once

#include <climits>

#include "models/gpu/generation/stages.hpp"
#include "models/gpu/launch.cuh"

namespace switchyard::models::gpu {

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, i));
  return x;
}

/// How a row chooses.
struct ChoiceArgs {
  const float* bias = nullptr;  ///< [experts], or null.
  std::int32_t experts = 0, top_k = 0;
  bool renormalize = false;
  float scale = 1;
};

/// A warp chooses the top_k experts of a row of logits, by logit or by probability and bias, ties
/// to the lower one, and their probabilities, into [top_k] each. Logits that are not numbers make
/// weights that are none.
__device__ __forceinline__ void choose_of_many_experts(const ChoiceArgs& p, const float* logits,
                                                       std::int32_t* experts, float* shares) {
  constexpr int kEach = kMostRouted / 32;  // experts of a lane
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float logit[kEach], key[kEach];
  float largest = -INFINITY, sum = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int e = lane + 32 * j;
    logit[j] = e < p.experts ? logits[e] : -INFINITY;
    largest = fmaxf(largest, logit[j]);
  }
  largest = warp_max(largest);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (lane + 32 * j < p.experts) sum += expf(logit[j] - largest);
  }
  sum = warp_sum(sum);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int e = lane + 32 * j;
    key[j] = logit[j];
    if (p.bias != nullptr && e < p.experts) key[j] = expf(logit[j] - largest) / sum + p.bias[e];
  }
  float mine = 0, chosen = 0;
  int id = 0;
  std::uint32_t used = 0;  // bit j: expert lane + 32 j is chosen
  for (int k = 0; k < p.top_k; ++k) {
    float best = -INFINITY, of_best = NAN;
    int who = INT_MAX;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const bool free = (used >> j & 1U) == 0 && lane + 32 * j < p.experts;
      if (!free || !(key[j] > best || (key[j] == best && who == INT_MAX))) continue;
      best = key[j];
      who = lane + 32 * j;
      of_best = logit[j];
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
      const float key_there = __shfl_xor_sync(0xffffffffU, best, i);
      const float logit_there = __shfl_xor_sync(0xffffffffU, of_best, i);
      const int there = __shfl_xor_sync(0xffffffffU, who, i);
      if (there == INT_MAX) continue;
      if (who == INT_MAX || key_there > best || (key_there == best && there < who)) {
        best = key_there;
        of_best = logit_there;
        who = there;
      }
    }
    const float share = expf(of_best - largest) / sum;
    chosen += share;
    if (who != INT_MAX && who % 32 == lane) used |= 1U << (who / 32);
    if (lane == k) {
      mine = share;
      id = who == INT_MAX ? k : who;
    }
  }
  if (lane >= p.top_k) return;
  experts[lane] = id;
  shares[lane] = (p.renormalize ? mine / chosen : mine) * p.scale;
}

/// The same of at most 32 experts, which a lane each has: its rank is how many are before it. Of
/// logits or biases that are not numbers the first experts.
__device__ __forceinline__ void choose_of_few_experts(const ChoiceArgs& p, const float* logits,
                                                      std::int32_t* experts, float* shares) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool there = lane < p.experts;
  const float logit = there ? logits[lane] : -INFINITY;
  const float largest = warp_max(logit);
  const float likelihood = there ? expf(logit - largest) : 0.0F;
  const float sum = warp_sum(likelihood);
  float key = logit;
  if (p.bias != nullptr && there) key = likelihood / sum + p.bias[lane];
  const bool numbers = __all_sync(0xffffffffU, !there || (sum == sum && key == key)) != 0;
  int rank = numbers ? 0 : lane;
  for (int e = 0; numbers && e < p.experts; ++e) {
    const float other = p.bias == nullptr ? logits[e] : __shfl_sync(0xffffffffU, key, e);
    rank += other > key || (other == key && e < lane) ? 1 : 0;
  }
  const bool chosen = there && rank < p.top_k;
  const float share = likelihood / sum;
  const float all = p.renormalize ? warp_sum(chosen ? share : 0.0F) : 1.0F;
  if (!chosen) return;
  experts[rank] = lane;
  shares[rank] = (p.renormalize ? share / all : share) * p.scale;
}

/// The one that is for this many: a warp, of logits that it sees.
__device__ __forceinline__ void choose_experts(const ChoiceArgs& p, const float* logits,
                                               std::int32_t* experts, float* shares) {
  if (p.experts <= 32) {
    choose_of_few_experts(p, logits, experts, shares);
  } else {
    choose_of_many_experts(p, logits, experts, shares);
  }
}

}  // namespace switchyard::models::gpu
