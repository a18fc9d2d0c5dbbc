#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "switchyard/execution.hpp"
#include "verify/problem.hpp"

namespace switchyard::verify {

/// Who does what, after capacity.
struct KeptRouting {
  std::vector<std::int32_t> expert{};  ///< [T, K].
  std::vector<float> weight{};         ///< [T, K].
  std::vector<std::uint8_t> kept{};    ///< [T, K].
};

/// route and apply_capacity; leaves what they decided in `routing` (or what was given).
[[nodiscard]] std::string check_routing_stages(const Problem& problem, const Execution& execution,
                                               KeptRouting& routing);

/// plan, pack, combine and finish of that routing.
[[nodiscard]] std::string check_row_stages(const Problem& problem, const Execution& execution,
                                           const KeptRouting& routing);

}  // namespace switchyard::verify
