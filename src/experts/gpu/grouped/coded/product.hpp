#pragma once

// Grouped products of bf16 rows with weights that are stored as codes (e4m3, MXFP4) on Hopper: the
// codes become numbers in the registers of the warps that multiply, once for up to 48 to 128 rows.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "switchyard/experts.hpp"
#include "switchyard/weight_format.hpp"

namespace switchyard {

class TensorMaps;

/// One layer's experts and their rows; every pointer lives on the device, 16-byte aligned.
struct CodedGroupedParams {
  WeightFormat format = WeightFormat::kE4M3;  ///< kE4M3 or kMxfp4.
  const void* x = nullptr;                    ///< [N, H], bf16.
  const std::int32_t* row_token = nullptr;    ///< [S] row of x for each row; null: row itself.
  /// Room for [S, H] bf16, where H and I are multiples of 32; it may be y. Rows are put there one
  /// behind the other for tensor copies, which fetch act as well. e4m3: in the order of the codes
  /// (coded::ordered_column); null: rows are gathered by 4 bytes as they lie, with the same bits.
  /// MXFP4, which wants it: as two numbers of e4m3 for each value (split.hpp); it may be x then,
  /// where row_token is null.
  void* ordered = nullptr;
  float* row_scales = nullptr;      ///< MXFP4: room for [S]. e4m3: null.
  std::int64_t num_tokens = 0;      ///< N; only for `ordered`.
  const std::byte* w13 = nullptr;   ///< [E, 2 or 1] matrices [I, H], as coded/layout.hpp has them.
  const float* scales13 = nullptr;  ///< As StreamingParams::scales13.
  const float* b13 = nullptr;       ///< [E, 2I] or [E, I]; may be null.
  void* act = nullptr;              ///< [S, I], bf16: written, then read.
  const std::byte* w2 = nullptr;    ///< [E] matrices [H, I].
  const float* scales2 = nullptr;   ///< As StreamingParams::scales2.
  const float* b2 = nullptr;        ///< [E, H]; may be null.
  void* y = nullptr;                ///< out [S, H], bf16.
  TensorMaps* weight_maps = nullptr;  ///< Who keeps those of w13 and w2; null: made anew.

  const std::int32_t* expert_begin = nullptr;  ///< [E+1] first row of each expert.
  const std::int32_t* expert_rows = nullptr;   ///< [E] rows used of it.

  std::int32_t num_experts = 0;  ///< E <= 1024.
  std::int64_t max_rows = 0;     ///< S.
  std::int64_t hidden = 0;       ///< H, a multiple of 8.
  std::int64_t inner = 0;        ///< I, likewise.
  bool batch_invariant = false;  ///< A row's bits do not depend on how many rows there are.
  bool gated = true;
  Activation activation = Activation::kSilu;
  float alpha = 1.702F;
  float limit = 7.0F;
};

/// act[row] = activation(w13[e] x[token] + b13[e]), rounded to bf16. Enqueues one kernel, or two
/// with `ordered`; capturable; no host wait. e4m3: products of what the codes mean are exact, sums
/// fp32, of 128 products times a scale. MXFP4, scales of a matrix within coded::kMxfp4FoldedRange
/// powers of two: products are exact, sums of 128 of them keep 14 bits and are added in fp32. A
/// row's bits do not depend on other rows (MXFP4: with batch_invariant).
/// @throws Error{kInvalidArgument}, {kUnsupported}: not compute capability 9.0. {kDevice}.
/// Cost: an expert's codes are read from memory once; they are decoded once for every 72 rows
/// (MXFP4: 48 or 128; rows gathered: 64).
void launch_coded_gate_up(const CodedGroupedParams& params, cudaStream_t stream);
/// y[row] = w2[e] act[row] + b2[e], likewise; its weights are fetched beside the end of the first.
void launch_coded_down(const CodedGroupedParams& params, cudaStream_t stream);

}  // namespace switchyard
