#include "bench/exchange/bars.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace switchyard::bench {
namespace {

/// Microseconds measured and allowed.
struct Point {
  double us = 0, allowed_us = 0;
};

CaseResult verdict(const CaseResult& like, const std::vector<Point>& points, const char* bar,
                   const std::string& name, const std::string& said, double value, double target,
                   bool holds) {
  CaseResult out;
  out.what = {.name = name,
              .num_ranks = like.what.num_ranks,
              .num_threads = like.what.num_threads,
              .compute = like.what.compute,
              .layout = like.what.layout,
              .engine = like.what.engine,
              .wire = like.what.wire,
              .experts = like.what.experts};
  out.limits = like.limits;
  out.backend = like.backend;
  StageFigures all{.stage = "all", .samples = points.size()};
  for (const Point& point : points) all.us.median += point.us;
  all.us.mean = all.us.p95 = all.us.median;
  out.stages = {all};
  out.verdict = fmt::format("{} {}: {} ({} of 8 GPUs)", bar, name, said, like.what.num_ranks);
  out.more = {{"bar", bar}, {"value", value}, {"target", target}, {"holds", holds}};
  return out;
}

/// How many of the points keep within what they are allowed.
CaseResult judge_each(const CaseResult& like, const std::vector<Point>& points, const char* bar,
                      const std::string& name) {
  double worst = 0;
  for (const Point& point : points) worst = std::max(worst, point.us / point.allowed_us);
  const auto held = std::ranges::count_if(
      points, [](const Point& point) { return point.us <= point.allowed_us; });
  const auto share = static_cast<double>(held) / static_cast<double>(points.size());
  return verdict(like, points, bar, name,
                 fmt::format("{} of {} points, the worst takes {:.2f} of what is allowed", held,
                             points.size(), worst),
                 share, 1, share >= 1);
}

/// The stage that is the whole of a case.
const StageFigures* whole_of(const CaseResult& result) {
  const auto found = std::ranges::find(result.stages, result.whole, &StageFigures::stage);
  return found == result.stages.end() ? nullptr : &*found;
}

}  // namespace

std::vector<CaseResult> judge_round_trips(const std::vector<CaseResult>& results) {
  std::vector<Point> points;
  const CaseResult* like = nullptr;
  double sum = 0;
  for (const CaseResult& result : results) {
    const bool counts = result.backend == "cuda" && result.more.value("variant", "") == "native" &&
                        result.more.value("every_token", false) &&
                        result.more.value("published", "").starts_with("benchmark");
    const StageFigures* trip = whole_of(result);
    if (!counts || trip == nullptr || trip->us.median <= 0) continue;
    like = &result;
    points.push_back({.us = trip->us.median, .allowed_us = trip->limit_us + 18});
    sum += std::log(trip->us.median);
  }
  if (like == nullptr) return {};
  constexpr double kMean = 40;
  const double mean = std::exp(sum / static_cast<double>(points.size()));
  return {
      judge_each(*like, points, "R5", "round trips within the wire's time + 18 us"),
      verdict(*like, points, "R5", "geometric mean of the round trips",
              fmt::format("{:.1f} us, wanted {:.0f}", mean, kMean), mean, kMean, mean <= kMean)};
}

std::vector<CaseResult> judge_fixed_size(const std::vector<CaseResult>& results) {
  std::vector<Point> points;
  std::vector<Point> beside;  // allowed: the peer's time
  const CaseResult* like = nullptr;
  for (const CaseResult& result : results) {
    const StageFigures* exchange = whole_of(result);
    const bool counts = result.backend == "cuda" && result.more.contains("sweep");
    if (!counts || exchange == nullptr || exchange->us.median <= 0) continue;
    like = &result;
    const double us = exchange->us.median;
    points.push_back({.us = us, .allowed_us = 1.06 * exchange->limit_us + 12});
    const auto nccl = result.peers.find("nccl");
    if (nccl != result.peers.end()) beside.push_back({.us = us, .allowed_us = nccl->second});
  }
  if (like == nullptr) return {};
  std::vector<CaseResult> bars = {
      judge_each(*like, points, "R6", "exchanges within 1.06 times the wire's time + 12 us")};
  if (!beside.empty()) bars.push_back(judge_each(*like, beside, "R6", "exchanges beside NCCL's"));
  return bars;
}

}  // namespace switchyard::bench
