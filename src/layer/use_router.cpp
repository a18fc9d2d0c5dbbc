// Another router for a layer's weights.
#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {
namespace {

/// Each iteration's, `size` of them behind each other: with zeros for what comes behind the
/// experts, or without what goes. Iterations that come begin as the first one.
/// @param had   What it has of each of `gates` iterations.
/// @param keep  How many of these stay.
Parameter resized(const Parameter& parameter, std::int64_t had, std::int64_t gates,
                  std::int64_t size, std::int64_t keep) {
  const std::vector<float> before = parameter.widened();
  std::vector<float> values(static_cast<std::size_t>(gates * size));
  for (std::int64_t c = 0; c < gates; ++c) {
    const std::int64_t from = (c + 1) * had <= std::ssize(before) ? c * had : 0;
    std::copy_n(before.begin() + from, std::min(keep, size), values.begin() + c * size);
  }
  return values;
}

}  // namespace

void use_router(LayerModel& model, const RouterConfig& router) {
  require(router.num_computing() == model.config.router.num_computing(),
          "the router has {} experts, the layer {}", router.num_computing(),
          model.config.router.num_computing());
  check(router);
  const RouterNetwork had_network = model.config.router.network;
  const bool same =
      router.network.kind == had_network.kind && router.network.width == had_network.width;
  require(same || !router.has_logits(),
          "the router has network={}, the layer's parameters are of network={}",
          to_string(router.network.kind), to_string(had_network.kind));
  const RouterConfig before = std::exchange(model.config.router, router);
  if (!router.is_top_k()) model.selection_bias = {};
  const std::int64_t hidden = model.config.experts.hidden;
  // Others than before have no rows of the gate.
  const bool same_kinds = router.zero_computation.constant == before.zero_computation.constant &&
                          router.zero_computation.copy == before.zero_computation.copy &&
                          router.zero_computation.zero == before.zero_computation.zero;
  const auto resize = [&](Parameter& parameter, std::int64_t had, std::int64_t size,
                          std::int64_t cols = 1) {
    const std::int64_t each = router.num_gates() * size * cols;
    if (parameter.empty() || (parameter.size() == each && same_kinds)) return;
    const std::int64_t keep = same_kinds ? had : router.num_computing();
    parameter = resized(parameter, had * cols, router.num_gates(), size * cols, keep * cols);
  };
  if (!same) model.gate = model.router_network = {};
  const std::int64_t features = router.network.features(hidden);
  resize(model.gate, before.num_logits(), router.num_logits(), features);
  resize(model.router_bias, before.num_logits(), router.num_logits());
  resize(model.selection_bias, before.num_experts, router.num_experts);
  const auto zeros_of = [](Parameter& parameter, std::int64_t size) {
    if (parameter.size() != size) {
      parameter = std::vector<float>(static_cast<std::size_t>(size));
    }
  };
  zeros_of(model.constant_experts, 3 * hidden * router.zero_computation.constant);
  const std::int64_t logits = router.num_logits();
  zeros_of(model.gating_residual, router.gating_residual ? logits * logits : 0);
  const bool noisy = router.noise.kind == RouterNoise::Kind::kLearned;
  if (noisy != !model.noise_gate.empty()) {
    const std::int64_t size = router.num_logits() * hidden;
    model.noise_gate = std::vector<float>(static_cast<std::size_t>(noisy ? size : 0));
  }
}

}  // namespace switchyard
