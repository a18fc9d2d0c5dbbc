#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "reference/reference.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// Of gradients that are sums over tokens: for each element the magnitudes of all its terms.
struct GradientTerms {
  std::int64_t num_tokens = 0;
  std::vector<double> gate{}, w13{}, w2{}, shared13{}, shared_gate{};
};

/// Of a layer with exact weights, by the reference: its gradients of one token after the other.
///
/// @param x, dout  [T, H] of f32; `record` of the forward.
inline GradientTerms gradient_terms(const LayerModel& model, DType compute,
                                    const std::vector<float>& x, const std::vector<float>& dout,
                                    const RoutingRecord& record) {
  const auto hidden = static_cast<std::size_t>(model.config.experts.hidden);
  const auto top_k = static_cast<std::size_t>(model.config.router.top_k());
  const reference::RouterWeights router{model.gate.floats(), model.router_bias.floats(),
                                        model.selection_bias.floats(),
                                        model.router_network.floats()};
  const auto tokens = reference::as_computed(x, compute);
  const auto gradients = reference::as_computed(dout, compute);
  const auto add = [](std::vector<double>& to, const std::vector<reference::Bounded>& terms) {
    to.resize(terms.size());
    for (std::size_t i = 0; i < terms.size(); ++i) {
      to[i] += std::abs(terms[i].value) + terms[i].error;
    }
  };
  GradientTerms sums{.num_tokens = static_cast<std::int64_t>(tokens.size() / hidden)};
  for (std::size_t t = 0; t < tokens.size() / hidden; ++t) {
    const auto token = std::span(tokens).subspan(t * hidden, hidden);
    const auto logits =
        reference::network_logits(model.config.router, token, model.config.experts.hidden, router);
    const reference::LayerGradient of_token = reference::layer_gradient(
        model, {.precision = {.compute = compute}},
        {.tokens = token,
         .assignments = {.expert = std::span(record.expert).subspan(t * top_k, top_k),
                         .weight = std::span(record.weight).subspan(t * top_k, top_k),
                         .top_k = model.config.router.top_k()},
         .router = router,
         .logits = logits,
         .dout = std::span(gradients).subspan(t * hidden, hidden)});
    add(sums.gate, of_token.gate);
    add(sums.w13, of_token.experts.w13);
    add(sums.w2, of_token.experts.w2);
    add(sums.shared13, of_token.shared.w13);
    add(sums.shared_gate, of_token.shared_gate);
  }
  return sums;
}

/// Each element of two gradients that add up the same terms, in whatever order. A term is at most
/// three products (of an f32 factor in bf16 pieces), and each addition in fp32 loses at most two
/// units of roundoff (a tensor core cuts off): either sum is off by up to 2 * gamma_{3T} times
/// the magnitudes of its terms.
inline void expect_sums_of(const GradientTerms& terms, const std::vector<double>& magnitudes,
                           const char* name, const std::vector<float>& have,
                           const std::vector<float>& want) {
  ASSERT_EQ(magnitudes.size(), want.size()) << name;
  ASSERT_EQ(have.size(), want.size()) << name;
  const double share = 2 * 2 * reference::gamma(3 * terms.num_tokens + 3);
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double apart = std::abs(double{have[i]} - double{want[i]});
    if (apart <= share * magnitudes[i]) continue;  // not where one is no number
    ADD_FAILURE() << name << "[" << i << "] is " << have[i] << ", not " << want[i] << " +- "
                  << share * magnitudes[i];
    return;
  }
}

}  // namespace switchyard
