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

/// Chances of K different experts drawn by their weights one after the other: those that an
/// exponential clock of each has rung of when K have (nearly: that time is not always the same).
std::vector<double> drawn_without_return(const std::vector<double>& weights, double top_k) {
  const auto chances = [&](double time) {
    std::vector<double> out;
    out.reserve(weights.size());
    for (const double weight : weights) out.push_back(-std::expm1(-weight * time));
    return out;
  };
  double low = 0;
  double high = 1;
  const auto sum = [&](double time) {
    const std::vector<double> all = chances(time);
    return std::accumulate(all.begin(), all.end(), 0.0);
  };
  while (sum(high) < top_k && high < 1e12) high *= 2;
  for (int step = 0; step < 60; ++step) {
    const double middle = 0.5 * (low + high);
    (sum(middle) < top_k ? low : high) = middle;
  }
  return chances(high);
}

/// Tokens of each expert, as loads are asked for; a learned router of made-up weights is even.
std::vector<double> expected_counts(const LayerCase& c) {
  const std::string& load = c.router.empty() ? c.skew : c.router;
  const auto experts = static_cast<double>(c.config.router.num_experts);
  const auto tokens = static_cast<double>(c.num_tokens);
  const double top_k = std::min<double>(c.config.router.top_k(), experts);
  std::vector<double> counts(static_cast<std::size_t>(c.config.router.num_experts),
                             tokens * top_k / experts);
  if (load.starts_with("zipf")) {
    const double exponent = number_after_colon(load);
    double rank = 1;
    for (double& weight : counts) weight = std::pow(rank++, -exponent);
    counts = drawn_without_return(counts, top_k);
    for (double& chance : counts) chance *= tokens;
  } else if (load.starts_with("hot") && experts > 1) {
    const double hot = number_after_colon(load) * (c.router.empty() ? tokens : tokens * top_k);
    const double most = std::min(hot, tokens);
    std::fill(counts.begin(), counts.end(), (tokens * top_k - most) / (experts - 1));
    counts[0] = most;
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
  CaseRows rows;
  for (double& n : counts) {
    rows.hit += 1 - std::pow(1 - std::min(1.0, n / std::max(1.0, tokens)), tokens);
    most = std::max(most, n);
  }
  const auto near =
      std::ranges::count_if(counts, [&](double n) { return n > most - 3 * std::sqrt(most); });
  most += largest_of(static_cast<double>(near)) * std::sqrt(most);
  if (c.options.capacity_factor) {
    const auto slots = static_cast<double>(
        capacity_for(c.config.router, *c.options.capacity_factor, c.num_tokens).computing);
    for (double& n : counts) n = std::min(n, slots);
    most = slots;  // of every expert, used or not
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
