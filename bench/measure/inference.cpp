#include "bench/measure/inference.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "core/check.hpp"
#include "core/philox.hpp"

namespace switchyard::bench {
namespace {

double normal_below(double z) { return 0.5 * std::erfc(-z / std::numbers::sqrt2); }

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double deviation_of(const std::vector<double>& values, double mean) {
  if (values.size() < 2) return 0;
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

/// Where a function that rises from below `wanted` reaches it.
template <typename Function>
double place_of(const Function& function, double wanted) {
  double high = 1;
  while (function(high) < wanted && high < 1e15) high *= 2;
  double low = 0;
  for (int step = 0; step < 200 && low < high; ++step) {
    const double middle = (low + high) / 2;
    if (middle == low || middle == high) break;
    (function(middle) < wanted ? low : high) = middle;
  }
  return (low + high) / 2;
}

/// Words of one Philox stream, one after another.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : key_{low_word(seed), high_word(seed)} {}

  /// Below `size`; a product instead of a remainder, so that no index is favoured by more than
  /// size / 2^32.
  std::size_t below(std::size_t size) {
    if (next_ == 4) {
      words_ = philox4x32({{low_word(count_), high_word(count_), 0, 0}}, key_);
      ++count_;
      next_ = 0;
    }
    return static_cast<std::size_t>((std::uint64_t{words_.word[next_++]} * size) >> 32);
  }

 private:
  PhiloxKey key_;
  PhiloxWords words_{};
  std::uint64_t count_ = 0;
  int next_ = 4;
};

double quantile_of(const std::vector<double>& sorted, double share) {
  const double place = share * static_cast<double>(sorted.size() - 1);
  const auto at = static_cast<std::size_t>(place);
  const std::size_t next = std::min(at + 1, sorted.size() - 1);
  return sorted[at] + (place - std::floor(place)) * (sorted[next] - sorted[at]);
}

}  // namespace

double student_within(double t, int freedom) {
  require(freedom >= 1 && t >= 0, "Student's distribution of {} degrees at {}", freedom, t);
  const double root = t / std::sqrt(static_cast<double>(freedom));
  const double angle = std::atan(root);
  const double cosine = 1 / std::hypot(1.0, root);
  const double sine = root * cosine;
  const bool odd = freedom % 2 == 1;
  if (freedom == 1) return 2 * angle / std::numbers::pi;
  // Odd: cos + 2/3 cos^3 + ..., to cos^(freedom - 2); even: 1 + 1/2 cos^2 + 3/8 cos^4 + ...
  double term = odd ? cosine : 1;
  double sum = term;
  for (int power = odd ? 3 : 2; power <= freedom - 2; power += 2) {
    term *= cosine * cosine * static_cast<double>(power - 1) / static_cast<double>(power);
    sum += term;
  }
  return odd ? 2 / std::numbers::pi * (angle + sine * sum) : sine * sum;
}

double student_quantile(double p, int freedom) {
  require(p >= 0.5 && p < 1 && freedom >= 1, "Student's quantile {} of {} degrees", p, freedom);
  return place_of([&](double t) { return student_within(t, freedom); }, 2 * p - 1);
}

Interval interval_of(const std::vector<double>& values) { return paired_test(values).interval; }

Interval wilson_interval(std::int64_t k, std::int64_t n) {
  require(n >= 1 && k >= 0 && k <= n, "the interval of a share of {} in {}", k, n);
  constexpr double kQuantile = 1.959963984540054;
  const auto size = static_cast<double>(n);
  const double share = static_cast<double>(k) / size;
  const double squared = kQuantile * kQuantile;
  const double middle = (share + squared / (2 * size)) / (1 + squared / size);
  const double half = kQuantile / (1 + squared / size) *
                      std::sqrt(share * (1 - share) / size + squared / (4 * size * size));
  return {.low = k == 0 ? 0 : middle - half, .high = k == n ? 1 : middle + half};
}

PairedTest paired_test(const std::vector<double>& differences) {
  require(!differences.empty(), "an interval of no value");
  PairedTest test;
  test.n = std::ssize(differences);
  test.mean = mean_of(differences);
  test.interval = {test.mean, test.mean};
  if (test.n < 2) return test;
  const auto freedom = static_cast<int>(test.n - 1);
  test.deviation = deviation_of(differences, test.mean);
  const double error = test.deviation / std::sqrt(static_cast<double>(test.n));
  const double half = student_quantile(0.975, freedom) * error;
  test.interval = {test.mean - half, test.mean + half};
  if (error > 0) {
    test.p = 1 - student_within(std::abs(test.mean) / error, freedom);
  } else {
    test.p = test.mean == 0 ? 1 : 0;
  }
  return test;
}

std::vector<double> holm(const std::vector<double>& p) {
  std::vector<std::size_t> order(p.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return p[a] < p[b]; });
  std::vector<double> adjusted(p.size());
  double largest = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto left = static_cast<double>(order.size() - i);
    largest = std::max(largest, std::min(1.0, left * p[order[i]]));
    adjusted[order[i]] = largest;
  }
  return adjusted;
}

double power_of(double effect, int n, double level) {
  require(n >= 2 && level > 0 && level < 1, "the power of {} pairs at level {}", n, level);
  const int freedom = n - 1;
  const auto nu = static_cast<double>(freedom);
  const double shift = effect * std::sqrt(static_cast<double>(n));
  const double critical = student_quantile(1 - level / 2, freedom);
  // u = s / sigma has the density 2 (nu/2)^(nu/2) / Gamma(nu/2) u^(nu-1) e^(-nu u^2 / 2).
  const double scale = std::log(2.0) + nu / 2 * std::log(nu / 2) - std::lgamma(nu / 2);
  const auto term = [&](double u) {
    const double power_term = freedom == 1 ? 0 : (nu - 1) * std::log(u);
    if (u == 0 && freedom > 1) return 0.0;
    const double density = std::exp(scale + power_term - nu * u * u / 2);
    return density * (normal_below(shift - critical * u) + normal_below(-shift - critical * u));
  };
  constexpr int kPieces = 20000;  // Simpson
  const double end = 1 + 9 / std::sqrt(nu);
  const double step = end / kPieces;
  double sum = term(0) + term(end);
  for (int i = 1; i < kPieces; ++i) sum += (i % 2 == 1 ? 4 : 2) * term(step * i);
  return sum * step / 3;
}

double smallest_effect(int n, double level, double power) {
  return place_of([&](double effect) { return power_of(effect, n, level); }, power);
}

Bootstrap bootstrap(const std::vector<BlockDifference>& blocks, std::uint64_t seed, int draws) {
  require(!blocks.empty() && draws >= 40, "a bootstrap of {} blocks by {} draws", blocks.size(),
          draws);
  Draws stream(seed);
  std::vector<double> means;
  for (int draw = 0; draw < draws; ++draw) {
    double nats = 0;
    double targets = 0;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const BlockDifference& block = blocks[stream.below(blocks.size())];
      nats += block.nats;
      targets += block.targets;
    }
    means.push_back(nats / targets);
  }
  std::sort(means.begin(), means.end());
  return {.error = deviation_of(means, mean_of(means)),
          .interval = {quantile_of(means, 0.025), quantile_of(means, 0.975)}};
}

}  // namespace switchyard::bench
