#pragma once

#include <string>
#include <vector>

namespace switchyard::tool {

/// What one point of a sweep of the fixed-size exchange has given.
struct FixedSizeFigure {
  std::string sweep{};
  double value = 0;
  double rows_per_pair = 0;  ///< M.
  double padding = 0;        ///< Share of zero rows.
  double us = 0;             ///< Median: a mean of ten wavers.
  double peer_us = 0;        ///< Median of the library's all-to-all; 0: not measured.
};

/// A published finding, and whether the figures bear it out.
struct Finding {
  std::string claim{};
  std::string verdict{};  ///< "holds", "does not hold", "not tested".
  std::string why{};      ///< With the figures that decide.
};

/// The three findings of data/all2all.json, in its order.
[[nodiscard]] std::vector<Finding> judge_findings(const std::vector<FixedSizeFigure>& figures);

}  // namespace switchyard::tool
