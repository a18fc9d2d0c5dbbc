// Rules by which figures decide on the published findings of the fixed-size exchange.
#include "tool/bench/fixed_size_findings.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bench/exchange/shapes.hpp"

namespace switchyard::tool {
namespace {

using Points = std::vector<FixedSizeFigure>;

/// Beyond what the median of ten runs wavers by.
constexpr double kClear = 1.05;

Points sweep_of(const Points& figures, const std::string& sweep) {
  Points points;
  std::copy_if(figures.begin(), figures.end(), std::back_inserter(points),
               [&](const FixedSizeFigure& f) { return f.sweep == sweep; });
  return points;
}

std::string verdict_of(bool holds) { return holds ? "holds" : "does not hold"; }

/// The gain is the library's time over ours: at the last point clearly less than at the first.
Finding judge_gain(const std::string& claim, const Points& figures) {
  Finding finding{.claim = claim};
  bool holds = true;
  for (const char* sweep : {"batch", "sequence"}) {
    const Points points = sweep_of(figures, sweep);
    if (points.size() < 2 || points.front().peer_us == 0) {
      return {claim, "not tested",
              "the library's all-to-all was not measured beside: mpirun and --peer mpi do"};
    }
    const double first = points.front().peer_us / points.front().us;
    const double last = points.back().peer_us / points.back().us;
    holds = holds && first > kClear * last;
    finding.why += fmt::format("{}{} {:g} to {:g}: the library's time over ours {:.2f} to {:.2f}",
                               finding.why.empty() ? "" : "; ", sweep, points.front().value,
                               points.back().value, first, last);
  }
  finding.verdict = verdict_of(holds);
  return finding;
}

/// Most neighbours rise, and the last point is clearly above the first.
Finding judge_experts(const std::string& claim, const Points& figures) {
  const Points points = sweep_of(figures, "local_experts");
  if (points.size() < 2) return {claim, "not tested", "the sweep has less than two points"};
  std::size_t rises = 0;
  for (std::size_t i = 1; i < points.size(); ++i) rises += points[i].us > points[i - 1].us ? 1 : 0;
  const double ratio = points.back().us / points.front().us;
  return {claim, verdict_of(2 * rises > points.size() - 1 && ratio > kClear),
          fmt::format("{:g} to {:g} experts a rank: time x{:.2f}, M x{:.2f}, {} of {} steps rise",
                      points.front().value, points.back().value, ratio,
                      points.back().rows_per_pair / points.front().rows_per_pair, rises,
                      points.size() - 1)};
}

/// Time rises over the sweep, as M does; "in steps": at least one neighbour costs nothing more
/// while another costs at least twice the mean rise.
Finding judge_steps(const std::string& claim, const Points& figures) {
  const Points points = sweep_of(figures, "top_k");
  if (points.size() < 3) return {claim, "not tested", "the sweep has less than three points"};
  double least = 1e9;
  double most = 0;
  for (std::size_t i = 1; i < points.size(); ++i) {
    const double rise = points[i].us / points[i - 1].us;
    least = std::min(least, rise);
    most = std::max(most, rise);
  }
  const auto steps = static_cast<double>(points.size() - 1);
  const double total = points.back().us / points.front().us;
  const double mean_rise = (total - 1) / steps;
  const bool rises = total > kClear;
  const bool stepped = least <= 1 + 0.25 * mean_rise && most >= 1 + 2 * mean_rise;
  const double per_row = points.back().us / points.back().rows_per_pair /
                         (points.front().us / points.front().rows_per_pair);
  return {claim, verdict_of(rises && stepped),
          fmt::format("top-k {:g} to {:g}: time x{:.2f}, {}, M x{:.2f}, time a row of M x{:.2f}; "
                      "padding {:.1f}% to {:.1f}%",
                      points.front().value, points.back().value, total,
                      !rises    ? "no rise"
                      : stepped ? "in steps"
                                : "smoothly",
                      points.back().rows_per_pair / points.front().rows_per_pair, per_row,
                      100 * points.front().padding, 100 * points.back().padding)};
}

}  // namespace

std::vector<Finding> judge_findings(const std::vector<FixedSizeFigure>& figures) {
  const std::vector<std::string> claims = bench::findings_to_test();
  return {judge_gain(claims.at(0), figures), judge_experts(claims.at(1), figures),
          judge_steps(claims.at(2), figures)};
}

}  // namespace switchyard::tool
