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

}  // namespace

std::vector<Bounded> route_gradient(const RouterConfig& config, std::span<const Bounded> logits,
                                    std::span<const std::int32_t> chosen,
                                    std::span<const Bounded> dweight,
                                    std::span<const float> start) {
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
