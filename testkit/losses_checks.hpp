#pragma once

// Auxiliary losses against the reference in double: values by its loops, gradients by differences
// of these. Memory is the host's; who runs the steps elsewhere copies.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "reference/losses.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/routing/losses.hpp"
#include "testkit/loss_case.hpp"

namespace switchyard::test {

struct LossResult {
  LossValues values{};
  std::vector<float> dlogits{};
};

/// All three steps, with weights of experts that have no gradient.
inline LossResult losses_on_cpu(const LossCase& c, const Execution& execution = {}) {
  const std::int64_t num_experts = c.router.num_experts;
  HostSums sums(c.groups(), num_experts, c.losses.devices);
  routing_sums({.logits = c.logits_view(),
                .assignments = DenseAssignments{.expert = c.expert_view()},
                .score = c.router.as_top_k().score,
                .sums = sums.view(),
                .execution = execution});
  LossResult result;
  std::vector<double> values(kLossValues);
  std::vector<float> prices(static_cast<std::size_t>(c.groups() * num_experts));
  const LossPrices priced =
      router_losses({.sums = sums.view(),
                     .num_tokens = c.num_tokens,
                     .config = c.losses,
                     .global_counts = c.global_view(),
                     .scale = c.scale,
                     .values = {values.data(), {kLossValues}},
                     .score_prices = {prices.data(), {c.groups(), num_experts}},
                     .execution = execution});
  std::copy_n(reinterpret_cast<const LossValues*>(values.data()), 1, &result.values);
  const std::vector<float> dweight(c.expert.size());
  result.dlogits.assign(c.logits.size(), -7.0F);
  route_backward({.logits = c.logits_view(),
                  .expert = c.expert_view(),
                  .dweight = {dweight.data(), c.expert_view().shape},
                  .config = c.router,
                  .losses = priced,
                  .dlogits = {result.dlogits.data(), c.logits_view().shape},
                  .execution = execution});
  return result;
}

inline reference::RoutedTokens routed_in_double(const LossCase& c) {
  reference::RoutedTokens routed{.num_experts = c.router.num_experts,
                                 .logits = {c.logits.begin(), c.logits.end()},
                                 .choices = {},
                                 .score = c.router.as_top_k().score};
  for (std::int64_t t = 0; t < c.num_tokens; ++t) {
    const std::int32_t* const ids = c.expert_view().row(t);
    routed.choices.emplace_back(ids, ids + c.router.top_k());
  }
  return routed;
}

inline void expect_near(double have, double want, const char* what) {
  EXPECT_NEAR(have, want, 2e-6 * std::max(1.0, std::abs(want))) << what;
}

/// How far gradients may be off: a share of the token's largest, or of what cancels in it.
struct GradientBound {
  double share = 4e-6;
  double cancelled = 1e-3;
};

/// Values, and the gradients of some logits of a few tokens.
inline void expect_reference(const LossCase& c, const LossResult& result,
                             const GradientBound& bound = {}) {
  reference::RoutedTokens routed = routed_in_double(c);
  const LossValues want = reference::loss_values(routed, c.losses, c.global_counts);
  expect_near(result.values.balance, want.balance, "balance");
  expect_near(result.values.z, want.z, "z");
  expect_near(result.values.importance, want.importance, "importance");
  expect_near(result.values.device, want.device, "device");
  expect_near(result.values.communication, want.communication, "communication");
  expect_near(result.values.entropy, want.entropy, "entropy");
  expect_near(result.values.total, want.total, "total");
  const auto num_experts = static_cast<std::size_t>(c.router.num_experts);
  const auto last = static_cast<std::size_t>(c.num_tokens) - 1;
  for (const std::size_t t : {std::size_t{0}, last / 2, last}) {
    std::vector<double> differences;
    const std::size_t stride = std::max<std::size_t>(1, num_experts / 16);
    for (std::size_t e = 0; e < num_experts; e += stride) {
      const std::size_t i = t * num_experts + e;
      constexpr double kStep = 1e-4;
      const double at = routed.logits[i];
      const auto total = [&](double x) {
        routed.logits[i] = x;
        return reference::loss_values(routed, c.losses, c.global_counts).total;
      };
      // Of fourth order: total is of the size of 1, its slope of that of 1/T.
      const double near = total(at + kStep) - total(at - kStep);
      const double far = total(at + 2 * kStep) - total(at - 2 * kStep);
      routed.logits[i] = at;
      differences.push_back(c.scale * (8 * near - far) / (12 * kStep));
    }
    double largest = bound.cancelled;
    for (const double d : differences) largest = std::max(largest, std::abs(d));
    for (std::size_t d = 0; d < differences.size(); ++d) {
      ASSERT_NEAR(result.dlogits[t * num_experts + d * stride], differences[d],
                  bound.share * largest)
          << "token " << t << " expert " << d * stride;
    }
  }
}

using RunLosses = std::function<LossResult(const LossCase&)>;

/// Each loss by itself and all of them, by every score, scope and share.
inline void expect_every_loss(std::int64_t num_tokens, std::int32_t num_experts, std::int32_t top_k,
                              const RunLosses& run, const GradientBound& bound = {}) {
  const std::int32_t devices = num_experts % 3 == 0 ? 3 : num_experts % 2 == 0 ? 2 : 1;
  const LossConfig each[] = {{.balance = 0.5},
                             {.z = 0.25},
                             {.importance = 2},
                             {.device = 0.7, .devices = devices},
                             {.communication = 0.3, .devices = devices},
                             {.entropy = 1.5},
                             {.balance = 0.5,
                              .z = 0.125,
                              .importance = 0.5,
                              .device = 0.25,
                              .communication = 0.75,
                              .entropy = -0.5,
                              .devices = devices,
                              .devices_per_token = std::min(devices, 2)}};
  for (const Score score : {Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid}) {
    for (const LossScope scope : {LossScope::kBatch, LossScope::kSequence, LossScope::kGlobal}) {
      for (const BalanceShare share :
           {BalanceShare::kAssignments, BalanceShare::kTokens, BalanceShare::kFirstChoice}) {
        for (LossConfig config : each) {
          config.scope = scope;
          config.share = share;
          config.sequence_length = scope == LossScope::kSequence ? num_tokens / 3 : 0;
          SCOPED_TRACE(testing::Message()
                       << "T " << num_tokens << " E " << num_experts << " K " << top_k << " score "
                       << static_cast<int>(score) << " scope " << to_string(scope) << " share "
                       << to_string(share) << " balance " << config.balance << " z " << config.z
                       << " importance " << config.importance << " device " << config.device
                       << " communication " << config.communication << " entropy "
                       << config.entropy);
          LossCase c(num_tokens, num_experts, top_k, score, config);
          c.scale = 3;
          expect_reference(c, run(c), bound);
          if (testing::Test::HasFatalFailure() || testing::Test::HasNonfatalFailure()) return;
        }
      }
    }
  }
}

}  // namespace switchyard::test
