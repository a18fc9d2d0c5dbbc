#pragma once

#include <cmath>
#include <vector>

#include "core/half.hpp"
#include "switchyard/layer.hpp"
#include "testkit/gpu/stage_support.hpp"

namespace switchyard {

/// A layer of made-up weights that lives as long as its model is used.
struct MadeUp {
  LayerModel model{};
  std::vector<std::byte> w13{}, w2{}, shared13{}, shared2{};
  std::vector<float> b13{}, b2{};

  MadeUp(const LayerConfig& config, DType dtype, bool bias_router) {
    const ExpertConfig& experts = config.experts;
    const std::int64_t rows = (experts.gated ? 2 : 1) * experts.inner;
    const auto weights = [dtype](std::int64_t count, std::int64_t fan_in, unsigned seed) {
      return stored_as(dtype,
                       random_floats(count, seed, 1 / std::sqrt(static_cast<float>(fan_in))));
    };
    w13 = weights(experts.num_experts * rows * experts.hidden, experts.hidden, 1);
    w2 = weights(experts.num_experts * experts.hidden * experts.inner, experts.inner, 2);
    b13 = random_floats(experts.num_experts * rows, 3, 0.1F);
    b2 = random_floats(experts.num_experts * experts.hidden, 4, 0.1F);
    model.config = config;
    std::vector<float> gate = random_floats(config.router.num_experts * experts.hidden, 5,
                                            1 / std::sqrt(static_cast<float>(experts.hidden)));
    if (!bias_router) {
      for (float& x : gate) x = round_to(dtype, x);  // as checkpoints have it
    }
    model.gate = gate;
    if (bias_router) {
      model.router_bias = random_floats(config.router.num_experts, 6, 0.1F);
      model.selection_bias = random_floats(config.router.num_experts, 7, 0.1F);
    }
    model.experts =
        make_memory_source(experts, dtype, w13.data(), w2.data(),
                           experts.bias ? b13.data() : nullptr, experts.bias ? b2.data() : nullptr);
    if (config.shared.num_experts > 0) {
      const std::int64_t inner = config.shared.inner;
      shared13 = weights(2 * inner * experts.hidden, experts.hidden, 8);
      shared2 = weights(inner * experts.hidden, inner, 9);
      model.shared = make_memory_source(config.shared, dtype, shared13.data(), shared2.data());
      if (config.shared_gated) model.shared_gate = random_floats(experts.hidden, 10, 0.1F);
    }
  }
};

}  // namespace switchyard
