#pragma once

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "switchyard/routing/losses.hpp"
#include "testkit/random_values.hpp"

namespace switchyard::test {

/// Sums in host memory.
struct HostSums {
  std::vector<std::int64_t> counts, first_choices, device_tokens;
  std::vector<double> scores, tokens = std::vector<double>(kTokenSums, -1);

  HostSums(std::int64_t groups, std::int64_t num_experts, std::int64_t devices)
      : counts(static_cast<std::size_t>(groups * num_experts), -1),
        first_choices(counts),
        device_tokens(static_cast<std::size_t>(groups * devices), -1),
        scores(counts.size(), -1),
        shape_{groups, num_experts},
        devices_(devices) {}

  [[nodiscard]] RoutingSums view() {
    return {.counts = {counts.data(), shape_},
            .first_choices = {first_choices.data(), shape_},
            .device_tokens = {device_tokens.data(), {shape_[0], devices_}},
            .scores = {scores.data(), shape_},
            .tokens = {tokens.data(), {kTokenSums}}};
  }
  bool operator==(const HostSums&) const = default;

 private:
  std::array<std::int64_t, 2> shape_;
  std::int64_t devices_;
};

/// Tokens with any choice: that it is the best is no matter.
struct LossCase {
  std::int64_t num_tokens = 0;
  RouterConfig router{};
  LossConfig losses{};
  double scale = 1;
  std::vector<float> logits{};
  std::vector<std::int32_t> expert{};
  std::vector<std::int64_t> global_counts{};

  LossCase(std::int64_t tokens, std::int32_t num_experts, std::int32_t top_k, Score score,
           const LossConfig& config, float size = 1.5F, unsigned seed = 5)
      : num_tokens(tokens),
        router{.num_experts = num_experts, .kind = TopKRouter{.top_k = top_k, .score = score}},
        losses(config) {
    std::mt19937 random(seed);
    logits = random_floats(tokens * num_experts, random, size);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(num_experts));
    for (std::int32_t e = 0; e < num_experts; ++e) ids[static_cast<std::size_t>(e)] = e;
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::shuffle(ids.begin(), ids.end(), random);
      expert.insert(expert.end(), ids.begin(), ids.begin() + top_k);
    }
    if (config.scope != LossScope::kGlobal) return;
    for (std::int32_t e = 0; e < num_experts; ++e) {
      global_counts.push_back(static_cast<std::int64_t>(random() % 100));
    }
  }

  [[nodiscard]] std::int64_t groups() const { return loss_groups(losses, num_tokens); }
  [[nodiscard]] Matrix<const float> logits_view() const {
    return {logits.data(), {num_tokens, router.num_experts}};
  }
  [[nodiscard]] Matrix<const std::int32_t> expert_view() const {
    return {expert.data(), {num_tokens, router.top_k()}};
  }
  [[nodiscard]] Vector<const std::int64_t> global_view() const {
    if (global_counts.empty()) return {};
    return {global_counts.data(), {router.num_experts}};
  }
};

}  // namespace switchyard::test
