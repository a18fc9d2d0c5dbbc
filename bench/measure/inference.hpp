#pragma once

// What a few repeated measurements carry: intervals, probabilities and their adjustment, the
// smallest effect that would have been found. Student 1908; Abramowitz and Stegun 1964, 26.7.

#include <cstdint>
#include <optional>
#include <vector>

namespace switchyard::bench {

struct Interval {
  double low = 0, high = 0;
};

/// Probability that |T| <= t, T by Student's distribution of `freedom` >= 1 degrees, t >= 0. Finite
/// sums for whole degrees (26.7.3, 26.7.4): exact but for rounding.
[[nodiscard]] double student_within(double t, int freedom);

/// The t with P(T <= t) = p, 0.5 <= p < 1. @throws Error{kInvalidArgument}: p, or freedom < 1.
[[nodiscard]] double student_quantile(double p, int freedom);

/// Mean and its 95% interval, mean +- t(0.975, n - 1) s / sqrt n; of one value an interval of no
/// width, which says nothing. @throws Error{kInvalidArgument}: no value.
[[nodiscard]] Interval interval_of(const std::vector<double>& values);

/// The 95% score interval of a share: all p with |k / n - p| <= 1.96 sqrt(p (1 - p) / n), 1.96 the
/// normal's 97.5% quantile. Source: Wilson 1927, "Probable inference, the law of succession, and
/// statistical inference". @throws Error{kInvalidArgument}: k is not in [0, n], or n < 1.
[[nodiscard]] Interval wilson_interval(std::int64_t k, std::int64_t n);

/// Differences of pairs against zero.
struct PairedTest {
  std::int64_t n = 0;
  double mean = 0;
  double deviation = 0;       ///< s_D, over n - 1; 0 for one pair.
  Interval interval{};        ///< interval_of().
  std::optional<double> p{};  ///< Two-sided; nothing for fewer than two pairs.
};
/// @throws Error{kInvalidArgument}: no pair.
[[nodiscard]] PairedTest paired_test(const std::vector<double>& differences);

/// Holm's adjusted probabilities, in the order given: of the i-th smallest of m the largest of
/// min(1, (m - j) p_j), j <= i from 0. Who rejects those below 0.05 makes a false claim at all in
/// at most 5% of studies. Source: Holm 1979, "A simple sequentially rejective multiple test
/// procedure".
[[nodiscard]] std::vector<double> holm(const std::vector<double>& p);

/// Probability that a two-sided paired test at `level` finds a mean difference of `effect` standard
/// deviations with n >= 2 pairs: by the noncentral t distribution, integrated over the estimate of
/// the deviation. Relative error below 1e-8.
[[nodiscard]] double power_of(double effect, int n, double level);

/// The effect, in standard deviations of the difference, that such a test finds with `power`.
[[nodiscard]] double smallest_effect(int n, double level, double power = 0.8);

/// Sums over one block of a text: what was predicted, and by how much two models differ there.
struct BlockDifference {
  double targets = 0, nats = 0;
};

/// What the choice of the text adds: blocks drawn with replacement, as many as there are.
struct Bootstrap {
  double error = 0;     ///< Standard deviation of the difference per target.
  Interval interval{};  ///< Its 2.5% and 97.5% quantiles.
};
/// Numbers drawn by Philox under `seed`: the same at every run.
/// @throws Error{kInvalidArgument}: no block, draws < 40.
[[nodiscard]] Bootstrap bootstrap(const std::vector<BlockDifference>& blocks,
                                  std::uint64_t seed = 1, int draws = 2000);

}  // namespace switchyard::bench
