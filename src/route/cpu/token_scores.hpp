#pragma once

// What auxiliary losses ask of one token on a CPU.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "route/cpu/rule.hpp"
#include "switchyard/routing/losses.hpp"

namespace switchyard {

/// The scores of one token over all experts, in float, with sums in double.
class TokenScores {
 public:
  TokenScores(std::int32_t num_experts, Score score)
      : sigmoids_(score == Score::kSigmoid), shares_(static_cast<std::size_t>(num_experts)) {}

  void read(const float* logits) {
    logits_ = logits;
    largest_ = *std::max_element(logits, logits + shares_.size());
    double exponentials = 0;
    for (std::size_t e = 0; e < shares_.size(); ++e) {
      shares_[e] = exp_below(logits[e], largest_);
      exponentials += double{shares_[e]};
    }
    sum_ = exponentials;
    // Where all sigmoids underflow they are exponentials, as for the weights.
    if (sigmoids_ && sigmoid(largest_) >= std::numeric_limits<float>::min()) {
      sum_ = 0;
      for (std::size_t e = 0; e < shares_.size(); ++e) {
        shares_[e] = sigmoid(logits[e]);
        sum_ += double{shares_[e]};
      }
    }
    log_sum_ = double{largest_} + std::log(exponentials);
    exponentials_ = exponentials;
  }

  [[nodiscard]] double log_sum_exp() const { return log_sum_; }
  /// p.
  [[nodiscard]] double share(std::size_t e) const { return double{shares_[e]} / sum_; }
  /// -ln p, for p > 0.
  [[nodiscard]] static double surprise(double share) { return -std::log(share); }
  [[nodiscard]] double entropy() const {
    double sum = 0;
    for (std::size_t e = 0; e < shares_.size(); ++e) {
      const double p = share(e);
      if (p > 0) sum += p * surprise(p);
    }
    return sum;
  }

  /// Adds the gradient of the losses with these prices. @param score_price  [E] of the token's
  /// group.
  void add_gradient(const float* score_price, const LossPrices& prices, float* dlogits) const {
    const auto price = [&](std::size_t e, double p) {
      const double of_entropy = prices.entropy != 0 && p > 0 ? surprise(p) : 0;
      return double{score_price[e]} + double{prices.entropy} * of_entropy;
    };
    double mean = 0;
    for (std::size_t e = 0; e < shares_.size(); ++e) {
      const double p = share(e);
      mean += p * price(e, p);
    }
    const double of_z = 2 * double{prices.z} * log_sum_;
    for (std::size_t e = 0; e < shares_.size(); ++e) {
      const double p = share(e);
      const double slope = sigmoids_ ? 1.0 - double{sigmoid(logits_[e])} : 1.0;
      const double softmax =
          sigmoids_ ? double{exp_below(logits_[e], largest_)} / exponentials_ : p;
      dlogits[e] += static_cast<float>(p * slope * (price(e, p) - mean) + of_z * softmax);
    }
  }

 private:
  bool sigmoids_;
  const float* logits_ = nullptr;
  float largest_ = 0;
  double sum_ = 0;
  double exponentials_ = 0;
  double log_sum_ = 0;
  std::vector<float> shares_;  ///< Before they are divided by their sum.
};

}  // namespace switchyard
