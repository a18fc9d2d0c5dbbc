#pragma once

// Small models and texts for tests.

#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "switchyard/models/optimizer.hpp"
#include "testkit/random.hpp"
#include "tests/models/double_model.hpp"

namespace switchyard::test {

/// Odd sizes everywhere: no multiple of a tile.
inline models::ModelConfig small_config() {
  models::ModelConfig config;
  config.vocabulary = 37;
  config.hidden = 20;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 6;
  config.sequence = 48;
  config.experts = 5;
  config.top_k = 2;
  config.inner = 9;
  return config;
}

/// Made-up ids and the ones that follow them; some targets are none.
struct Text {
  std::int64_t batch, positions;
  Ids tokens, targets;

  Text(std::int64_t sequences, std::int64_t length, std::int64_t vocabulary, std::uint64_t seed = 1)
      : batch(sequences), positions(length) {
    Random random(seed);
    for (std::int64_t i = 0; i < batch * positions; ++i) {
      tokens.push_back(static_cast<std::int32_t>(random.between(0, vocabulary - 1)));
      const bool none = i % 11 == 10;
      targets.push_back(none ? -1 : static_cast<std::int32_t>(random.between(0, vocabulary - 1)));
    }
  }
  [[nodiscard]] Matrix<const std::int32_t> x() const { return {tokens.data(), {batch, positions}}; }
  [[nodiscard]] Matrix<const std::int32_t> y() const {
    return {targets.data(), {batch, positions}};
  }
};

inline double step(models::Model& model, const Text& text, models::StepStats* stats = nullptr) {
  return model.loss_and_gradients({.tokens = text.x(), .targets = text.y(), .stats = stats});
}

inline std::vector<float> gradients(const models::Model& model) {
  const float* const first = model.parameters()[0].gradient;
  return {first, first + model.num_parameters()};
}
/// Each element of a gradient [.., cols] beside the same computed in another way. It is a sum of
/// terms of either sign, one a token, and its error goes by theirs, not by what is left of them:
/// their size is told by the gradients with one of their two factors, those of its row and of its
/// column. `share`: of that, how far apart.
inline void expect_gradient_near(const std::string& name, std::span<const float> have,
                                 std::span<const float> want, std::int64_t cols, double share) {
  ASSERT_EQ(have.size(), want.size()) << name;
  const auto num_cols = static_cast<std::size_t>(cols);
  const std::size_t num_rows = want.size() / num_cols;
  Doubles of_row(num_rows), of_col(num_cols);
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double square = double{want[i]} * double{want[i]};
    of_row[i / num_cols] += square / double(num_cols);
    of_col[i % num_cols] += square / double(num_rows);
  }
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double size = std::sqrt(of_row[i / num_cols]) + std::sqrt(of_col[i % num_cols]);
    const double room = share * (size + std::abs(double{want[i]}));
    if (std::abs(double{have[i]} - double{want[i]}) <= room) continue;  // not of what is no number
    ADD_FAILURE() << name << "[" << i / num_cols << ", " << i % num_cols << "] is " << have[i]
                  << ", not " << want[i] << " +- " << room;
    return;
  }
}

inline std::vector<float> values(const models::Model& model) {
  const float* const first = model.parameters()[0].value;
  return {first, first + model.num_parameters()};
}

inline std::vector<float> logits(models::Model& model, const Text& text) {
  const std::int64_t vocabulary = model.config().vocabulary;
  std::vector<float> out(text.tokens.size() * static_cast<std::size_t>(vocabulary));
  model.forward(text.x(), {out.data(), {text.x().size(), vocabulary}});
  return out;
}

}  // namespace switchyard::test
