#include "reference/router.hpp"

// Routing by its definitions, in double, each number with the error that an fp32 evaluation may
// have. Nothing here is sorted cleverly: a choice is found, and checked, by comparing all pairs.

#include <algorithm>
#include <numeric>
#include <set>

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
    result.push_back({value, value * relative + kFlush});
  }
  return result;
}

double sigmoid_of(double x) { return 1.0 / (1.0 + std::exp(-x)); }

Bounded sigmoid(Bounded logit) {
  const double value = sigmoid_of(logit.value);
  const double move = std::max(sigmoid_of(logit.high()) - value, value - sigmoid_of(logit.low()));
  // Far below zero the rounding of the exponent's argument shows as a relative error.
  const double relative = kFunctionUnits + kUnit * std::abs(logit.value);
  return {value, move + value * relative + kFlush};
}

/// What each group is worth.
std::vector<Bounded> group_scores(const RouterConfig& config, std::span<const Bounded> selection) {
  const std::int32_t size = config.num_experts / config.groups;
  std::vector<Bounded> result;
  for (std::int32_t g = 0; g < config.groups; ++g) {
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
    if (config.group_score == GroupScore::kTop2Sum && size > 1) {
      worst += low[1];
      best += high[1];
      worst -= kUnit * std::abs(worst);
      best += kUnit * std::abs(best);
    }
    result.push_back({0.5 * (worst + best), 0.5 * (best - worst)});
  }
  return result;
}

/// Groups that can be, and those that must be, among the top_groups best.
struct GroupChoice {
  std::vector<bool> possible;
  std::vector<bool> certain;
};

GroupChoice choose_groups(const RouterConfig& config, std::span<const Bounded> selection) {
  const std::vector<Bounded> scores = group_scores(config, selection);
  GroupChoice choice;
  for (std::int32_t g = 0; g < config.groups; ++g) {
    std::int32_t surely_better = 0;
    std::int32_t maybe_better = 0;
    for (std::int32_t other = 0; other < config.groups; ++other) {
      if (other == g) continue;
      if (scores[at(other)].low() > scores[at(g)].high()) ++surely_better;
      if (scores[at(other)].high() >= scores[at(g)].low()) ++maybe_better;
    }
    choice.possible.push_back(surely_better < config.top_groups);
    choice.certain.push_back(maybe_better < config.top_groups);
  }
  return choice;
}

std::vector<std::int32_t> classes_of(std::int32_t count, const auto& equal) {
  std::vector<std::int32_t> result;
  for (std::int32_t e = 0; e < count; ++e) {
    std::int32_t first = 0;
    while (first < e && !equal(first, e)) ++first;
    result.push_back(first);
  }
  return result;
}

std::string describe(const char* what, std::int32_t expert, Bounded score, std::int32_t other,
                     Bounded other_score) {
  return std::string(what) + ": expert " + std::to_string(expert) + " scores " +
         std::to_string(score.value) + ", expert " + std::to_string(other) + " " +
         std::to_string(other_score.value);
}

/// K different ids of [0, E) in descending selection score.
std::string check_order(const RouterConfig& config, const TokenScores& scores,
                        std::span<const std::int32_t> chosen) {
  if (chosen.size() != at(config.top_k)) return "not K experts";
  std::set<std::int32_t> seen;
  for (const std::int32_t e : chosen) {
    if (e < 0 || e >= config.num_experts) return "expert " + std::to_string(e) + " is no expert";
    if (!seen.insert(e).second) return "expert " + std::to_string(e) + " is chosen twice";
  }
  for (std::size_t k = 1; k < chosen.size(); ++k) {
    const Bounded before = scores.selection[at(chosen[k - 1])];
    const Bounded after = scores.selection[at(chosen[k])];
    if (before.high() < after.low()) {
      return describe("not in descending order", chosen[k - 1], before, chosen[k], after);
    }
  }
  return {};
}

}  // namespace

std::vector<Bounded> router_logits(std::span<const double> tokens, std::int64_t hidden,
                                   std::int32_t num_experts, const RouterWeights& weights) {
  std::vector<Bounded> logits;
  const std::size_t num_tokens = tokens.size() / at(hidden);
  for (std::size_t t = 0; t < num_tokens; ++t) {
    for (std::int32_t e = 0; e < num_experts; ++e) {
      double sum = weights.bias.empty() ? 0.0 : double{weights.bias[at(e)]};
      double magnitude = std::abs(sum);
      for (std::int64_t h = 0; h < hidden; ++h) {
        const double product =
            tokens[t * at(hidden) + at(h)] * double{weights.gate[at(e * hidden + h)]};
        sum += product;
        magnitude += std::abs(product);
      }
      // H products, H - 1 sums and the bias, in any order.
      logits.push_back({sum, gamma(hidden + 1) * magnitude + kFlush * static_cast<double>(hidden)});
    }
  }
  return logits;
}

TokenScores token_scores(const RouterConfig& config, std::span<const Bounded> logits,
                         std::span<const float> selection_bias) {
  TokenScores scores;
  if (config.score == Score::kSigmoid) {
    for (const Bounded logit : logits) scores.unbiased.push_back(sigmoid(logit));
  } else {
    std::vector<std::int32_t> all(at(config.num_experts));
    std::iota(all.begin(), all.end(), 0);
    scores.unbiased = softmax(logits, all);
  }
  scores.selection = config.score == Score::kTopkSoftmax
                         ? std::vector<Bounded>(logits.begin(), logits.end())
                         : scores.unbiased;
  for (std::size_t e = 0; e < selection_bias.size(); ++e) {
    scores.selection[e] = add(scores.selection[e], {double{selection_bias[e]}, 0});
  }
  return scores;
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
  const std::int32_t size = config.num_experts / config.groups;
  const std::vector<Bounded> groups = group_scores(config, scores.selection);
  std::vector<std::int32_t> chosen;
  for (std::int32_t e = 0; e < config.num_experts; ++e) {
    std::int32_t better_groups = 0;
    for (std::int32_t g = 0; g < config.groups; ++g) {
      const double mine = groups[at(e / size)].value;
      const double other = groups[at(g)].value;
      if (other > mine || (other == mine && g < e / size)) ++better_groups;
    }
    if (better_groups < config.top_groups) chosen.push_back(e);
  }
  std::stable_sort(chosen.begin(), chosen.end(), [&](std::int32_t a, std::int32_t b) {
    return scores.selection[at(a)].value > scores.selection[at(b)].value;
  });
  chosen.resize(std::min(chosen.size(), at(config.top_k)));
  return chosen;
}

std::vector<Bounded> chosen_weights(const RouterConfig& config, std::span<const Bounded> logits,
                                    std::span<const std::int32_t> chosen) {
  std::vector<Bounded> weights;
  if (config.score == Score::kTopkSoftmax ||
      (config.score == Score::kSoftmax && config.renormalize)) {
    // p_i / sum of the chosen p is the softmax over the chosen. Where the probabilities of all
    // experts are divided first, each has a few roundings more, and the smallest may underflow.
    weights = softmax(logits, chosen);
    for (Bounded& w : weights) w.error += 2 * kFunctionUnits * w.value;
  } else if (config.score == Score::kSoftmax) {
    const TokenScores all = token_scores(config, logits, {});
    for (const std::int32_t e : chosen) weights.push_back(all.unbiased[at(e)]);
  } else {
    Bounded sum;
    for (const std::int32_t e : chosen) {
      weights.push_back(sigmoid(logits[at(e)]));
      sum = add(sum, weights.back());
    }
    for (Bounded& w : weights) {
      if (!config.renormalize) continue;
      if (sum.low() <= 0) {  // The sum may underflow: nothing is promised about a quotient by it.
        w.error = HUGE_VAL;
        continue;
      }
      const double value = w.value / sum.value;
      const double worst = std::max(w.high() / sum.low() - value, value - w.low() / sum.high());
      w = {value, worst + kFunctionUnits * value};
    }
  }
  for (Bounded& w : weights) {
    if (std::isfinite(w.error)) w = multiply(w, {double{config.scale}, 0});
  }
  return weights;
}

std::vector<std::int32_t> tie_classes(std::span<const Bounded> logits,
                                      std::span<const float> selection_bias) {
  return classes_of(static_cast<std::int32_t>(logits.size()), [&](std::int32_t a, std::int32_t b) {
    return logits[at(a)].value == logits[at(b)].value && logits[at(a)].error == 0 &&
           logits[at(b)].error == 0 &&
           (selection_bias.empty() || selection_bias[at(a)] == selection_bias[at(b)]);
  });
}

std::vector<std::int32_t> tie_classes(std::int64_t hidden, std::int32_t num_experts,
                                      const RouterWeights& weights) {
  return classes_of(num_experts, [&](std::int32_t a, std::int32_t b) {
    const auto row_a = weights.gate.subspan(at(a * hidden), at(hidden));
    const auto row_b = weights.gate.subspan(at(b * hidden), at(hidden));
    const auto same = [&](std::span<const float> bias) {
      return bias.empty() || bias[at(a)] == bias[at(b)];
    };
    return std::equal(row_a.begin(), row_a.end(), row_b.begin()) && same(weights.bias) &&
           same(weights.selection_bias);
  });
}

std::string check_choice(const RouterConfig& config, const TokenScores& scores,
                         std::span<const std::int32_t> ties, std::span<const std::int32_t> chosen) {
  if (std::string wrong = check_order(config, scores, chosen); !wrong.empty()) return wrong;
  const std::int32_t size = config.num_experts / config.groups;
  GroupChoice groups = choose_groups(config, scores.selection);
  std::set<std::int32_t> used;
  for (const std::int32_t e : chosen) {
    const std::int32_t g = e / size;
    if (!groups.possible[at(g)]) {
      return "expert " + std::to_string(e) + " is of group " + std::to_string(g) +
             ", which is not among the best";
    }
    used.insert(g);
    groups.certain[at(g)] = true;  // Whoever took one expert of it has chosen the group.
  }
  if (used.size() > at(config.top_groups)) return "more than top_groups groups are used";

  const auto place = [&](std::int32_t e) {
    return std::find(chosen.begin(), chosen.end(), e) - chosen.begin();
  };
  const auto group_classes = [&](std::int32_t g) {
    std::vector<std::int32_t> result(ties.begin() + g * size, ties.begin() + (g + 1) * size);
    std::sort(result.begin(), result.end());
    return result;
  };
  for (std::int32_t e = 0; e < config.num_experts; ++e) {
    for (const std::int32_t c : chosen) {
      const std::int32_t group_e = e / size;
      const std::int32_t group_c = c / size;
      // A tie counts where e could be had: its group is chosen, or a twin of c's with a lower id.
      if (ties[at(e)] == ties[at(c)] && e < c && place(e) > place(c) &&
          (groups.certain[at(group_e)] || group_classes(group_e) == group_classes(group_c))) {
        return describe("a tie is not decided for the lower id", c, scores.selection[at(c)], e,
                        scores.selection[at(e)]);
      }
      if (place(e) == std::ssize(chosen) && groups.certain[at(group_e)] &&
          scores.selection[at(e)].low() > scores.selection[at(c)].high()) {
        return describe("a better expert is left out", c, scores.selection[at(c)], e,
                        scores.selection[at(e)]);
      }
    }
  }
  return {};
}

std::string check_weights(std::span<const Bounded> expected, std::span<const float> weights) {
  for (std::size_t k = 0; k < expected.size(); ++k) {
    if (!admits(expected[k], DType::kF32, double{weights[k]})) {
      return "weight " + std::to_string(k) + " is " + std::to_string(weights[k]) + ", not " +
             std::to_string(expected[k].value) + " +- " + std::to_string(expected[k].error);
    }
  }
  return {};
}

}  // namespace switchyard::reference
