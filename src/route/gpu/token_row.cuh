#pragma once

// A token's row of logits in the registers of neighbouring lanes: for kernels that look at all
// experts, in no particular order.

#include <cstddef>
#include <cstdint>

#include "route/gpu/route_kernel.cuh"

namespace switchyard::routing {

constexpr float kSmallestNormal = 1.17549435e-38F;

/// A pointer to global memory as one number: else its sum is taken apart and made anew for each
/// row, in 64 bits.
template <typename T>
__device__ __forceinline__ T* in_one(T* p) {
  std::size_t address = __cvta_generic_to_global(p);
  asm("" : "+l"(address));
  return static_cast<T*>(__cvta_global_to_generic(address));
}

/// One instruction, whatever else is made of the factors.
__device__ __forceinline__ std::int64_t product(int a, int b) {
  std::int64_t y;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(y) : "r"(a), "r"(b));
  return y;
}

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

  /// From the lane's first expert to that of its v-th place.
  static __host__ __device__ constexpr int behind_first(int v) {
    if (kNeighbours) return v;
    return kByFour ? v / 4 * 4 * kLanes + v % 4 : v * kLanes;
  }
  static __device__ __forceinline__ int first_expert() {
    return Lane::lane() * (kNeighbours ? kValues : kByFour ? 4 : 1);
  }
  /// Of the lane's v-th place.
  static __device__ __forceinline__ int expert(int v) { return first_expert() + behind_first(v); }
  [[nodiscard]] __device__ __forceinline__ bool has(int v) const { return expert(v) < num_experts; }

  /// Plain loads: the previous kernel may have written it.
  /// @param nobody  Where there is no expert.
  __device__ __forceinline__ void load(const float* row, int size, float nobody = kMinusInf) {
    num_experts = size;
    const float* const mine = row + first_expert();
    if (kByFour && size == kValues * kLanes) {
#pragma unroll
      for (int v = 0; v + 3 < kValues; v += 4) load_four(mine, v);
      return;
    }
#pragma unroll
    for (int v = 0; v < kValues; ++v) x[v] = nobody;
    if (kByFour && size % 4 == 0) {
#pragma unroll
      for (int v = 0; v + 3 < kValues; v += 4) {
        if (has(v)) load_four(mine, v);
      }
      return;
    }
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      if (has(v)) x[v] = mine[behind_first(v)];
    }
  }

  __device__ __forceinline__ void store(float* row) const {
    float* const mine = row + first_expert();
    if (kByFour && num_experts % 4 == 0) {
#pragma unroll
      for (int v = 0; v + 3 < kValues; v += 4) {
        if (!has(v)) continue;
        *reinterpret_cast<float4*>(mine + behind_first(v)) =
            make_float4(x[v], x[v + 1], x[v + 2], x[v + 3]);
      }
      return;
    }
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      if (has(v)) mine[behind_first(v)] = x[v];
    }
  }

  __device__ __forceinline__ float largest() const {
    float most = x[0];
#pragma unroll
    for (int v = 1; v < kValues; ++v) most = fmaxf(most, x[v]);
    return Lane::max(most);
  }

  __device__ __forceinline__ void load_four(const float* mine, int v) {
    const float4 four = *reinterpret_cast<const float4*>(mine + behind_first(v));
    x[v] = four.x, x[v + 1] = four.y, x[v + 2] = four.z, x[v + 3] = four.w;
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
