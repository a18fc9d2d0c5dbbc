// How many rows of each expert a case will have.
#include "bench/sweep/case_rows.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <numeric>
#include <string>
#include <vector>

#include "switchyard/plan.hpp"

namespace switchyard::bench {
namespace {

double number_after_colon(const std::string& word) {
  const std::size_t at = word.find_first_of(":=");
  double value = 1;
  if (at != std::string::npos) {
    const std::size_t begin = word.find_last_of(":=") + 1;
    std::from_chars(word.data() + begin, word.data() + word.size(), value);
  }
  return value;
}

/// Tokens of each expert, as loads are asked for; a learned router of made-up weights is even.
std::vector<double> expected_counts(const LayerCase& c) {
  const std::string& load = c.router.empty() ? c.skew : c.router;
  const auto experts = static_cast<std::size_t>(c.config.router.num_experts);
  const auto tokens = static_cast<double>(c.num_tokens);
  const double all =
      tokens * std::min<double>(c.config.router.top_k(), c.config.router.num_experts);
  std::vector<double> share(experts, 1.0);
  if (load.starts_with("zipf")) {
    const double exponent = number_after_colon(load);
    for (std::size_t e = 0; e < experts; ++e) {
      share[e] = std::pow(static_cast<double>(e + 1), -exponent);
    }
  } else if (load.starts_with("hot")) {
    const double hot =
        c.router.empty() ? number_after_colon(load) * tokens / all : number_after_colon(load);
    share.assign(experts, (1 - hot) / std::max(1.0, static_cast<double>(experts) - 1));
    share[0] = hot;
  }
  // No expert has a token twice: what is too much goes to the others.
  std::vector<double> counts(experts);
  double left = all;
  for (int round = 0; round < 8 && left > 1e-6 * all; ++round) {
    double open = 0;
    for (std::size_t e = 0; e < experts; ++e) open += counts[e] < tokens ? share[e] : 0;
    if (open <= 0) break;
    const double each = left / open;
    for (std::size_t e = 0; e < experts; ++e) {
      const double more = counts[e] < tokens ? std::min(each * share[e], tokens - counts[e]) : 0;
      counts[e] += more;
      left -= more;
    }
  }
  return counts;
}

/// The largest of so many counts above their mean, in standard deviations: of normal numbers, by
/// the limit of their extreme (David and Nagaraja, Order Statistics, 10.5).
double largest_of(double counts) {
  if (counts < 3) return counts < 2 ? 0 : 0.564;
  const double a = std::sqrt(2 * std::log(counts));
  return a - (std::log(std::log(counts)) + std::log(4 * std::numbers::pi)) / (2 * a) +
         std::numbers::egamma / a;
}

}  // namespace

CaseRows rows_of(const LayerCase& c) {
  std::vector<double> counts = expected_counts(c);
  counts.resize(static_cast<std::size_t>(c.config.router.num_computing()));  // others have no rows
  const auto tokens = static_cast<double>(c.num_tokens);
  double most = 0;
  const double above = largest_of(static_cast<double>(counts.size()));
  CaseRows rows;
  for (double& n : counts) {
    rows.hit += 1 - std::pow(1 - std::min(1.0, n / std::max(1.0, tokens)), tokens);
    most = std::max(most, n + above * std::sqrt(n));
  }
  if (c.options.capacity_factor) {
    const auto slots = static_cast<double>(
        capacity_for(c.config.router, *c.options.capacity_factor, c.num_tokens).computing);
    for (double& n : counts) n = std::min(n, slots);
    most = std::min(most, slots);
  }
  rows.used = std::accumulate(counts.begin(), counts.end(), 0.0);
  rows.executed = rows.used;
  const auto experts = static_cast<double>(counts.size());
  if (c.options.layout.kind == LayoutKind::kPadded) rows.executed = most * experts;
  if (c.options.layout.kind == LayoutKind::kAligned) {
    rows.executed += experts * c.options.layout.alignment / 2;
  }
  return rows;
}

}  // namespace switchyard::bench
