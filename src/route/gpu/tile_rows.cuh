#pragma once

// Neighbouring tokens of a warp and their softmax over all experts: several, so that their loads
// and sums over lanes are under way together.

#include "route/gpu/ranked_row.cuh"

namespace switchyard::routing {

constexpr int kTokensOfWarp = 4;
/// None, of a token with a NaN.
constexpr float kNoProbability = 2.0F;

/// Rows of tokens whose lane's values, kHeld of them, become probabilities in registers, or (kHeld
/// 0) are read again.
template <int kHeld>
class TileRows {
 public:
  /// Of tokens first to first + 3, or the last one in place of those behind it.
  __device__ __forceinline__ TileRows(const float* logits, int num_experts, std::int64_t num_tokens,
                                      std::int64_t first, DeviceStatus* status)
      : size_(num_experts) {
#pragma unroll
    for (int i = 0; i < kTokensOfWarp; ++i) {
      row_[i] = logits + min(first + i, num_tokens - 1) * size_;
    }
#pragma unroll
    for (int i = 0; i < kTokensOfWarp; ++i) {
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        const int e = 32 * v + Warp::lane();
        x_[i][v] = e < size_ ? row_[i][e] : kMinusInf;
      }
    }
    bool nan = false;
#pragma unroll
    for (int i = 0; i < kTokensOfWarp; ++i) {
      float most = kMinusInf;
      for_logits(i, [&](float x) { most = ptx::max_nan(most, x); });
      nan = nan || isnan(most);
      broken_[i] = false;
      largest_[i] = Warp::max(fmaxf(most, kMinusInf));
    }
    if (__any_sync(kAll, nan)) find_nans(num_tokens - first, static_cast<int>(first), status);
    add_powers();
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
#pragma unroll
      for (int i = 0; i < kTokensOfWarp; ++i) {
        sum_[i] += __shfl_xor_sync(kAll, sum_[i], offset);
      }
    }
#pragma unroll
    for (int i = 0; i < kTokensOfWarp; ++i) {
      const float reciprocal = 1.0F / sum_[i];
      sum_[i] = reciprocal;
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        x_[i][v] = broken_[i] ? kNoProbability : x_[i][v] * reciprocal;
      }
    }
  }

  /// Of the i-th token and expert 32 v + lane, which there is.
  [[nodiscard]] __device__ __forceinline__ float probability(int i, int v) const {
    if constexpr (kHeld != 0) return x_[i][v];
    const float x = row_[i][32 * v + Warp::lane()];
    return broken_[i] ? kNoProbability : exp_below(x, largest_[i]) * sum_[i];
  }

 private:
  /// visit(logit) of the lane's experts; with kHeld -infinity where there is none.
  template <typename Visit>
  __device__ __forceinline__ void for_logits(int i, const Visit& visit) const {
    if constexpr (kHeld == 0) {
      for (int e = Warp::lane(); e < size_; e += 32) visit(row_[i][e]);
    } else {
#pragma unroll
      for (int v = 0; v < kHeld; ++v) visit(x_[i][v]);
    }
  }

  /// @param count  Tokens that there are.
  __device__ void find_nans(std::int64_t count, int first, DeviceStatus* status) {
#pragma unroll
    for (int i = 0; i < kTokensOfWarp; ++i) {
      const int nan = RankedRow{row_[i], size_}.lowest_nan();
      broken_[i] = nan < size_;
      if (broken_[i] && i < count && Warp::lane() == 0) report_nan(status, first + i, nan);
    }
  }

  __device__ __forceinline__ void add_powers() {
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kTokensOfWarp; ++i) {
      sum_[i] = 0.0F;
      finite = finite && !isinf(largest_[i]);
    }
    if constexpr (kHeld == 0) {
#pragma unroll
      for (int i = 0; i < kTokensOfWarp; ++i) {
        for_logits(i, [&](float x) { sum_[i] += exp_below(x, largest_[i]); });
      }
    } else {
      // Of finite ones exp(-infinity) is 0 where there is no expert.
      const auto power_of = [&](auto&& power) {
#pragma unroll
        for (int v = 0; v < kHeld; ++v) {
          const bool has = 32 * v + Warp::lane() < size_;
#pragma unroll
          for (int i = 0; i < kTokensOfWarp; ++i) {
            sum_[i] += x_[i][v] = power(x_[i][v], largest_[i], has);
          }
        }
      };
      if (finite) {
        power_of([](float x, float largest, bool /*has*/) { return expf(x - largest); });
      } else {
        power_of([](float x, float largest, bool has) { return has ? exp_below(x, largest) : 0; });
      }
    }
  }

  float x_[kTokensOfWarp][kHeld == 0 ? 1 : kHeld];
  float largest_[kTokensOfWarp];
  float sum_[kTokensOfWarp];  ///< In the end one over it.
  bool broken_[kTokensOfWarp];
  const float* row_[kTokensOfWarp];
  int size_;
};

}  // namespace switchyard::routing
