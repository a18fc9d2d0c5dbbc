#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "switchyard/tensor.hpp"

namespace switchyard::test {

/// A made-up routing: ids in [-1, E), repeated ones included, skewed to low experts.
struct Routed {
  std::int64_t num_tokens;
  std::int64_t top_k;
  std::int32_t num_experts;
  std::vector<std::int32_t> expert{};
  std::vector<float> weight{};
  std::vector<std::uint8_t> kept{};

  Routed(std::int64_t t, std::int64_t k, std::int32_t e, unsigned seed)
      : num_tokens(t), top_k(k), num_experts(e) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> uniform(0.0F, 1.0F);
    for (std::int64_t i = 0; i < t * k; ++i) {
      const float u = uniform(generator);
      expert.push_back(
          uniform(generator) < 0.1F
              ? -1
              : std::min(e - 1, static_cast<std::int32_t>(u * u * static_cast<float>(e))));
      weight.push_back(static_cast<float>(static_cast<int>(uniform(generator) * 8)) / 8);
      kept.push_back(uniform(generator) < 0.8F ? 1 : 0);
    }
  }

  [[nodiscard]] Matrix<const std::int32_t> ids() const {
    return {expert.data(), {num_tokens, top_k}};
  }
  [[nodiscard]] Matrix<const float> weights() const { return {weight.data(), {num_tokens, top_k}}; }
  [[nodiscard]] Matrix<const std::uint8_t> mask() const {
    return {kept.data(), {num_tokens, top_k}};
  }
};

}  // namespace switchyard::test
