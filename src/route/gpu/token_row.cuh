#pragma once

// A token's row of logits in the registers of neighbouring lanes: for kernels that look at all
// experts, in no particular order.

#include <cstdint>

#include "route/gpu/route_kernel.cuh"

namespace switchyard::routing {

constexpr float kSmallestNormal = 1.17549435e-38F;

/// kLanes lanes have kValues experts each; those that lanes read together lie together. Places
/// behind the last expert hold -infinity and are left out of all sums.
/// kNeighbours: those of a lane are neighbours instead, so that of the largest values the one in
/// the lowest lane and place has the lowest expert.
template <int kValues, int kLanes, bool kNeighbours = false>
struct TokenRow {
  using Lane = Lanes<kLanes>;
  static constexpr int kPlaces = kValues;
  static constexpr int kLaneCount = kLanes;
  static constexpr bool kByFour = kValues % 4 == 0;

  float x[kValues];
  int num_experts;

  /// Of the lane's v-th place.
  static __device__ __forceinline__ int expert(int v) {
    if constexpr (kNeighbours) return Lane::lane() * kValues + v;
    return kByFour ? (v / 4 * kLanes + Lane::lane()) * 4 + v % 4 : v * kLanes + Lane::lane();
  }
  [[nodiscard]] __device__ __forceinline__ bool has(int v) const { return expert(v) < num_experts; }

  /// Plain loads: the previous kernel may have written it.
  /// @param nobody  Where there is no expert.
  __device__ __forceinline__ void load(const float* row, int size, float nobody = kMinusInf) {
    num_experts = size;
    if (kByFour && size % 4 == 0) {
#pragma unroll
      for (int v = 0; v + 3 < kValues; v += 4) {
        const float4 four = has(v) ? *reinterpret_cast<const float4*>(row + expert(v))
                                   : make_float4(nobody, nobody, nobody, nobody);
        x[v] = four.x, x[v + 1] = four.y, x[v + 2] = four.z, x[v + 3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int v = 0; v < kValues; ++v) x[v] = has(v) ? row[expert(v)] : nobody;
  }

  __device__ __forceinline__ void store(float* row) const {
    if (kByFour && num_experts % 4 == 0) {
#pragma unroll
      for (int v = 0; v + 3 < kValues; v += 4) {
        if (!has(v)) continue;
        *reinterpret_cast<float4*>(row + expert(v)) =
            make_float4(x[v], x[v + 1], x[v + 2], x[v + 3]);
      }
      return;
    }
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      if (has(v)) row[expert(v)] = x[v];
    }
  }

  __device__ __forceinline__ float largest() const {
    float most = x[0];
#pragma unroll
    for (int v = 1; v < kValues; ++v) most = fmaxf(most, x[v]);
    return Lane::max(most);
  }

  /// The lowest expert whose logit is NaN, or one behind all.
  [[nodiscard]] __device__ __forceinline__ int lowest_nan() const {
    constexpr int kNone = kValues * kLanes;
    float largest = x[0];
#pragma unroll
    for (int v = 1; v < kValues; ++v) largest = ptx::max_nan(largest, x[v]);
    if (!__any_sync(kAll, isnan(largest))) return kNone;
    int nan = kNone;
#pragma unroll
    for (int v = kValues - 1; v >= 0; --v) {
      if (isnan(x[v])) nan = min(nan, expert(v));
    }
    return kNone - static_cast<int>(Lane::max(static_cast<std::uint32_t>(kNone - nan)));
  }

  /// The sum over all experts of f(logit), which is left in `value`; 0 where there is no expert.
  template <typename F>
  __device__ __forceinline__ float sum_of(float (&value)[kValues], F&& f) const {
    float sum = 0.0F;
#pragma unroll
    for (int v = 0; v < kValues; ++v) sum += value[v] = has(v) ? f(x[v]) : 0.0F;
    return Lane::sum(sum);
  }
};

/// Calls run<kValues, kLanes>() for rows of up to 1024 experts, and as many lanes as choices. A
/// warp a token, which answers soonest; where tokens fill the device, a part of one.
template <typename Run>
void for_row_width(std::int64_t num_tokens, std::int64_t num_experts, std::int64_t top_k,
                   Run&& run) {
  constexpr std::int64_t kMany = 4096;
  if (num_tokens >= kMany) {
    if (num_experts <= 64 && top_k <= 8) return run.template operator()<8, 8>();
    if (num_experts <= 128 && top_k <= 16) return run.template operator()<8, 16>();
  }
  if (num_experts <= 64) return run.template operator()<2, 32>();
  if (num_experts <= 128) return run.template operator()<4, 32>();
  if (num_experts <= 256) return run.template operator()<8, 32>();
  if (num_experts <= 512) return run.template operator()<16, 32>();
  return run.template operator()<32, 32>();
}

}  // namespace switchyard::routing
