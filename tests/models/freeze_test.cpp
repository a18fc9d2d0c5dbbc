// Parameters that stay as they begin, and runs that begin with another's.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>

#include "checkpoint/files/safetensors.hpp"
#include "switchyard/error.hpp"
#include "switchyard/models/files.hpp"
#include "switchyard/models/optimizer.hpp"
#include "switchyard/models/trainer.hpp"
#include "tests/models/small_run.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::models {
namespace {

constexpr Group kGroups[] = {Group::kEmbedding, Group::kNorm,  Group::kAttention, Group::kRouter,
                             Group::kExperts,   Group::kDense, Group::kHead};

bool same_bits(const float* a, const float* b, std::int64_t size) {
  return std::memcmp(a, b, static_cast<std::size_t>(4 * size)) == 0;
}

/// Tensors of every group, two of the router: a gate and the shared expert's.
ModelConfig model_of_all_groups() {
  ModelConfig config = small_bytes_model();
  config.first_dense = 1, config.dense_inner = 8;
  config.layers = 3;
  config.shared_inner = 8, config.shared_gated = true;
  config.qk_norm = QkNorm::kHead;
  return config;
}

/// One step's gradients, accumulated over two calls.
void make_gradients(Model& model) {
  std::vector<std::int32_t> tokens(32), targets(32);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::int32_t>(37 * i % 256);
    targets[i] = static_cast<std::int32_t>(91 * i % 256);
  }
  for (const bool accumulate : {false, true}) {
    model.loss_and_gradients({.tokens = {tokens.data(), {2, 16}},
                              .targets = {targets.data(), {2, 16}},
                              .scale = 0.5,
                              .accumulate = accumulate});
  }
}

TEST(Freeze, GradientsOfAllElseHaveTheBitsOfAModelWithoutAndItsOwnStayZero) {
  for (const bool tied : {false, true}) {
    ModelConfig config = model_of_all_groups();
    config.tied = tied;
    Model whole(config);
    make_gradients(whole);
    for (const Group group : kGroups) {
      Model part(config, {.num_threads = 2, .frozen = {group}});
      make_gradients(part);
      double squares = 0;
      int frozen = 0;
      for (std::size_t i = 0; i < part.parameters().size(); ++i) {
        const ParameterTensor& mine = part.parameters()[i];
        const ParameterTensor& theirs = whole.parameters()[i];
        EXPECT_EQ(mine.frozen, mine.group == group);
        frozen += mine.frozen ? 1 : 0;
        const std::vector<float> zeros(static_cast<std::size_t>(mine.size()));
        EXPECT_TRUE(
            same_bits(mine.gradient, mine.frozen ? zeros.data() : theirs.gradient, mine.size()))
            << to_string(group) << ": " << mine.name;
        for (std::int64_t j = 0; !mine.frozen && j < mine.size(); ++j) {
          squares += double{theirs.gradient[j]} * double{theirs.gradient[j]};
        }
      }
      EXPECT_EQ(frozen > 0, group != Group::kHead || !tied) << to_string(group);
      EXPECT_NEAR(gradient_norm(part.parameters()), std::sqrt(squares), 1e-12);
    }
  }
}

TEST(Freeze, TheOptimiserLeavesWhatIsFrozenWhateverItsGradient) {
  std::vector<float> value{1, 2, 3, 4}, gradient{5, 6, 0.5F, 0.25F};
  const std::vector<ParameterTensor> tensors{{.name = "a",
                                              .shape = {2, 1},
                                              .value = value.data(),
                                              .gradient = gradient.data(),
                                              .decay = true,
                                              .frozen = true},
                                             {.name = "b",
                                              .shape = {2, 1},
                                              .value = value.data() + 2,
                                              .gradient = gradient.data() + 2,
                                              .decay = true}};
  AdamW optimizer(tensors, {});
  EXPECT_DOUBLE_EQ(optimizer.step(0.1), std::hypot(0.5, 0.25));
  EXPECT_EQ(value[0], 1);
  EXPECT_EQ(value[1], 2);
  EXPECT_NE(value[2], 3);
  EXPECT_NE(value[3], 4);
  EXPECT_TRUE(optimizer.m(0).empty() && optimizer.v(0).empty());
  EXPECT_NE(optimizer.m(1)[0], 0);
  EXPECT_NE(optimizer.v(1)[1], 0);
}

class FrozenRuns : public testing::Test {
 protected:
  [[nodiscard]] TrainOptions options(const std::string& name) const {
    TrainOptions out;
    out.directory = folder.path() / name;
    return out;
  }
  static TrainConfig run() {
    TrainConfig config = small_run();
    config.model = model_of_all_groups();
    config.schedule.steps = 4;
    config.schedule.warmup = 1;
    return config;
  }
  [[nodiscard]] std::string bytes_of(const std::string& run, const char* file) const {
    std::ifstream stream(model_directory(folder.path() / run) / file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  [[nodiscard]] std::string refusal(const TrainConfig& config, const TrainOptions& options,
                                    ErrorCode code = ErrorCode::kInvalidArgument) const {
    try {
      (void)train(config, text, nullptr, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return {};
  }
  void expect_refusal(const TrainConfig& config, const char* words) const {
    EXPECT_NE(refusal(config, options("none")).find(words), std::string::npos)
        << refusal(config, options("none"));
  }

  TestFolder folder;
  Text text{{folder.file("text", small_text())}};
};

TEST_F(FrozenRuns, KeepTheBitsOfWhatIsFrozenAndMoveAllElse) {
  for (const std::vector<Group>& freeze :
       {std::vector{Group::kRouter}, {Group::kExperts}, {Group::kNorm, Group::kHead}}) {
    TrainConfig config = run();
    config.freeze = freeze;
    const std::string name = to_string(freeze.front());
    const TrainResult result = train(config, text, nullptr, options(name));
    Model begin(config.model, {.seed = config.seed});
    Model end = load_model(result.checkpoint);
    for (std::size_t i = 0; i < begin.parameters().size(); ++i) {
      const ParameterTensor& tensor = begin.parameters()[i];
      const bool frozen = std::find(freeze.begin(), freeze.end(), tensor.group) != freeze.end();
      EXPECT_EQ(same_bits(tensor.value, end.parameters()[i].value, tensor.size()), frozen)
          << name << ": " << tensor.name;
    }
  }
}

TEST_F(FrozenRuns, BeginWithAnothersWeightsAndResumeAlike) {
  TrainConfig first = run();
  first.model.bias_rate = 0.01;
  (void)train(first, text, nullptr, options("first"));
  // Without a learning rate: what it begins with. The bias moves by its own rule.
  TrainConfig still = first;
  still.init = folder.path() / "first";
  still.seed = 77;
  still.schedule.peak = 0;
  still.model.bias_rate = 0;
  EXPECT_NE(refusal(still, options("none"), ErrorCode::kBadFile).find("e_score_correction_bias"),
            std::string::npos);
  still.model.bias_rate = 1e-30;
  (void)train(still, text, nullptr, options("still"));
  EXPECT_TRUE(bytes_of("still", "model.safetensors") == bytes_of("first", "model.safetensors"));

  TrainConfig second = first;
  second.init = folder.path() / "first";
  second.freeze = {Group::kExperts};
  second.schedule.peak = 3e-3;
  (void)train(second, text, nullptr, options("whole"));
  TrainOptions cut = options("cut");
  std::int64_t seen = 0;
  cut.on_step = [&](const StepRecord& record) { seen = record.step; };
  cut.stop = [&] { return seen == 2; };
  EXPECT_EQ(train(second, text, nullptr, cut).steps, 2);
  cut.resume = true;
  cut.num_threads = 2;
  (void)train(second, text, nullptr, cut);
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_TRUE(bytes_of("cut", file) == bytes_of("whole", file)) << file;
  }
  Model begin = load_model(model_directory(folder.path() / "first"));
  Model end = load_model(model_directory(folder.path() / "cut"));
  for (std::size_t i = 0; i < begin.parameters().size(); ++i) {
    const ParameterTensor& tensor = begin.parameters()[i];
    EXPECT_EQ(same_bits(tensor.value, end.parameters()[i].value, tensor.size()),
              tensor.group == Group::kExperts)
        << tensor.name;
  }

  TrainConfig other = second;
  other.init = folder.path() / "still" / "step-000004";  // the same weights
  EXPECT_EQ(train(other, text, nullptr, cut).first_step, 4);
  other.init = folder.path() / "whole";
  EXPECT_NE(refusal(other, cut).find("init/fingerprint"), std::string::npos);
  other.init.clear();
  EXPECT_NE(refusal(other, cut).find("init/fingerprint"), std::string::npos);
  other = second, other.freeze = {Group::kDense};
  EXPECT_NE(refusal(other, cut).find("freeze"), std::string::npos);
}

TEST_F(FrozenRuns, HaveNoMomentsOfWhatIsFrozenAndResumeFromFilesThatDo) {
  TrainConfig config = run();
  config.freeze = {Group::kExperts};
  (void)train(config, text, nullptr, options("whole"));
  TrainOptions cut = options("cut");
  std::int64_t seen = 0;
  cut.on_step = [&](const StepRecord& record) { seen = record.step; };
  cut.stop = [&] { return seen == 2; };
  const std::filesystem::path file =
      train(config, text, nullptr, cut).checkpoint / "optimizer.safetensors";

  const Model model(config.model, {.frozen = config.freeze});
  std::vector<std::byte> bytes;  // what the views below look at
  std::vector<StoredTensor> tensors;
  std::vector<float> zeros;
  {
    const SafetensorsFile written(file);
    for (const ParameterTensor& tensor : model.parameters()) {
      zeros.resize(std::max(zeros.size(), static_cast<std::size_t>(tensor.size())));
      for (const TensorPart& part : tensor.parts) {
        for (const char* prefix : {"m.", "v."}) {
          EXPECT_EQ(written.find(prefix + part.name) == nullptr, tensor.frozen) << part.name;
        }
      }
    }
    for (const StoredTensor& tensor : written.tensors()) {
      bytes.insert(bytes.end(), tensor.bytes.begin(), tensor.bytes.end());
    }
    std::size_t place = 0;
    for (const StoredTensor& tensor : written.tensors()) {
      tensors.push_back({tensor.spec, {bytes.data() + place, tensor.bytes.size()}});
      place += tensor.bytes.size();
    }
  }
  for (const ParameterTensor& tensor : model.parameters()) {
    if (!tensor.frozen) continue;
    for (const TensorPart& part : tensor.parts) {
      const std::span<const float> values(zeros.data(), static_cast<std::size_t>(part.size()));
      for (const char* prefix : {"m.", "v."}) {
        tensors.push_back(
            {{prefix + part.name, StoredType::kF32, part.shape}, std::as_bytes(values)});
      }
    }
  }
  write_safetensors(file, tensors);
  cut.resume = true;
  EXPECT_EQ(train(config, text, nullptr, cut).first_step, 2);
  for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_TRUE(bytes_of("cut", name) == bytes_of("whole", name)) << name;
  }
}

TEST_F(FrozenRuns, WhatCannotBeFrozenIsNamed) {
  TrainConfig config = run();
  config.freeze = {Group::kRouter};
  config.model.losses.balance = 0.01;
  expect_refusal(config, "freeze: router, but balance=0.01");
  config.model.losses = {.z = 0.5};
  expect_refusal(config, "freeze: router, but z=0.5");
  config.model.losses = {};
  config.model.bias_rate = 0.25;
  expect_refusal(config, "freeze: router, but bias_rate=0.25");
  config.model.bias_rate = 0;
  config.model.router = "relu";
  expect_refusal(config, "freeze: router, but the router relu moves by its own rule");
  config.model.router = "expert-threshold";
  expect_refusal(config, "router expert-threshold moves");
  config.model.router = "hash", config.model.shared_gated = false;
  expect_refusal(config, "no parameters of the group router, its router is hash");
  config = run(), config.model.tied = true, config.freeze = {Group::kHead};
  expect_refusal(config, "no parameters of the group head");
  config = run(), config.model.first_dense = 0, config.freeze = {Group::kDense};
  expect_refusal(config, "no parameters of the group dense");
  config = run(), config.freeze = {Group::kExperts, Group::kExperts};
  expect_refusal(config, "experts is there twice");
  config = run(), config.freeze.assign(std::begin(kGroups), std::end(kGroups));
  expect_refusal(config, "nothing is left to train");
  config = run(), config.init = folder.path() / "nowhere";
  EXPECT_NE(refusal(config, options("none"), ErrorCode::kBadFile).find("nowhere"),
            std::string::npos);
  EXPECT_THROW((void)parse_group("gate"), Error);
  for (const Group group : kGroups) EXPECT_EQ(parse_group(to_string(group)), group);
}

}  // namespace
}  // namespace switchyard::models
