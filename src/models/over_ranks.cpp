#include "models/over_ranks.hpp"

#include <algorithm>
#include <utility>

#include "comm/exchange_layout.hpp"
#include "comm/ranks/gather.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/names.hpp"

namespace switchyard::models {
namespace {

/// Arrays of some experts, under the numbers that these have in the layer.
class ShareSource final : public ExpertSource {
 public:
  ShareSource(std::unique_ptr<ExpertSource> inner, std::int32_t first)
      : inner_(std::move(inner)), first_(first) {}

  [[nodiscard]] DType dtype() const override { return inner_->dtype(); }
  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    inner_->read(expert - first_, part, first_row, num_rows, dtype, out);
  }
  void read_bias(std::int32_t expert, ExpertPart part, float* out) const override {
    inner_->read_bias(expert - first_, part, out);
  }

 private:
  std::unique_ptr<ExpertSource> inner_;
  std::int32_t first_;
};

/// Each loss of a layer.
template <class Use>
void for_losses(LossValues& to, const LossValues& from, const Use& use) {
  use(to.balance, from.balance);
  use(to.z, from.z);
  use(to.importance, from.importance);
  use(to.device, from.device);
  use(to.communication, from.communication);
  use(to.entropy, from.entropy);
  use(to.total, from.total);
}

}  // namespace

Communicator* ranks_of(const ModelOptions& options) {
  Communicator* const ranks = options.communicator;
  return ranks != nullptr && ranks->size() > 1 ? ranks : nullptr;
}

ExpertShare experts_of(const ModelConfig& config, const ModelOptions& options) {
  const Communicator* const ranks = ranks_of(options);
  if (ranks == nullptr) return {0, config.experts};
  const std::int32_t first = first_expert_of(config.experts, ranks->size(), ranks->rank());
  return {first, first_expert_of(config.experts, ranks->size(), ranks->rank() + 1) - first};
}

std::unique_ptr<ExpertSource> make_share_source(const ExpertConfig& config, ExpertShare share,
                                                const float* w13, const float* w2) {
  ExpertConfig own = config;
  own.num_experts = share.count;
  return std::make_unique<ShareSource>(make_memory_source(own, DType::kF32, w13, w2), share.first);
}

void add_over_ranks(Communicator& ranks, CallSums& sums) {
  // Counts are exact as doubles.
  std::vector<double> values{sums.nll, sums.router_losses};
  for (RoutingStats& layer : sums.layers) {
    values.push_back(static_cast<double>(layer.tokens));
    for_losses(layer.losses, layer.losses,
               [&](double /*to*/, double loss) { values.push_back(loss); });
    for (const auto* counts : {&layer.counts, &layer.counts_kept}) {
      for (const std::int64_t n : *counts) values.push_back(static_cast<double>(n));
    }
  }
  values = sum_over_ranks(ranks, values);
  const double* next = values.data();
  const auto mean = [&](double& to, double) { to = *next++ / ranks.size(); };
  sums.nll = *next++;
  mean(sums.router_losses, 0);
  for (RoutingStats& layer : sums.layers) {
    layer.tokens = static_cast<std::int64_t>(*next++);
    for_losses(layer.losses, layer.losses, mean);
    for (auto* counts : {&layer.counts, &layer.counts_kept}) {
      for (std::int64_t& n : *counts) n = static_cast<std::int64_t>(*next++);
    }
  }
}

void add_call(const CallSums& call, std::int32_t calls, std::vector<RoutingStats>& layers) {
  layers.resize(std::max(layers.size(), call.layers.size()));
  for (std::size_t i = 0; i < call.layers.size(); ++i) {
    const RoutingStats& from = call.layers[i];
    RoutingStats& to = layers[i];
    to.layer = from.layer;
    to.tokens += from.tokens;
    const auto add = [](std::vector<std::int64_t>& sums, const std::vector<std::int64_t>& counts) {
      sums.resize(counts.size(), 0);
      for (std::size_t e = 0; e < counts.size(); ++e) sums[e] += counts[e];
    };
    add(to.counts, from.counts);
    add(to.counts_kept, from.counts_kept);
    for_losses(to.losses, from.losses,
               [&](double& mean, double now) { mean += (now - mean) / calls; });
  }
}

}  // namespace switchyard::models
