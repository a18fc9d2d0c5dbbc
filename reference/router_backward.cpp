#include <algorithm>
#include <cmath>
#include <numeric>

#include "reference/backward.hpp"

namespace switchyard::reference {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// The weights before they are scaled, as chosen_weights() has them.
std::vector<Bounded> unscaled_weights(const RouterConfig& config, std::span<const Bounded> logits,
                                      std::span<const std::int32_t> chosen) {
  RouterConfig unscaled = config;
  unscaled.as_top_k().scale = 1.0F;
  return chosen_weights(unscaled, logits, chosen);
}

/// From the gradients g of shares w_k / sum of all w to those of the w.
std::vector<Bounded> through_sum(std::span<const Bounded> g, std::span<const Bounded> w,
                                 std::span<const Bounded> mixed, std::size_t num_experts) {
  BoundedSum weighted;
  Bounded sum;
  for (std::size_t k = 0; k < g.size(); ++k) {
    weighted.add(g[k], w[k]);
    sum = add(sum, mixed[k]);
  }
  const Bounded mean = weighted.total();
  std::vector<Bounded> result;
  for (const Bounded one : g) {
    const Bounded difference = add(one, {-mean.value, mean.error});
    // A choice's own share is the largest among at most all experts.
    const double least = std::max(sum.low(), 0.99 / static_cast<double>(num_experts));
    const double value = 1 / sum.value;
    const double move = std::max(1 / least - value, value - 1 / sum.high());
    result.push_back(multiply(difference, {value, move + 4 * kUnit / least}));
  }
  return result;
}

/// Score::kSparseMixer: choice by choice. `g`: of the weights before the scale.
void add_mixer_gradient(const RouterConfig& config, std::span<const Bounded> logits,
                        std::span<const std::int32_t> used, std::vector<Bounded> g,
                        std::vector<BoundedSum>& dlogits) {
  std::vector<std::int32_t> left(logits.size());
  std::iota(left.begin(), left.end(), 0);
  std::vector<std::vector<Bounded>> shares;
  std::vector<std::vector<std::int32_t>> sharers;
  std::vector<Bounded> own;
  for (const std::int32_t chosen : used) {
    sharers.push_back(left);
    shares.push_back(mixer_shares(logits, left, chosen));
    own.push_back(shares.back()[at(std::ranges::find(left, chosen) - left.begin())]);
    std::erase(left, chosen);
  }
  if (config.as_top_k().renormalize) {
    g = through_sum(g, unscaled_weights(config, logits, used), own, logits.size());
  }
  for (std::size_t k = 0; k < used.size(); ++k) {
    const Bounded slope = multiply(g[k], own[k]);
    for (std::size_t i = 0; i < sharers[k].size(); ++i) {
      const Bounded share = shares[k][i];
      const bool is_choice = sharers[k][i] == used[k];
      const Bounded factor = is_choice ? add({1.0, 0}, {-share.value, share.error})
                                       : Bounded{-share.value, share.error};
      if (factor.value != 0 || factor.error != 0) dlogits[at(sharers[k][i])].add(slope, factor);
    }
  }
}

/// Weights of most other rules are made as those of a top-k router are.
std::vector<Bounded> route_gradient_of_rule(const RouterConfig& config,
                                            std::span<const Bounded> logits,
                                            std::span<const std::int32_t> chosen,
                                            std::span<const Bounded> dweight,
                                            std::span<const float> start) {
  TopKRouter alike{.top_k = static_cast<std::int32_t>(chosen.size()), .renormalize = false};
  const bool over_chosen = std::holds_alternative<GShardRouter>(config.kind) ||
                           std::holds_alternative<AdaMoeRouter>(config.kind);
  if (over_chosen) alike.score = Score::kTopkSoftmax;
  if (!std::holds_alternative<ReluRouter>(config.kind)) {
    return route_gradient({.num_experts = config.num_logits(), .kind = alike}, logits, chosen,
                          dweight, start);
  }
  std::vector<BoundedSum> dlogits(logits.size());
  for (std::size_t e = 0; e < start.size(); ++e) dlogits[e].add({double{start[e]}, 0});
  for (std::size_t k = 0; k < chosen.size(); ++k) {
    if (chosen[k] >= 0) dlogits[at(chosen[k])].add(dweight[k]);
  }
  return totals(dlogits);
}

}  // namespace

std::vector<Bounded> route_gradient(const RouterConfig& config, std::span<const Bounded> logits,
                                    std::span<const std::int32_t> chosen,
                                    std::span<const Bounded> dweight,
                                    std::span<const float> start) {
  if (!config.is_top_k()) return route_gradient_of_rule(config, logits, chosen, dweight, start);
  const TopKRouter& router = config.as_top_k();
  std::vector<BoundedSum> dlogits(logits.size());
  for (std::size_t e = 0; e < start.size(); ++e) dlogits[e].add({double{start[e]}, 0});
  std::vector<std::int32_t> used;
  std::vector<Bounded> g;
  for (std::size_t k = 0; k < chosen.size(); ++k) {
    if (chosen[k] < 0) continue;
    used.push_back(chosen[k]);
    g.push_back(multiply({double{router.scale}, 0}, dweight[k]));
  }
  const bool shares = router.renormalize || router.score == Score::kTopkSoftmax;
  // A share among one is 1 for sure: it passes nothing.
  if (used.empty() || (shares && used.size() == 1)) return totals(dlogits);

  if (router.score == Score::kSparseMixer) {
    add_mixer_gradient(config, logits, used, g, dlogits);
    return totals(dlogits);
  }
  const std::vector<Bounded> w = unscaled_weights(config, logits, used);
  const std::vector<Bounded> scores = token_scores(config, logits, {}).unbiased;
  BoundedSum weighted;  // sum over k of g_k w_k.
  for (std::size_t k = 0; k < used.size(); ++k) weighted.add(g[k], w[k]);
  const Bounded mean = weighted.total();
  const Bounded minus_mean{-mean.value, mean.error};
  for (std::size_t k = 0; k < used.size(); ++k) {
    BoundedSum& dlogit = dlogits[at(used[k])];
    Bounded slope = w[k];
    if (router.score == Score::kSigmoid) {
      const Bounded s = scores[at(used[k])];
      slope = multiply(slope, add({1.0, 0}, {-s.value, s.error}));
    }
    dlogit.add(slope, g[k]);
    if (shares) dlogit.add(slope, minus_mean);
  }
  if (router.score == Score::kSoftmax && !shares) {
    for (std::size_t e = 0; e < scores.size(); ++e) dlogits[e].add(scores[e], minus_mean);
  }
  return totals(dlogits);
}

}  // namespace switchyard::reference
