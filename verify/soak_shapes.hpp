#pragma once

// The shapes that exchanges take in turn, and the experts' factors, on every backend.

#include <algorithm>

#include "core/gpu/host_device.hpp"
#include "switchyard/dispatch.hpp"

namespace switchyard::verify {

inline constexpr int kSoakShapes = 24;

/// `hidden_unit`: 1, or 8 for a backend that takes multiples of 8 alone.
inline ExpertParallelConfig soak_shape(int index, std::int64_t hidden_unit) {
  constexpr std::int32_t kExperts[] = {1, 2, 5, 8, 16, 64};
  constexpr std::int32_t kTopK[] = {1, 2, 3, 8};
  constexpr std::int64_t kHidden[] = {8, 33, 64, 257};
  constexpr std::int64_t kTokens[] = {1, 3, 16, 40};
  constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  const std::int32_t experts = kExperts[index % 6];
  const std::int64_t hidden = kHidden[(index + index / 6) % 4];
  return {.num_experts = experts,
          .top_k = std::min(experts, kTopK[index / 6]),
          .hidden = (hidden + hidden_unit - 1) / hidden_unit * hidden_unit,
          .max_tokens = kTokens[(index + index / 4) % 4],
          .dtype = kTypes[index % 3],
          .combine_wire = kTypes[(index + index / 3) % 3]};
}

SWITCHYARD_HOST_DEVICE constexpr float factor_of(std::int32_t expert) {
  return static_cast<float>(1 + expert % 3);
}

}  // namespace switchyard::verify
