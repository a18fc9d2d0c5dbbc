#include "reference/router.hpp"

// What an fp32 implementation may choose, given the bounds of its scores. Nothing is sorted: a
// choice is checked by comparing all pairs.

#include <algorithm>
#include <set>

namespace switchyard::reference {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Groups that can be, and those that must be, among the top_groups best.
struct GroupChoice {
  std::vector<bool> possible;
  std::vector<bool> certain;
};

GroupChoice choose_groups(const RouterConfig& config, std::span<const Bounded> selection) {
  const TopKRouter& router = config.as_top_k();
  const std::vector<Bounded> scores = group_scores(config, selection);
  GroupChoice choice;
  for (std::int32_t g = 0; g < router.groups; ++g) {
    std::int32_t surely_better = 0;
    std::int32_t maybe_better = 0;
    for (std::int32_t other = 0; other < router.groups; ++other) {
      if (other == g) continue;
      if (scores[at(other)].low() > scores[at(g)].high()) ++surely_better;
      if (scores[at(other)].high() >= scores[at(g)].low()) ++maybe_better;
    }
    choice.possible.push_back(surely_better < router.top_groups);
    choice.certain.push_back(maybe_better < router.top_groups);
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
  const TopKRouter& router = config.as_top_k();
  if (chosen.size() != at(router.top_k)) return "not K experts";
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

std::vector<std::int32_t> token_ties(std::span<const std::int32_t> gate_ties,
                                     std::span<const Bounded> logits,
                                     std::span<const float> selection_bias) {
  const bool exact =
      std::all_of(logits.begin(), logits.end(), [](Bounded logit) { return logit.error == 0; });
  return exact ? tie_classes(logits, selection_bias)
               : std::vector<std::int32_t>(gate_ties.begin(), gate_ties.end());
}

std::string check_choice(const RouterConfig& config, const TokenScores& scores,
                         std::span<const std::int32_t> ties, std::span<const std::int32_t> chosen) {
  const TopKRouter& router = config.as_top_k();
  if (std::string wrong = check_order(config, scores, chosen); !wrong.empty()) return wrong;
  const std::int32_t size = config.num_experts / router.groups;
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
  if (used.size() > at(router.top_groups)) return "more than top_groups groups are used";

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

void leave_out_full(std::span<const std::int64_t> load, std::int64_t capacity, TokenScores& scores,
                    std::vector<std::int32_t>& ties) {
  constexpr double kFull = -1e30;
  for (std::size_t e = 0; e < load.size(); ++e) {
    if (load[e] < capacity) continue;
    scores.selection[e] = {kFull, 0};
    ties[e] = static_cast<std::int32_t>(load.size() + e);
  }
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
