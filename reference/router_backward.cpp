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

Bounded minus(Bounded a, Bounded b) { return add(a, {-b.value, b.error}); }

}  // namespace

std::vector<Bounded> route_gradient(const RouterConfig& config, std::span<const Bounded> logits,
                                    std::span<const std::int32_t> chosen,
                                    std::span<const Bounded> dweight) {
  const TopKRouter& router = config.as_top_k();
  std::vector<std::int32_t> used;
  std::vector<Bounded> g;
  for (std::size_t k = 0; k < chosen.size(); ++k) {
    if (chosen[k] < 0) continue;
    used.push_back(chosen[k]);
    g.push_back(multiply({double{router.scale}, 0}, dweight[k]));
  }
  std::vector<Bounded> dlogits(logits.size());
  const bool shares = router.renormalize || router.score == Score::kTopkSoftmax;
  if (used.empty() || (shares && used.size() == 1)) return dlogits;  // The weight is 1 for sure.

  const std::vector<Bounded> w = unscaled_weights(config, logits, used);
  BoundedSum mean;  // sum over k of g_k w_k.
  for (std::size_t k = 0; k < used.size(); ++k) mean.add(g[k], w[k]);
  if (router.score == Score::kSoftmax && !shares) {
    const std::vector<Bounded> p = token_scores(config, logits, {}).unbiased;
    std::vector<Bounded> of_expert(logits.size());
    for (std::size_t k = 0; k < used.size(); ++k) of_expert[at(used[k])] = g[k];
    for (std::size_t e = 0; e < p.size(); ++e) {
      dlogits[e] = multiply(p[e], minus(of_expert[e], mean.total()));
    }
    return dlogits;
  }
  const std::vector<Bounded> scores = token_scores(config, logits, {}).unbiased;
  for (std::size_t k = 0; k < used.size(); ++k) {
    Bounded& dlogit = dlogits[at(used[k])];
    dlogit = multiply(w[k], shares ? minus(g[k], mean.total()) : g[k]);
    if (router.score == Score::kSigmoid) {
      dlogit = multiply(dlogit, minus({1.0, 0}, scores[at(used[k])]));
    }
  }
  return dlogits;
}

}  // namespace switchyard::reference
