#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "reference/bounded.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/router.hpp"

namespace switchyard::reference {

/// ceil(factor * T * K / E - 1e-9), and at least 1 where there are tokens.
std::int64_t capacity(double factor, std::int64_t num_tokens, std::int64_t top_k,
                      std::int64_t num_experts);

/// Slots of an expert: of one that computes, or of a zero-computation expert, 0: any number.
std::int64_t capacity(const RouterConfig& config, double factor, std::int64_t num_tokens,
                      bool computes);

/// Who wants which expert: the assignments of one source rank.
struct Wanted {
  std::span<const std::int32_t> expert{};  ///< [T, K], -1 where unused.
  std::span<const float> weight{};         ///< [T, K].
  std::span<const Bounded> top_score{};    ///< [T], for DropPolicy::kBpr; empty: largest weight.
  std::int64_t top_k = 0;                  ///< K.
  std::int64_t capacity = 0;               ///< Slots of each expert; 0: no limit.
  /// Experts from here on have other slots; 0: no limit.
  std::int32_t first_zero_computation = std::numeric_limits<std::int32_t>::max();
  std::int64_t zero_computation_capacity = 0;
  DropPolicy policy = DropPolicy::kToken;

  [[nodiscard]] std::int64_t slots(std::int32_t e) const {
    return e < first_zero_computation ? capacity : zero_computation_capacity;
  }
};

/// [T, K] 1 where an assignment is kept: fewer than `capacity` assignments to the same expert come
/// before it in the order of the policy. Scores count by their value.
std::vector<std::uint8_t> kept_mask(const Wanted& wanted);

/// Empty if `kept` may be the decision of an fp32 implementation: each expert keeps as many as it
/// can, and none that comes after a dropped one for certain. Else what is wrong.
std::string check_kept(const Wanted& wanted, std::span<const std::uint8_t> kept);

}  // namespace switchyard::reference
