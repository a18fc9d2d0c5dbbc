#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// A made-up routing: ids in [-1, E), skewed to low experts, repeated ones included; weights with
/// many ties; a fifth of it dropped by `kept`.
struct Routed {
  std::int64_t num_tokens;
  std::int64_t top_k;
  std::int32_t num_experts;
  std::vector<std::int32_t> expert{};
  std::vector<float> weight{};
  std::vector<std::uint8_t> kept{};

  Routed(std::int64_t t, std::int64_t k, std::int32_t e, unsigned seed)
      : num_tokens(t), top_k(k), num_experts(e) {
    std::mt19937 random(seed);
    for (std::int64_t i = 0; i < t * k; ++i) {
      const auto u = static_cast<float>(random() % 10000) / 10000;
      const auto id = static_cast<std::int32_t>(u * u * static_cast<float>(e));
      expert.push_back(random() % 10 == 0 ? -1 : id);
      weight.push_back(static_cast<float>(static_cast<int>(random() % 64) - 8) / 64);
      kept.push_back(random() % 5 == 0 ? 0 : 1);
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

}  // namespace switchyard
