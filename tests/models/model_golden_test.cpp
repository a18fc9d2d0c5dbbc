// Models against a training by torch in double (tests/data/model_golden.py): the loss, every
// parameter's gradient, and ten steps of torch's AdamW with clipping.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "switchyard/models/optimizer.hpp"

namespace switchyard::test {
namespace {

using models::Model;
using models::ParameterTensor;
using models::TensorPart;
using nlohmann::json;

constexpr int kBatch = 2, kPositions = 24;

/// The script's formula.
void make_up(Model& model) {
  for (const ParameterTensor& tensor : model.parameters()) {
    for (const TensorPart& part : tensor.parts) {
      int index = 0;
      for (const char c : part.name) index += c;
      for (std::int64_t i = 0; i < part.size(); ++i) {
        const double wave =
            std::sin(1.37 * static_cast<double>(i) * (1 + index % 13 / 7.0) + index);
        tensor.value[part.offset + i] =
            static_cast<float>(part.shape.size() == 1 ? 1 + 0.1 * wave : 0.3 * wave);
      }
    }
  }
  model.parameters_changed();
}

double run_step(Model& model, int step) {
  std::vector<std::int32_t> tokens, targets;
  for (int i = 0; i < kBatch * kPositions; ++i) {
    tokens.push_back((i * i * 7 + i * (step + 3) + step) % 31);
    targets.push_back(i % 7 == 6 ? -1 : (i * 5 + step * 11) % 31);
  }
  return model.loss_and_gradients({.tokens = {tokens.data(), {kBatch, kPositions}},
                                   .targets = {targets.data(), {kBatch, kPositions}}});
}

json golden() {
  std::ifstream file(SWITCHYARD_TEST_DATA "/model_golden.json");
  return json::parse(file);
}

TEST(ModelGolden, LossAndGradientsAreThoseOfTorch) {
  const json document = golden();
  ASSERT_EQ(document.size(), 3U);
  for (const auto& [name, entry] : document.items()) {
    SCOPED_TRACE(name);
    Model model(models::parse_model_config(entry.at("config").dump(), name));
    make_up(model);
    EXPECT_NEAR(run_step(model, 0), entry.at("loss").get<double>(), 5e-6);
    std::size_t parts = 0;
    for (const ParameterTensor& tensor : model.parameters()) {
      for (const TensorPart& part : tensor.parts) {
        const json& want = entry.at("gradients").at(part.name);
        const float* const have = tensor.gradient + part.offset;
        double squares = 0;
        for (std::int64_t i = 0; i < part.size(); ++i) squares += double{have[i]} * double{have[i]};
        const double norm = want.at("norm");
        EXPECT_NEAR(std::sqrt(squares), norm, 2e-5 * norm) << part.name;
        for (std::int64_t n = 0; n < 4; ++n) {
          EXPECT_NEAR(double{have[n * (part.size() - 1) / 3]},
                      want.at("samples").at(std::size_t(n)), 2e-5 * norm)
              << part.name;
        }
        ++parts;
      }
    }
    EXPECT_EQ(parts, entry.at("gradients").size());
  }
}

TEST(ModelGolden, TenStepsOfAdamWHaveTheLossesAndNormsOfTorch) {
  const json document = golden();
  for (const auto& [name, entry] : document.items()) {
    SCOPED_TRACE(name);
    Model model(models::parse_model_config(entry.at("config").dump(), name), {.num_threads = 2});
    make_up(model);
    models::AdamW optimizer(model.parameters(), {.weight_decay = 0.1, .clip = 1.0});
    for (int step = 0; step < std::ssize(entry.at("losses")); ++step) {
      const auto at = static_cast<std::size_t>(step);
      EXPECT_NEAR(run_step(model, step), entry.at("losses").at(at).get<double>(), 2e-5) << step;
      const double norm = entry.at("norms").at(at);
      EXPECT_NEAR(optimizer.step(3e-3, &model.pool()), norm, 1e-4 * norm) << step;
      model.parameters_changed();
    }
  }
}

}  // namespace
}  // namespace switchyard::test
