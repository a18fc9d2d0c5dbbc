// Balancing without a loss: a bias follows the counts of the last step.
#include "switchyard/routing/selection_bias.hpp"

#include <cmath>
#include <numeric>
#include <vector>

#include "comm/ranks/collectively.hpp"
#include "comm/ranks/gather.hpp"
#include "core/shape_check.hpp"

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

int sign_of(std::int64_t x) { return x > 0 ? 1 : x < 0 ? -1 : 0; }

}  // namespace

void update_selection_bias(const SelectionBiasUpdate& update) {
  const std::int64_t num_experts = update.bias.shape[0];
  std::vector<std::int64_t> counts;
  const auto count = [&] {
    check(update);
    counts.assign(update.counts.data, update.counts.data + num_experts);
    if (update.communicator != nullptr) counts = sum_over_ranks(*update.communicator, counts);
  };
  if (update.communicator == nullptr) {
    count();
  } else {
    collectively(*update.communicator, count);
  }
  const std::int64_t all = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  std::vector<int> move;
  for (const std::int64_t n : counts) move.push_back(sign_of(all - num_experts * n));
  const double moves = std::accumulate(move.begin(), move.end(), 0);
  const double mean = update.centered ? moves / static_cast<double>(num_experts) : 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const double step = update.rate * (move[static_cast<std::size_t>(e)] - mean);
    update.bias[e] = static_cast<float>(double{update.bias[e]} + step);
  }
}

}  // namespace switchyard
