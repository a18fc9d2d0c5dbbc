#pragma once

#include <cstdint>
#include <vector>

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

}  // namespace switchyard
