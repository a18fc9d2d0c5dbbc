#pragma once

// A token's parts become its output: the fp32 binary tree over ranks and groups, and one rounding.
// Both ways home, push and pull, end here, so that they give the same bits.

#include "comm/device_exchange.cuh"

namespace switchyard {

/// One part of 8 values of a token, and its scale. A part is what one rank's experts, or one group
/// of them, make of the token: part r << group_bits | g is group g of rank r.
template <typename Wire>
struct Part {
  Eight<Wire> values;
  float scale;
};

/// kParts parts, a power of two, by the tree.
template <typename Wire, int kParts>
__device__ __forceinline__ void add_parts(const Part<Wire> (&part)[kParts], float (&sum)[8]) {
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float2 value[kParts];
#pragma unroll
    for (int r = 0; r < kParts; ++r) {
      value[r] = get_pair(part[r].values, pair);
      if constexpr (kIsFp8<Wire>) {
        value[r] = {__fmul_rn(value[r].x, part[r].scale), __fmul_rn(value[r].y, part[r].scale)};
      }
    }
#pragma unroll
    for (int width = kParts / 2; width > 0; width /= 2) {
#pragma unroll
      for (int r = 0; r < width; ++r) {
        value[r] = {__fadd_rn(value[2 * r].x, value[2 * r + 1].x),
                    __fadd_rn(value[2 * r].y, value[2 * r + 1].y)};
      }
    }
    sum[2 * pair] = value[0].x;
    sum[2 * pair + 1] = value[0].y;
  }
}

__device__ __forceinline__ void store_out(const DeviceCombineParams& args, std::int64_t at,
                                          const float (&sum)[8]) {
  if (args.out_type == DType::kF32) {
    auto* const out = reinterpret_cast<float4*>(static_cast<float*>(args.out) + at);
    out[0] = {sum[0], sum[1], sum[2], sum[3]};
    out[1] = {sum[4], sum[5], sum[6], sum[7]};
  } else if (args.out_type == DType::kBF16) {
    Eight<__nv_bfloat16> out;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) set_pair(out, pair, {sum[2 * pair], sum[2 * pair + 1]});
    *reinterpret_cast<Eight<__nv_bfloat16>*>(static_cast<__nv_bfloat16*>(args.out) + at) = out;
  } else {
    Eight<__half> out;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) set_pair(out, pair, {sum[2 * pair], sum[2 * pair + 1]});
    *reinterpret_cast<Eight<__half>*>(static_cast<__half*>(args.out) + at) = out;
  }
}

}  // namespace switchyard
