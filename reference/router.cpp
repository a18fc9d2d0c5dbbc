#include "reference/router.hpp"

// Routing by its definitions, in double, each number with the error that an fp32 evaluation may
// have.

#include <algorithm>
#include <numeric>

namespace switchyard::reference {
namespace {

// A library's exp, division and the like in fp32: a few units in the last place.
constexpr double kFunctionUnits = 8 * kUnit;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// exp(l_i - max) / sum over `members`. The error of a logit moves the exponent by itself, that of
/// the maximum and of the subtraction as well (numerator and each term of the sum alike): a factor
/// of exp(+-d). The sum of n terms adds gamma_n, exp and division a few units each.
std::vector<Bounded> softmax(std::span<const Bounded> logits,
                             std::span<const std::int32_t> members) {
  double max = -HUGE_VAL;
  for (const std::int32_t e : members) max = std::max(max, logits[at(e)].value);
  double sum = 0;
  double worst_in_sum = 0;  // The largest error of an exponent, where it counts in the sum.
  for (const std::int32_t e : members) {
    const double distance = max - logits[at(e)].value;
    const double term = std::exp(-distance);
    sum += term;
    if (distance < 90) {
      worst_in_sum = std::max(worst_in_sum, logits[at(e)].error + kUnit * distance);
    }
  }
  std::vector<Bounded> result;
  for (const std::int32_t e : members) {
    const double distance = max - logits[at(e)].value;
    const double value = std::exp(-distance) / sum;
    const double exponent = logits[at(e)].error + kUnit * distance + worst_in_sum;
    const double relative = std::expm1(exponent) +
                            gamma(static_cast<std::int64_t>(members.size())) + 2 * kFunctionUnits;
    // However far the logits may be off, it is a share of 1.
    result.push_back(
        {value, std::isfinite(relative) ? std::min(value * relative + kFlush, 1.0) : 1.0});
  }
  return result;
}

/// exp(x - m) of a logit x beside a choice's logit m >= x where it is near, (m - x) / max(|x|, m)
/// <= kMixerMargin, else 0; and between what it may lie.
struct NearPower {
  double value = 0;
  double least = 0;
  double most = 0;
};

NearPower near_power(Bounded m, Bounded x) {
  constexpr double kMargin = kMixerMargin;
  constexpr double kSlack = 8 * kUnit;  // of the difference, the quotient and the largest
  const double distance = std::max(m.value - x.value, 0.0);
  const double slack = m.error + x.error + kUnit * distance;
  const double far = std::max(m.high() - x.low(), 0.0);
  const double near = std::max(m.low() - x.high(), 0.0);
  const double size = std::max(std::abs(x.value), m.value);  // moves by no more than the logits
  const double error = std::max(x.error, m.error);
  NearPower power;
  if (far <= kMargin * (size - error) * (1 - kSlack)) power.least = std::exp(-(distance + slack));
  if (!(near > kMargin * (size + error) * (1 + kSlack))) {
    power.most = std::exp(-std::max(distance - slack, 0.0));
  }
  if (!(distance > kMargin * size)) power.value = std::exp(-distance);
  return power;
}

/// The choice with logit m of `candidates`, all that no larger choice took: 1 / sum of exp(x - m)
/// over those near it. Who may or may not be among them counts in the larger sum only.
Bounded mixed(std::span<const Bounded> logits, std::span<const std::int32_t> candidates,
              std::int32_t chosen) {
  double sum = 1;  // the chosen one itself
  double least = 1;
  double most = 1;
  for (const std::int32_t e : candidates) {
    if (e == chosen) continue;
    const NearPower power = near_power(logits[at(chosen)], logits[at(e)]);
    sum += power.value;
    least += power.least;
    most += power.most;
  }
  const double value = 1 / sum;
  const double move = std::max(1 / least - value, value - 1 / most);
  const double relative = gamma(std::ssize(candidates)) + 2 * kFunctionUnits;
  // However far the logits may be off, it is a share of 1.
  if (!std::isfinite(value + move)) return {0.5, 0.5 + kFunctionUnits};
  return {value, move + (value + move) * relative + kFlush};
}

double sigmoid_of(double x) { return 1.0 / (1.0 + std::exp(-x)); }

Bounded sigmoid(Bounded logit) {
  const double value = sigmoid_of(logit.value);
  const double move = std::max(sigmoid_of(logit.high()) - value, value - sigmoid_of(logit.low()));
  // Far below zero the rounding of the exponent's argument shows as a relative error.
  const double relative = kFunctionUnits + kUnit * std::abs(logit.value);
  return {value, move + value * relative + kFlush};
}

}  // namespace

std::vector<Bounded> router_logits(std::span<const double> tokens, std::int64_t hidden,
                                   std::int32_t num_experts, const RouterWeights& weights) {
  std::vector<Bounded> logits;
  const std::size_t num_tokens = tokens.size() / at(hidden);
  for (std::size_t t = 0; t < num_tokens; ++t) {
    for (std::int32_t e = 0; e < num_experts; ++e) {
      double sum = weights.bias.empty() ? 0.0 : double{weights.bias[at(e)]};
      const double start = std::abs(sum);
      double magnitude = start;
      for (std::int64_t h = 0; h < hidden; ++h) {
        const double product =
            tokens[t * at(hidden) + at(h)] * double{weights.gate[at(e * hidden + h)]};
        sum += product;
        magnitude += std::abs(product);
      }
      // H products, H - 1 sums and the bias, in any order; exact where every product is zero.
      const double error = gamma(hidden + 1) * magnitude + kFlush * static_cast<double>(hidden);
      logits.push_back({sum, magnitude == start ? 0.0 : error});
    }
  }
  return logits;
}

TokenScores token_scores(const RouterConfig& config, std::span<const Bounded> logits,
                         std::span<const float> selection_bias) {
  const TopKRouter& router = config.as_top_k();
  TokenScores scores;
  if (router.score == Score::kSigmoid) {
    for (const Bounded logit : logits) scores.unbiased.push_back(sigmoid(logit));
  } else {
    std::vector<std::int32_t> all(at(config.num_experts));
    std::iota(all.begin(), all.end(), 0);
    scores.unbiased = softmax(logits, all);
  }
  scores.selection = router.score == Score::kTopkSoftmax || router.score == Score::kSparseMixer
                         ? std::vector<Bounded>(logits.begin(), logits.end())
                         : scores.unbiased;
  for (std::size_t e = 0; e < selection_bias.size(); ++e) {
    scores.selection[e] = add(scores.selection[e], {double{selection_bias[e]}, 0});
  }
  return scores;
}

std::vector<Bounded> group_scores(const RouterConfig& config, std::span<const Bounded> selection) {
  const TopKRouter& router = config.as_top_k();
  const std::int32_t size = config.num_experts / router.groups;
  std::vector<Bounded> result;
  for (std::int32_t g = 0; g < router.groups; ++g) {
    std::vector<double> low;
    std::vector<double> high;
    for (std::int32_t e = g * size; e < (g + 1) * size; ++e) {
      low.push_back(selection[at(e)].low());
      high.push_back(selection[at(e)].high());
    }
    std::sort(low.rbegin(), low.rend());
    std::sort(high.rbegin(), high.rend());
    double worst = low[0];
    double best = high[0];
    if (router.group_score == GroupScore::kTop2Sum && size > 1) {
      worst += low[1];
      best += high[1];
      worst -= kUnit * std::abs(worst);
      best += kUnit * std::abs(best);
    }
    result.push_back({0.5 * (worst + best), 0.5 * (best - worst)});
  }
  return result;
}

Bounded top_score(const TokenScores& scores) {
  Bounded best = scores.unbiased.front();
  for (const Bounded score : scores.unbiased) {
    const double low = std::max(best.low(), score.low());
    const double high = std::max(best.high(), score.high());
    best = {std::max(best.value, score.value), 0};
    best.error = std::max(high - best.value, best.value - low);
  }
  return best;
}

std::vector<std::int32_t> choose(const RouterConfig& config, const TokenScores& scores) {
  const TopKRouter& router = config.as_top_k();
  const std::int32_t size = config.num_experts / router.groups;
  const std::vector<Bounded> groups = group_scores(config, scores.selection);
  std::vector<std::int32_t> chosen;
  for (std::int32_t e = 0; e < config.num_experts; ++e) {
    std::int32_t better_groups = 0;
    for (std::int32_t g = 0; g < router.groups; ++g) {
      const double mine = groups[at(e / size)].value;
      const double other = groups[at(g)].value;
      if (other > mine || (other == mine && g < e / size)) ++better_groups;
    }
    if (better_groups < router.top_groups) chosen.push_back(e);
  }
  std::stable_sort(chosen.begin(), chosen.end(), [&](std::int32_t a, std::int32_t b) {
    return scores.selection[at(a)].value > scores.selection[at(b)].value;
  });
  chosen.resize(std::min(chosen.size(), at(router.top_k)));
  return chosen;
}

std::vector<Bounded> mixer_shares(std::span<const Bounded> logits,
                                  std::span<const std::int32_t> candidates, std::int32_t chosen) {
  const Bounded own = mixed(logits, candidates, chosen);
  std::vector<Bounded> shares;
  for (const std::int32_t e : candidates) {
    if (e == chosen) {
      shares.push_back(own);
      continue;
    }
    const NearPower power = near_power(logits[at(chosen)], logits[at(e)]);
    const double value = own.value * power.value;
    const double most = std::min(own.high() * power.most, 1.0);
    const double move = std::max(most - value, value - std::max(own.low(), 0.0) * power.least);
    // One that is far for sure has none, without an error.
    const double relative = gamma(2) + kFunctionUnits;
    shares.push_back({value, power.most > 0 ? move + most * relative + kFlush : 0});
  }
  return shares;
}

std::vector<Bounded> chosen_weights(const RouterConfig& config, std::span<const Bounded> logits,
                                    std::span<const std::int32_t> chosen) {
  const TopKRouter& router = config.as_top_k();
  std::vector<Bounded> weights;
  if (router.score == Score::kTopkSoftmax ||
      (router.score == Score::kSoftmax && router.renormalize)) {
    // p_i / sum of the chosen p is the softmax over the chosen. Where the probabilities of all
    // experts are divided first, each has a few roundings more, and the smallest may underflow.
    weights = softmax(logits, chosen);
    for (Bounded& w : weights) w.error += 2 * kFunctionUnits * w.value;
  } else if (router.score == Score::kSoftmax) {
    const TokenScores all = token_scores(config, logits, {});
    for (const std::int32_t e : chosen) weights.push_back(all.unbiased[at(e)]);
  } else {
    Bounded sum;
    std::vector<std::int32_t> left(at(config.num_experts));
    std::iota(left.begin(), left.end(), 0);
    for (const std::int32_t e : chosen) {
      weights.push_back(router.score == Score::kSigmoid ? sigmoid(logits[at(e)])
                                                        : mixed(logits, left, e));
      std::erase(left, e);
      sum = add(sum, weights.back());
    }
    for (Bounded& w : weights) {
      if (!router.renormalize) continue;
      if (sum.low() <= 0) {  // The sum may underflow: a quotient by it is a share, of any size.
        w = {0.5, 0.5 + kFunctionUnits};
        continue;
      }
      const double value = w.value / sum.value;
      const double worst = std::max(w.high() / sum.low() - value, value - w.low() / sum.high());
      w = {value, worst + kFunctionUnits * value};
    }
  }
  for (Bounded& w : weights) w = multiply(w, {double{router.scale}, 0});
  return weights;
}

}  // namespace switchyard::reference
