#pragma once

#include "bench/cases/cases.hpp"

namespace switchyard::bench {

/// Draws of a capacity case that was not told how many: as many as the published rows have.
inline constexpr int kCapacityDraws = 200;

/// What expert capacity drops of uniform routings, beside what it should: so many routings as
/// c.count says (kCapacityDraws where it has a budget) are drawn by the router "uniform", and
/// apply_capacity() on the backend (stage "plan") says what is kept of each. Holds where their mean
/// is within three standard errors of uniform_drops(). c.options.capacity_factor is given.
[[nodiscard]] CaseResult run_capacity_case(const LayerCase& c, const Limits& limits);

}  // namespace switchyard::bench
