#pragma once

// One layer on several paths of its experts beside each other, and what a grid of them says.

#include <vector>

#include "bench/cases/cases.hpp"

namespace switchyard::bench {

/// The paths take turns on the same tokens, routing and weights; turns are dealt to three repeats,
/// one after the other. Each path's lines have the repeats' medians, the 95% interval (Student's t)
/// of the same at an even pace (each turn over the time of all paths in it), `same_bits` (as the
/// first path), and, where one path is padded, the time over its. Stages are taken in every third
/// turn. One rank.
/// @param paths  The same case but for the layout.
[[nodiscard]] std::vector<CaseResult> run_paths_case(const std::vector<LayerCase>& paths,
                                                     const Machine& machine, const Limits& limits);

/// Bar G11 over the grid: on how many points compact is faster than padded, intervals apart, and on
/// how many padded takes no more than its padding, by rows. Empty: no case has that bar.
[[nodiscard]] std::vector<CaseResult> judge_paths(const std::vector<CaseResult>& results);

}  // namespace switchyard::bench
