// Balancing without a loss: a bias follows the counts, or the quantiles, of the last step.
#include "switchyard/routing/selection_bias.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "comm/ranks/collectively.hpp"
#include "comm/ranks/gather.hpp"
#include "core/shape_check.hpp"
#include "route/cpu/tokens.hpp"

namespace switchyard {
namespace {

void check(const SelectionBiasUpdate& update) {
  const std::int64_t num_experts = update.bias.shape[0];
  require_shape("counts", update.counts, num_experts);
  require(std::isfinite(update.rate) && update.rate >= 0, "rate={} is not a number from 0",
          update.rate);
  for (std::int64_t e = 0; e < num_experts; ++e) {
    require(update.counts[e] >= 0, "counts[{}]={} is negative", e, update.counts[e]);
  }
}

void check(const ThresholdUpdate& update) {
  const auto [num_tokens, num_experts] = update.logits.shape;
  require_shape("bias", update.bias, num_experts);
  require(update.top_k >= 1 && update.top_k <= num_experts, "top_k={} is not in 1 to {}",
          update.top_k, num_experts);
  require(update.momentum >= 0 && update.momentum <= 1, "momentum={} is not in 0 to 1",
          update.momentum);
  for (std::int64_t i = 0; i < update.logits.size(); ++i) {
    require(!std::isnan(update.logits.data[i]), "the logit of token {} for expert {} is NaN",
            i / num_experts, i % num_experts);
  }
}

/// T times the quantile of each expert, then T.
std::vector<double> quantiles_of(const ThresholdUpdate& update) {
  const auto [num_tokens, num_experts] = update.logits.shape;
  const std::int64_t above = update.top_k * num_tokens / num_experts;
  std::vector<float> probability(static_cast<std::size_t>(num_tokens * num_experts));
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    std::vector<float> row(static_cast<std::size_t>(num_experts));
    routing::softmax(update.logits.row(t), static_cast<std::int32_t>(num_experts), row.data());
    for (std::int64_t e = 0; e < num_experts; ++e) {
      probability[static_cast<std::size_t>(e * num_tokens + t)] = row[static_cast<std::size_t>(e)];
    }
  }
  std::vector<double> sums;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const auto begin = probability.begin() + e * num_tokens;
    float quantile = 0.0F;
    if (above < num_tokens) {
      std::nth_element(begin, begin + above, begin + num_tokens, std::greater<>());
      quantile = begin[above];
    }
    sums.push_back(static_cast<double>(num_tokens) * double{quantile});
  }
  sums.push_back(static_cast<double>(num_tokens));
  return sums;
}

void together(Communicator* communicator, const auto& body) {
  if (communicator == nullptr) return body();
  collectively(*communicator, body);
}

int sign_of(std::int64_t x) { return x > 0 ? 1 : x < 0 ? -1 : 0; }

}  // namespace

void update_selection_bias(const SelectionBiasUpdate& update) {
  const std::int64_t num_experts = update.bias.shape[0];
  std::vector<std::int64_t> counts;
  together(update.communicator, [&] {
    check(update);
    counts.assign(update.counts.data, update.counts.data + num_experts);
    if (update.communicator != nullptr) counts = sum_over_ranks(*update.communicator, counts);
  });
  const std::int64_t all = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  std::vector<int> move;
  move.reserve(counts.size());
  for (const std::int64_t n : counts) move.push_back(sign_of(all - num_experts * n));
  const double moves = std::accumulate(move.begin(), move.end(), 0);
  const double mean = update.centered ? moves / static_cast<double>(num_experts) : 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const double step = update.rate * (move[static_cast<std::size_t>(e)] - mean);
    update.bias[e] = static_cast<float>(double{update.bias[e]} + step);
  }
}

void update_thresholds(const ThresholdUpdate& update) {
  std::vector<double> sums;
  together(update.communicator, [&] {
    check(update);
    sums = quantiles_of(update);
    if (update.communicator != nullptr) sums = sum_over_ranks(*update.communicator, sums);
  });
  if (sums.back() == 0) return;
  for (std::int64_t e = 0; e < update.bias.shape[0]; ++e) {
    const double quantile = sums[static_cast<std::size_t>(e)] / sums.back();
    update.bias[e] = static_cast<float>(update.momentum * double{update.bias[e]} -
                                        (1 - update.momentum) * quantile);
  }
}

}  // namespace switchyard
