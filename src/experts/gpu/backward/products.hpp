#pragma once

// The products and sums on the way back through the experts, each one a launch: device pointers in,
// nothing else. Which rows an expert has is known only on the device.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "experts/gpu/activation_params.hpp"
#include "experts/gpu/backward/schedule.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

class TensorMaps;

constexpr std::int32_t kMaxBackwardExperts = 1024;

/// Whose rows are whose; device memory.
struct ExpertRows {
  const std::int32_t* begin = nullptr;  ///< [E+1] first row of each expert.
  const std::int32_t* rows = nullptr;   ///< [E] rows used of it.
  const std::int32_t* token = nullptr;  ///< [S] row of tokens.
  const float* weight = nullptr;        ///< [S].
  std::int32_t num_experts = 0;         ///< E <= kMaxBackwardExperts.
  std::int64_t max_rows = 0;            ///< S.
};

/// Through the second product and the activation, for each used row r of token t:
///   a' = dout_t w2[e];  dots[r][tile] = sum over a tile's columns of a' times the activation;
///   inner_r = weight_r * activation(z_r);  dz_r = the activation's gradient for weight_r * a'.
/// `dz` may be `z`. Cost: 2*H*I operations a row.
struct DownGradient {
  ExpertRows rows{};
  const void* dout = nullptr;  ///< [N, H].
  const void* w2 = nullptr;    ///< [E, H, I].
  const void* z = nullptr;     ///< [S, 2I] (plain [S, I]).
  void* dz = nullptr;          ///< out, as z.
  void* inner = nullptr;       ///< out [S, I].
  float* dots = nullptr;       ///< out [S, tiles_along(I)].
  std::int64_t hidden = 0;
  std::int64_t inner_cols = 0;  ///< I.
  bool gated = true;
  ActivationParams activation{};
  TensorMaps* weight_maps = nullptr;  ///< Who keeps that of w2; null: made anew.
  DType dtype = DType::kBF16;         ///< Of all that is void.
};

/// out_r = in_r weights[e] for each used row. Cost: 2*depth*cols operations a row.
struct RowsGradient {
  ExpertRows rows{};
  const void* in = nullptr;       ///< [S, depth].
  const void* weights = nullptr;  ///< [E, depth, cols].
  void* out = nullptr;            ///< [S, cols].
  bool out_is_f32 = true;         ///< Else dtype.
  std::int64_t depth = 0;
  std::int64_t cols = 0;
  TensorMaps* weight_maps = nullptr;  ///< Who keeps that of the weights; null: made anew.
  DType dtype = DType::kBF16;
};

/// What the units of one weights' gradient are handed out by.
struct RaggedUnits {
  std::int32_t* parts_before = nullptr;        ///< [E+1] parts of the experts before.
  std::int32_t* split_parts_before = nullptr;  ///< [E+1] of those with more than one.
  std::int32_t* counter = nullptr;             ///< Zero before the launch.
  std::int32_t part_rows = 0;
};

/// One operand of a weights' gradient.
struct GradientOperand {
  const void* rows = nullptr;
  const std::int32_t* token = nullptr;  ///< Which row is a row of the layout; null: that itself.
  std::int64_t cols = 0;
};

/// out[e] = sum over the rows of expert e of left_r^T right_r, in parts that are added in ascending
/// order; zeros where an expert has no rows. Cost: 2*left.cols*right.cols operations a row.
struct WeightGradient {
  ExpertRows rows{};
  GradientOperand left{};
  GradientOperand right{};
  RaggedUnits units{};
  float* split_sums = nullptr;  ///< Of parts, a gradient each; split_bytes() of room.
  void* out = nullptr;          ///< [E, left.cols, right.cols].
  bool out_is_f32 = true;       ///< Else dtype.
  bool accumulate = false;
  DType dtype = DType::kBF16;
};

/// out[e] = sum over the rows of expert e of [weight_r *] in_r. Cost: reads the rows once.
struct ColumnSums {
  ExpertRows rows{};
  GradientOperand in{};
  bool weighted = false;
  float* out = nullptr;  ///< [E, in.cols].
  bool accumulate = false;
  DType dtype = DType::kBF16;
};

/// out_r = sum of dots[r], in ascending order, + <dout_t, b2[e]>. Cost: reads them once.
struct RowWeightSums {
  ExpertRows rows{};
  const float* dots = nullptr;  ///< [S, num_dots].
  std::int64_t num_dots = 0;
  const void* dout = nullptr;  ///< [N, H].
  const float* b2 = nullptr;   ///< [E, H], or null.
  std::int64_t hidden = 0;
  float* out = nullptr;  ///< [S].
  DType dtype = DType::kBF16;
};

/// Fills in the units of two gradients and sets `zeroed` words to zero, in one launch.
struct PrepareUnits {
  ExpertRows rows{};
  RaggedUnits units[2]{};
  std::uint32_t* zeroed = nullptr;
  std::int32_t num_zeroed = 0;
};

/// Which kernels multiply.
enum class BackwardPath : std::uint8_t {
  kPortable,  ///< cp.async and mma.sync: sm_80 and everything later; all types.
  kSm90,      ///< TMA and wgmma: 16 bits.
};

void launch_prepare_units(const PrepareUnits& args, cudaStream_t stream);
void launch_down_gradient(const DownGradient& args, BackwardPath path, cudaStream_t stream);
void launch_rows_gradient(const RowsGradient& args, BackwardPath path, cudaStream_t stream);
void launch_weight_gradient(const WeightGradient& args, BackwardPath path, cudaStream_t stream);
void launch_column_sums(const ColumnSums& args, cudaStream_t stream);
void launch_row_weight_sums(const RowWeightSums& args, cudaStream_t stream);

/// The kernels of one type on sm_80 and everything later.
template <typename T>
struct PortableBackward {
  static void down(const DownGradient& args, cudaStream_t stream);
  static void rows(const RowsGradient& args, cudaStream_t stream);
  static void weights(const WeightGradient& args, cudaStream_t stream);
  /// What ends weights(), whoever has made the parts.
  static void add_parts(const WeightGradient& args, cudaStream_t stream);
};

/// Those of a 16-bit type on Hopper; weights() ends with PortableBackward's add_parts().
template <typename T>
struct HopperBackward {
  static void down(const DownGradient& args, cudaStream_t stream);
  static void rows(const RowsGradient& args, cudaStream_t stream);
  static void weights(const WeightGradient& args, cudaStream_t stream);
};

}  // namespace switchyard
