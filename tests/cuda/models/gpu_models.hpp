#pragma once

// Small models of a size that a GPU takes, for tests of whole ones.

#include "switchyard/models/model.hpp"
#include "tests/models/small_model.hpp"

namespace switchyard::models {

inline ModelConfig gpu_config() {
  ModelConfig config;
  config.vocabulary = 37;
  config.hidden = 64;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 32;
  config.sequence = 80;
  config.experts = 5;
  config.top_k = 2;
  config.inner = 48;
  config.losses.balance = 0.01;
  config.losses.z = 0.001;
  return config;
}

inline ModelOptions on_gpu(DType compute = DType::kF32) {
  return {.backend = Backend::kCuda, .seed = 3, .compute = compute};
}

/// Larger values than at the start of a training: every part then has a say.
inline void make_rough(Model& model, float size, std::uint64_t seed = 5) {
  Random random(seed);
  for (const ParameterTensor& tensor : model.parameters()) {
    for (std::int64_t i = 0; i < tensor.size(); ++i) {
      const float noise = static_cast<float>(random.normal());
      tensor.value[i] = tensor.shape.size() == 1 ? 1 + 0.2F * noise : size * noise;
    }
  }
  model.parameters_changed();
}

}  // namespace switchyard::models
