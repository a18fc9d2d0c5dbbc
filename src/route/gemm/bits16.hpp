#pragma once

#include <optional>
#include <string>

#include "core/gpu/cuda_device.hpp"
#include "switchyard/route.hpp"

namespace switchyard {

/// What the router's kernels on a GPU for 16-bit tokens and gates [rows, H] ask for alike; none:
/// they can take these.
[[nodiscard]] inline std::optional<std::string> reject_unless_16_bit(const RouterGemmArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.tokens.dtype == DType::kF32 || args.gate.dtype != args.tokens.dtype) {
    return "needs tokens and gate of one 16-bit type";
  }
  if (args.tokens.cols % 8 != 0) return "hidden size is not a multiple of 8";
  if (!is_aligned_16(args.tokens.data) || !is_aligned_16(args.gate.data)) {
    return "tokens or gate are not aligned to 16 bytes";
  }
  if (args.execution.batch_invariant) return "not for batch_invariant";
  return std::nullopt;
}

}  // namespace switchyard
