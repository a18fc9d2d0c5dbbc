#pragma once

// Grouped products of e4m3 rows with e4m3 weights on Hopper: scales of 1 x 128 of the rows and of
// 128 x 128 of the weights, sums kept in fp32 from 128 to 128.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "switchyard/experts.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

class TensorMaps;

/// Rows of e4m3 with an f32 scale for each 128 values: [., cols] and [., ceil(cols / 128)].
struct Fp8Rows {
  const std::byte* codes = nullptr;
  const float* scales = nullptr;
};

/// One layer's experts and their rows; every pointer lives on the device, 16-byte aligned.
struct Fp8GroupedParams {
  Fp8Rows x{};                              ///< [N, H].
  const std::int32_t* row_token = nullptr;  ///< [S] row of x for each row; null: row itself.
  const std::byte* w13 = nullptr;     ///< [E, 2] matrices [I, H], as coded/layout.hpp has them.
  const float* scales13 = nullptr;    ///< [E, 2, ceil(I / 128), ceil(H / 128)].
  const float* b13 = nullptr;         ///< [E, 2I]; may be null.
  std::byte* act = nullptr;           ///< [S, I], e4m3: written, then read.
  float* act_scales = nullptr;        ///< [S, ceil(I / 128)].
  const std::byte* w2 = nullptr;      ///< [E] matrices [H, I].
  const float* scales2 = nullptr;     ///< [E, ceil(H / 128), ceil(I / 128)].
  const float* b2 = nullptr;          ///< [E, H]; may be null.
  void* y = nullptr;                  ///< out [S, H], bf16.
  TensorMaps* weight_maps = nullptr;  ///< Who keeps those of w13 and w2; null: made anew.

  const std::int32_t* expert_begin = nullptr;  ///< [E+1] first row of each expert.
  const std::int32_t* expert_rows = nullptr;   ///< [E] rows used of it.
  std::int32_t* counters = nullptr;            ///< As GroupedGemmParams::workspace.

  std::int32_t num_experts = 0;  ///< E <= 1024.
  std::int64_t max_rows = 0;     ///< S.
  std::int64_t num_tokens = 0;   ///< N.
  std::int64_t hidden = 0;       ///< H, a multiple of 16.
  std::int64_t inner = 0;        ///< I, likewise.
  Activation activation = Activation::kSilu;
  float alpha = 1.702F;
  float limit = 7.0F;
};

/// act[row] = e4m3 of activation(gate, up) with a scale of its own for each 128 columns, by the
/// rule of an fp8 wire (comm/host/wire.hpp). Gated experts only. Enqueues one kernel;
/// capturable.
/// @throws Error{kInvalidArgument}, {kUnsupported}: not compute capability 9.0. {kDevice}.
void launch_fp8_gate_up(const Fp8GroupedParams& params, cudaStream_t stream);
/// y[row] = w2[e] act[row] + b2[e].
void launch_fp8_down(const Fp8GroupedParams& params, cudaStream_t stream);

}  // namespace switchyard
