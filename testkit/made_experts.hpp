#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "switchyard/experts.hpp"
#include "testkit/random_values.hpp"

namespace switchyard {

/// The experts of a layer in plain arrays, as make_memory_source() takes them.
struct MadeExperts {
  ExpertConfig config{};
  DType dtype = DType::kF32;
  std::vector<std::byte> w13{}, w2{};
  std::vector<float> b13{}, b2{};  ///< Empty without bias.

  /// Reads the arrays, and must not outlive them.
  [[nodiscard]] std::unique_ptr<ExpertSource> source() const {
    return make_memory_source(config, dtype, w13.data(), w2.data(),
                              config.bias ? b13.data() : nullptr,
                              config.bias ? b2.data() : nullptr);
  }
};

/// Normal weights of deviation `gain` / sqrt(fan-in), drawn in the order of the arrays; biases of
/// deviation 1.
inline MadeExperts make_experts(const ExpertConfig& config, DType dtype, std::mt19937& random,
                                float gain = 1.0F) {
  const std::int64_t experts = config.num_experts;
  const std::int64_t wide = (config.gated ? 2 : 1) * config.inner;
  const auto weights = [&](std::int64_t rows, std::int64_t fan_in) {
    const float scale = gain / std::sqrt(static_cast<float>(fan_in));
    return stored_as(dtype, random_floats(experts * rows * fan_in, random, scale));
  };
  MadeExperts made{.config = config, .dtype = dtype};
  made.w13 = weights(wide, config.hidden);
  made.w2 = weights(config.hidden, config.inner);
  if (config.bias) {
    made.b13 = random_floats(experts * wide, random);
    made.b2 = random_floats(experts * config.hidden, random);
  }
  return made;
}

}  // namespace switchyard
