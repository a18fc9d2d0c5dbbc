#pragma once

// Experts' weights straight from a checkpoint's mapping, whatever their storage.

#include <array>
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

/// gpt-oss: all experts in one tensor, gate and up rows interleaved (gate rows even), with biases.
/// `prefix` is "model.layers.N.mlp.experts.". Either MXFP4:
///   gate_up_proj_blocks U8 [E, 2I, H/32, 16], gate_up_proj_scales U8 [E, 2I, H/32],
///   down_proj_blocks    U8 [E, H, I/32, 16],  down_proj_scales    U8 [E, H, I/32],
/// two values a byte, the first in the low half; or transposed F32, BF16 or F16:
///   gate_up_proj [E, H, 2I], down_proj [E, I, H].
/// Both with gate_up_proj_bias [E, 2I], down_proj_bias [E, H]. read_stored() gives MXFP4 as it is,
/// gate row r from stored row 2r and up row r from 2r + 1; transposed weights as numbers [rows,
/// columns] like read().
/// @throws Error{kBadFile}.
[[nodiscard]] std::unique_ptr<ExpertSource> make_interleaved_source(
    std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
    const std::string& prefix);

/// @throws Error{kInvalidArgument}: expert, rows or dtype out of range.
void check_read(const ExpertConfig& config, std::int32_t expert, ExpertPart part,
                std::int64_t first_row, std::int64_t num_rows, DType dtype);

}  // namespace switchyard
