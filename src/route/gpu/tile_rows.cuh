#pragma once

// Neighbouring tokens of a warp and their softmax over all experts: several, so that their loads
// and sums over lanes are under way together.

#include "route/gpu/ranked_row.cuh"

namespace switchyard::routing {

constexpr int kTokensOfWarp = 4;

/// Rows in registers, kHeld values a lane, or (kHeld 0) read again.
template <int kHeld>
struct TileRows {
  float x[kTokensOfWarp][kHeld == 0 ? 1 : kHeld];
  float largest[kTokensOfWarp], sum[kTokensOfWarp];
  const float* row[kTokensOfWarp];
  int size;

  /// visit(i, expert, logit) of the lane's logits of all tokens.
  template <typename Visit>
  __device__ __forceinline__ void for_logits(const Visit& visit) const {
    if constexpr (kHeld == 0) {
      for (int e = Warp::lane(); e < size; e += 32) {
#pragma unroll
        for (int i = 0; i < kTokensOfWarp; ++i) visit(i, e, row[i][e]);
      }
    } else {
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        const int e = 32 * v + Warp::lane();
#pragma unroll
        for (int i = 0; i < kTokensOfWarp; ++i) {
          if (e < size) visit(i, e, x[i][v]);
        }
      }
    }
  }

  /// Of tokens first to first + 3, or the last one in place of those behind it.
  __device__ __forceinline__ void load(const float* logits, int num_experts,
                                       std::int64_t num_tokens, std::int64_t first,
                                       DeviceStatus* status) {
    size = num_experts;
#pragma unroll
    for (int i = 0; i < kTokensOfWarp; ++i) {
      row[i] = logits + min(first + i, num_tokens - 1) * size;
    }
    if constexpr (kHeld != 0) {
#pragma unroll
      for (int i = 0; i < kTokensOfWarp; ++i) {
#pragma unroll
        for (int v = 0; v < kHeld; ++v) {
          const int e = 32 * v + Warp::lane();
          x[i][v] = e < size ? row[i][e] : 0.0F;
        }
      }
    }
    unsigned nan[kTokensOfWarp];
#pragma unroll
    for (int i = 0; i < kTokensOfWarp; ++i) largest[i] = kMinusInf, sum[i] = 0, nan[i] = kAll;
    for_logits([&](int i, int e, float logit) {
      if (isnan(logit)) nan[i] = min(nan[i], static_cast<unsigned>(e));
      largest[i] = fmaxf(largest[i], logit);
    });
#pragma unroll
    for (int i = 0; i < kTokensOfWarp; ++i) {
      nan[i] = __reduce_min_sync(kAll, nan[i]);
      largest[i] = Warp::max(largest[i]);
    }
    for_logits([&](int i, int /*e*/, float logit) { sum[i] += exp_below(logit, largest[i]); });
#pragma unroll
    for (int i = 0; i < kTokensOfWarp; ++i) {
      sum[i] = Warp::sum(sum[i]);
      if (nan[i] == kAll) continue;
      sum[i] = 0.0F;
      if (Warp::lane() == 0 && first + i < num_tokens) {
        report_nan(status, static_cast<int>(first + i), static_cast<int>(nan[i]));
      }
    }
  }
  /// 2, which is none, of a token with a NaN.
  [[nodiscard]] __device__ __forceinline__ float probability(int i, float logit) const {
    return sum[i] == 0.0F ? 2.0F : exp_below(logit, largest[i]) / sum[i];
  }
};

}  // namespace switchyard::routing
