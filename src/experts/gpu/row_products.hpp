#pragma once

// What the implementations of experts as two grouped products, which write rows, have in common.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "core/check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "switchyard/experts.hpp"

namespace switchyard {

/// What the products of bf16 rows out of stored codes ask for alike, on Hopper.
inline std::optional<std::string> reject_rows_of_codes(const ExpertsArgs& args) {
  if (args.weights->num_local() > 1024) return "more than 1024 experts on one GPU";
  if (args.rows.cols == 0) return "writes rows, it does not combine them";
  if (args.rows.dtype != DType::kBF16) return "rows must be bf16";
  if (args.preactivation.data != nullptr) return "keeps no pre-activation";
  if (!is_aligned_16(args.x.data) || !is_aligned_16(args.rows.data) ||
      !is_aligned_16(args.execution.workspace)) {
    return "x, rows or the workspace are not aligned to 16 bytes";
  }
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) return "needs sm_90";
  return std::nullopt;
}

/// @param needed  Bytes of workspace.
/// @throws Error{kInvalidArgument}: that, or row_token, is smaller than the rows ask for.
inline void require_room(const ExpertsArgs& args, std::int64_t needed) {
  const std::int64_t max_rows = args.rows.rows;
  require(args.execution.workspace != nullptr && args.execution.workspace_bytes >= needed,
          "the experts' workspace has {} bytes, {} rows need {}", args.execution.workspace_bytes,
          max_rows, needed);
  require(args.x_is_packed || args.plan.row_token.shape[0] >= max_rows,
          "row_token has {} entries, want one for each of {} rows", args.plan.row_token.shape[0],
          max_rows);
}

/// Bytes and operations at most: the counts themselves are on the device.
/// @param matrices  [H, I] that a row meets.
/// @param weight_bytes  Of those of one expert.
/// @param row_bytes  That a row is, before and behind.
inline StageWork work_of_rows(const ExpertsArgs& args, double matrices, double weight_bytes,
                              double row_bytes) {
  const ExpertConfig& config = args.weights->config();
  const auto rows = static_cast<double>(args.rows.rows);
  const double flops_per_row = 2 * matrices * static_cast<double>(config.hidden * config.inner);
  const double experts = std::min<double>(args.weights->num_local(), rows);
  return {.bytes = experts * weight_bytes + rows * row_bytes,
          .flops = flops_per_row * rows,
          .flops_executed = flops_per_row * rows,
          .most_rows = args.rows.rows,
          .bytes_per_row = row_bytes,
          .flops_per_row = flops_per_row};
}

}  // namespace switchyard
