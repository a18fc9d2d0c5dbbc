#pragma once

// A token's row of logits in the registers of a warp: for kernels that look at all experts.

#include <cstdint>

#include "route/gpu/route_kernel.cuh"

namespace switchyard::routing {

constexpr float kSmallestNormal = 1.17549435e-38F;

/// Lane i has the kValues experts from i * kValues on; places beyond the last one are left out of
/// all.
template <int kValues>
struct TokenRow {
  using Lane = Lanes<32>;
  static constexpr bool kByFour = kValues % 4 == 0;

  float x[kValues];
  int count;  ///< Of the lane's places those with an expert; may be below 0.

  /// Plain loads: the previous kernel may have written it.
  __device__ __forceinline__ void load(const float* row, int num_experts) {
    const int first = Lane::lane() * kValues;
    count = num_experts - first;
    if (kByFour && num_experts % 4 == 0) {
#pragma unroll
      for (int v = 0; v + 3 < kValues; v += 4) {
        const float4 four = v < count ? *reinterpret_cast<const float4*>(row + first + v)
                                      : make_float4(kMinusInf, kMinusInf, kMinusInf, kMinusInf);
        x[v] = four.x, x[v + 1] = four.y, x[v + 2] = four.z, x[v + 3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int v = 0; v < kValues; ++v) x[v] = v < count ? row[first + v] : kMinusInf;
  }

  /// Writes values of the row's experts.
  __device__ __forceinline__ void store(const float (&value)[kValues], float* row,
                                        int num_experts) const {
    const int first = Lane::lane() * kValues;
    if (kByFour && num_experts % 4 == 0) {
#pragma unroll
      for (int v = 0; v + 3 < kValues; v += 4) {
        if (v < count) {
          *reinterpret_cast<float4*>(row + first + v) =
              make_float4(value[v], value[v + 1], value[v + 2], value[v + 3]);
        }
      }
      return;
    }
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      if (v < count) row[first + v] = value[v];
    }
  }

  __device__ __forceinline__ float largest() const {
    float most = x[0];
#pragma unroll
    for (int v = 1; v < kValues; ++v) most = fmaxf(most, x[v]);
    return Lane::max(most);
  }

  /// The sum over all experts of f(logit), which is left in `value`; 0 where there is no expert.
  template <typename F>
  __device__ __forceinline__ float sum_of(float (&value)[kValues], F&& f) const {
    float sum = 0.0F;
#pragma unroll
    for (int v = 0; v < kValues; ++v) sum += value[v] = v < count ? f(x[v]) : 0.0F;
    return Lane::sum(sum);
  }
};

/// Calls run<kValues>() for the rows of so many experts, up to 1024.
template <typename Run>
void for_row_width(std::int32_t num_experts, Run&& run) {
  if (num_experts <= 32) return run.template operator()<1>();
  if (num_experts <= 64) return run.template operator()<2>();
  if (num_experts <= 128) return run.template operator()<4>();
  if (num_experts <= 256) return run.template operator()<8>();
  if (num_experts <= 512) return run.template operator()<16>();
  return run.template operator()<32>();
}

}  // namespace switchyard::routing
