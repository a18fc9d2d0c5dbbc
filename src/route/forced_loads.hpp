#pragma once

#include <cstdint>
#include <vector>

#include "route/placed_rules.hpp"
#include "switchyard/route.hpp"

namespace switchyard {

/// What share of the assignments each expert is to have, not normalised; of loads with shares.
[[nodiscard]] std::vector<double> forced_shares(const ForcedRouter& router,
                                                std::int32_t num_experts,
                                                const RouteRequest& request);

/// T * K assignments over the experts: the whole numbers nearest to the shares by largest
/// remainders, ties to the lower id. No expert has more than T: what it would have goes to the
/// others by their shares, or evenly where these are zero.
[[nodiscard]] std::vector<std::int64_t> apportion(const std::vector<double>& shares,
                                                  std::int64_t num_tokens, std::int32_t top_k);

/// Which token has which of these assignments, of loads with shares.
struct Deal {
  DealtPlaces places;
  std::vector<std::int64_t> last;  ///< [E] places up to and with each expert's.
};
/// @param num_tokens  At least 1.
[[nodiscard]] Deal deal_out(const ForcedRouter& router, std::int32_t num_experts,
                            const RouteRequest& request, std::int64_t num_tokens);

}  // namespace switchyard
