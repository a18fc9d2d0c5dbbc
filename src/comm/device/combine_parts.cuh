#pragma once

// A token's parts become its output: the fp32 binary tree over ranks and groups, and one rounding.
// All ways home, push, pull and NCCL's sends, end here, so that they give the same bits.

#include <type_traits>

#include "comm/device/exchange.cuh"

namespace switchyard {

/// One part of 8 values of a token, and its scale. A part is what one rank's experts, or one group
/// of them, make of the token: part r << group_bits | g is group g of rank r.
template <typename Wire>
struct Part {
  Eight<Wire> values;
  float scale;
};

/// Offsets in a window, worked out once: in every load they cost more than all the rest.
struct ResultPlaces {
  std::int64_t rows, row_bytes, scales, row_scales;

  __device__ __forceinline__ explicit ResultPlaces(const ExchangeLayout& layout)
      : rows(layout.result(0)),
        row_bytes(layout.result_bytes()),
        scales(layout.result_scale(0)),
        row_scales(layout.result_scales()) {}
};

/// A row that has come home, and its scales; null: there is none.
struct HomeRow {
  const std::byte* values;
  const float* scales;
};

/// Of part `number` of a token.
__device__ __forceinline__ HomeRow home_row(const DeviceExchangeParams& p,
                                            const ResultPlaces& places, int number,
                                            std::int32_t slot) {
  if (slot < 0) return {};
  const std::byte* const window = p.window[p.rank];
  const int rank = number >> p.group_bits;
  const int group = number - (rank << p.group_bits);
  const std::int64_t place = ((rank * p.max_tokens + slot) << p.group_bits) + group;
  return {window + places.rows + place * places.row_bytes,
          reinterpret_cast<const float*>(window + places.scales) + place * places.row_scales};
}

/// 8 values of a row; +0 where there is none.
template <typename Wire>
__device__ __forceinline__ Part<Wire> load_part(const HomeRow& row, std::int64_t at) {
  Part<Wire> part{};
  if (row.values == nullptr) return part;
  part.values =
      *reinterpret_cast<const Eight<Wire>*>(reinterpret_cast<const Wire*>(row.values) + at);
  if constexpr (kIsFp8<Wire>) part.scale = row.scales[at / kScaleBlock];
  return part;
}

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

// ---- which kernel ------------------------------------------------------------------------------

template <int kParts>
using NumParts = std::integral_constant<int, kParts>;

/// choose(NumParts<kParts>) with the least that takes `num_parts` rows home for a token, at most
/// kMaxDeviceRanks.
template <typename Choose>
auto for_parts(int num_parts, Choose&& choose) {
  if (num_parts == 1) return choose(NumParts<1>{});
  if (num_parts == 2) return choose(NumParts<2>{});
  return num_parts <= 4 ? choose(NumParts<4>{}) : choose(NumParts<kMaxDeviceRanks>{});
}

/// choose(Wire, NumParts<kParts>), of every wire.
template <typename Choose>
auto for_wire_and_parts(DType wire, int num_parts, Choose&& choose) {
  const auto on = [&](auto of_wire) {
    return for_parts(num_parts, [&](auto parts) { return choose(of_wire, parts); });
  };
  switch (wire) {
    case DType::kBF16: return on(__nv_bfloat16{});
    case DType::kF16: return on(__half{});
    case DType::kF8E4M3: return on(__nv_fp8_e4m3{});
    default: return on(float{});
  }
}

}  // namespace switchyard
