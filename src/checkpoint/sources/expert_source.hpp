#pragma once

// Experts' weights straight from a checkpoint's mapping, whatever their storage.

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/tensor_set.hpp"
#include "switchyard/experts.hpp"

namespace switchyard {

/// Rows and columns of a part.
[[nodiscard]] std::array<std::int64_t, 2> part_shape(const ExpertConfig& config, ExpertPart part);

/// The tensors of one expert: its three matrices, one each, in the order of ExpertPart.
using ExpertTensorNames = std::array<std::string, 3>;

/// One tensor per expert and part, row-major [rows, columns]: F32, BF16, F16, or F8_E4M3 with
/// `<name>_scale_inv` F32 or BF16 [ceil(rows/128), ceil(columns/128)], a factor per 128x128 block,
/// which read_stored() gives where all matrices are of F8_E4M3.
/// @throws Error{kBadFile}: a tensor is missing, or has another shape or dtype.
[[nodiscard]] std::unique_ptr<ExpertSource> make_matrix_source(
    std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
    const std::vector<ExpertTensorNames>& names);

/// What GPTQ's qzeros hold.
enum class GptqZeros : std::uint8_t {
  kLessOne,  ///< A zero point less 1 in its four bits, so that 15 is 0 (format "gptq").
  kWhole,    ///< "gptq_v2".
};

/// Weights of four bits in groups of 32, 64 or 128 columns, a set of tensors for each matrix
/// `<module>.weight` [rows, columns]; of four bits in words of I32, low ones first:
///   GPTQ                <module>.qweight [columns/8, rows], qzeros [columns/group, rows/8],
///                       scales [columns/group, rows], g_idx [columns] of groups in order, or none;
///   AWQ ("gemm")        qweight [columns, rows/8], qzeros and scales as above, of 8 rows in a word
///                       0, 2, 4, 6, 1, 3, 5, 7;
///   compressed-tensors  weight_packed [rows, columns/8], weight_scale [rows, columns/group],
///                       weight_zero_point [ceil(rows/8), columns/group], or none (symmetric).
/// Scales are F16 or BF16. All matrices have one form.
/// @throws Error{kBadFile}: a tensor is missing, or has another shape or dtype; groups in another
///         order (act-order); rows quantised by a scale of the checkpoint's (input_scale).
[[nodiscard]] std::unique_ptr<ExpertSource> make_int4_source(
    std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
    const std::vector<ExpertTensorNames>& names, GptqZeros zeros = GptqZeros::kLessOne);

/// NVFP4, a set of tensors for each matrix `<module>.weight` [rows, columns]:
///   ModelOpt            weight U8 [rows, columns/2], weight_scale F8_E4M3 [rows, columns/16],
///                       weight_scale_2 F32 [] or [1], the factor;
///   compressed-tensors  weight_packed and weight_scale the same, weight_global_scale F32 [1], of
///                       which the factor is the inverse, rounded to f32.
/// Rows are computed with as they are: input_scale and input_global_scale are looked at only for
/// being numbers above 0.
/// @throws Error{kBadFile}: a tensor is missing, or has another shape or dtype, or a value that is
///         not a number.
[[nodiscard]] std::unique_ptr<ExpertSource> make_nvfp4_source(
    std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
    const std::vector<ExpertTensorNames>& names);

/// Whichever of the three above the tensors of the first matrix are.
[[nodiscard]] std::unique_ptr<ExpertSource> make_expert_source(
    std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
    const std::vector<ExpertTensorNames>& names, GptqZeros zeros);

/// How a stack of experts' matrices lies.
enum class StackedForm : std::uint8_t {
  kRows,        ///< [E, rows, columns], or [E * rows, columns].
  kTransposed,  ///< [E, columns, rows], or [E * columns, rows].
  kByShape,     ///< Whichever of the two its shape is; gate and up as down says, unless H = I.
};

/// Tensors that hold a part of all experts each, F32, BF16 or F16.
struct StackedNames {
  std::string gate;  ///< Gate and up together, 2I rows, where `up` is empty.
  std::string up{};
  std::string down{};
  StackedForm form = StackedForm::kByShape;  ///< Of gate and up.
  StackedForm down_form = StackedForm::kByShape;
  bool interleaved = false;  ///< Gate and up rows take turns (gate rows even); else gate is first.
  /// Experts without weights of which `gate` and `up` may have rows, behind the others'.
  std::int32_t weightless = 0;
  // Where ExpertConfig::bias is set.
  std::string gate_up_bias{};  ///< [E, 2I], like gate and up; empty: 0, and down_bias is [H].
  std::string down_bias{};     ///< [E, H]; or [H], the same for all experts.
};

/// @throws Error{kBadFile}: a tensor is missing, or has another shape or dtype.
[[nodiscard]] std::unique_ptr<ExpertSource> make_stacked_source(
    std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
    const StackedNames& names);

/// gpt-oss in MXFP4: all experts in one tensor, gate and up rows interleaved (gate rows even), with
/// biases. `prefix` is "model.layers.N.mlp.experts.":
///   gate_up_proj_blocks U8 [E, 2I, H/32, 16], gate_up_proj_scales U8 [E, 2I, H/32],
///   down_proj_blocks    U8 [E, H, I/32, 16],  down_proj_scales    U8 [E, H, I/32],
///   gate_up_proj_bias   [E, 2I],              down_proj_bias      [E, H];
/// two values a byte, the first in the low half. read_stored() gives them as they are, gate row r
/// from stored row 2r and up row r from 2r + 1.
/// @throws Error{kBadFile}.
[[nodiscard]] std::unique_ptr<ExpertSource> make_mxfp4_source(
    std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
    const std::string& prefix);

/// @throws Error{kInvalidArgument}: expert, rows or dtype out of range.
void check_read(const ExpertConfig& config, std::int32_t expert, ExpertPart part,
                std::int64_t first_row, std::int64_t num_rows, DType dtype);

}  // namespace switchyard
