// What a run will take.
#include <algorithm>

#include "switchyard/models/trainer.hpp"

namespace switchyard::models {
namespace {

/// Bytes of what ranks exchange and what they keep of it, all ranks together (docs/architecture.md,
/// "The way back"; src/comm/exchange_layout.hpp): windows cost what is written of them.
double exchange_bytes(const ModelConfig& config, DType compute, std::int64_t tokens, int ranks) {
  const auto hidden = static_cast<double>(config.hidden);
  const auto picks = static_cast<double>(config.top_k);
  const double row = hidden * static_cast<double>(size_of(compute)) + 8 * picks;
  // Two buffers of rows and a copy, dout; sums home and dx home, and what they are made of.
  const double of_row = 4 * row + 3 * 4 * hidden;
  // Of one rank's sums over ranks, in chunks of at most 64 Ki values a rank: parts and sums.
  const auto of_sums = [&](std::int64_t values) {
    return 8 * static_cast<double>(ranks) *
           static_cast<double>(std::min<std::int64_t>(1 << 16, (values + ranks - 1) / ranks));
  };
  const std::int64_t replicated =
      config.hidden * (std::int64_t{config.experts} + 3 * config.shared_inner);
  const auto layers = static_cast<double>(config.layers - config.first_dense);
  return layers * static_cast<double>(tokens * std::min(ranks, config.top_k)) * of_row +
         ranks * (layers * of_sums(replicated) + of_sums(config.vocabulary * config.hidden));
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
  estimate.seconds = estimate.flops / (kExpectedShare * peak_flops) +
                     static_cast<double>(steps) * 32 * held / bytes_per_s;
  estimate.bytes = counts.bytes(tokens) + 8 * held;
  if (ranks > 1) {
    estimate.bytes += (ranks - 1) * (counts.fixed_bytes - counts.routed_bytes) +
                      exchange_bytes(config.model, config.compute, tokens, ranks);
  }
  estimate.checkpoint_bytes = 12 * all;
  return estimate;
}

}  // namespace switchyard::models
