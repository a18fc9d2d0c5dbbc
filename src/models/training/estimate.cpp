// What a run will take.
#include <algorithm>

#include "switchyard/models/trainer.hpp"

namespace switchyard::models {
namespace {

/// Bytes that ranks together have and one alone has not, besides what each has of the parameters:
/// docs/architecture.md, "The way back", and src/comm/exchange_layout.hpp.
double exchange_bytes(const ModelConfig& config, DType compute, std::int64_t tokens, int ranks) {
  const auto all = static_cast<double>(tokens);
  const auto hidden = static_cast<double>(config.hidden);
  const auto picks = static_cast<double>(config.top_k);
  const auto inner = static_cast<double>(config.inner);
  const double row = hidden * static_cast<double>(size_of(compute)) + 8 * picks;
  const double homes = std::min(ranks, config.top_k);  // ranks that a token is sent to, at most
  // Windows, as large as if all tokens came to each rank: two buffers of rows and dout; sums home.
  const double windows = all * (ranks * 3 * row + homes * 8 * hidden);
  // A copy of the rows that came, their sums there and back.
  const double received = all * homes * (row + 8 * hidden);
  // How many rows experts have differs from step to step. Buffers that grow for them leave their
  // place behind: as much again as pre-activations, intermediates and rows of dx.
  const double grown = all * picks * 4 * (3 * inner + hidden);
  // Of one rank's sums over ranks, in chunks of at most 64 Ki values a rank: parts and sums.
  const auto of_sums = [&](std::int64_t values) {
    return 8 * static_cast<double>(ranks) *
           static_cast<double>(std::min<std::int64_t>(1 << 16, (values + ranks - 1) / ranks));
  };
  const std::int64_t replicated =
      config.hidden * (std::int64_t{config.experts} + 3 * config.shared_inner);
  const auto layers = static_cast<double>(config.layers - config.first_dense);
  return layers * (windows + received + grown) +
         ranks * (layers * of_sums(replicated) + of_sums(config.vocabulary * config.hidden));
}

/// Of `all` numbers those that have moments: without routed experts where these are frozen. The
/// other groups are small beside them, and count.
double learning(const TrainConfig& config, const ModelCounts& counts, double all) {
  if (config.model.adapters) return static_cast<double>(counts.adapters);
  const bool experts_learn =
      std::find(config.freeze.begin(), config.freeze.end(), Group::kExperts) == config.freeze.end();
  return experts_learn ? all : all - static_cast<double>(counts.routed);
}

}  // namespace

TrainEstimate estimate_training(const TrainConfig& config, std::int64_t steps, double peak_flops,
                                double bytes_per_s, int ranks) {
  const ModelCounts counts = count(config.model);
  const std::int64_t batch = config.sequences * config.model.sequence;
  const std::int64_t tokens = batch / config.accumulate;
  const auto all = static_cast<double>(counts.parameters);
  const double alike = all - static_cast<double>(counts.routed);
  const double held = all + (ranks - 1) * alike;  // by all ranks together
  TrainEstimate estimate;
  estimate.tokens = steps * batch;
  estimate.flops = counts.flops_per_token * static_cast<double>(estimate.tokens);
  const double moved = learning(config, counts, held);
  estimate.seconds = estimate.flops / (kExpectedShare * peak_flops) +
                     static_cast<double>(steps) * 32 * moved / bytes_per_s;
  estimate.bytes = counts.bytes(tokens) + 8 * moved;
  if (ranks > 1) {
    estimate.bytes += (ranks - 1) * (counts.fixed_bytes - counts.routed_bytes) +
                      exchange_bytes(config.model, config.compute, tokens, ranks);
  }
  estimate.checkpoint_bytes = 4 * all + 8 * learning(config, counts, all);
  return estimate;
}

}  // namespace switchyard::models
