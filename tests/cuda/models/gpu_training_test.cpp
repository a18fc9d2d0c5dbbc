// Runs of training on a GPU: their bytes, and their losses beside a CPU's.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "switchyard/error.hpp"
#include "switchyard/models/files.hpp"
#include "switchyard/models/trainer.hpp"
#include "tests/models/small_run.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::models {
namespace {

namespace fs = std::filesystem;

/// Of the newest checkpoint: {name: bytes}.
std::map<std::string, std::string> files_of(const TrainResult& result) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(result.checkpoint)) {
    std::ifstream file(entry.path(), std::ios::binary);
    files[entry.path().filename().string()] = {std::istreambuf_iterator<char>(file), {}};
  }
  return files;
}

TrainConfig gpu_run(DType compute = DType::kBF16) {
  TrainConfig config = small_run();
  config.model.hidden = 64;
  config.model.head_dim = 32;
  config.model.sequence = 48;
  config.model.inner = 32;
  config.model.losses.balance = 0.01;
  config.compute = compute;
  return config;
}

class TrainerOnGpu : public testing::Test {
 protected:
  TrainOptions options(const std::string& name, Backend backend = Backend::kCuda) const {
    TrainOptions out;
    out.backend = backend;
    out.directory = folder.path() / name;
    return out;
  }
  /// Cut behind some of its steps and resumed.
  TrainResult cut(const TrainConfig& config, const std::string& name) const {
    TrainOptions run = options(name);
    std::int64_t seen = 0;
    run.on_step = [&](const StepRecord& record) { seen = record.step; };
    TrainResult result;
    for (const std::int64_t until : {std::int64_t{1}, std::int64_t{7}, config.schedule.steps}) {
      run.stop = [&] { return seen == until; };
      result = train(config, text, nullptr, run);
      EXPECT_EQ(result.steps, until);
      run.resume = true;
    }
    return result;
  }
  std::vector<StepRecord> records(const TrainConfig& config, const TrainOptions& given) const {
    TrainOptions run = given;
    std::vector<StepRecord> all;
    run.on_step = [&](const StepRecord& record) { all.push_back(record); };
    (void)train(config, text, &valid, run);
    return all;
  }

  TestFolder folder;
  Text text{{folder.file("text", small_text())}};
  Text valid{{folder.file("valid", small_text(200).substr(50))}};
};

TEST_F(TrainerOnGpu, SmallRunsHaveTheSameBytesTwiceAndResumed) {
  for (const DType compute : {DType::kBF16, DType::kF32}) {
    const TrainConfig config = gpu_run(compute);
    const std::string name = to_string(compute);
    const auto wanted = files_of(train(config, text, nullptr, options(name + "-whole")));
    ASSERT_EQ(wanted.size(), 3U);
    EXPECT_EQ(files_of(train(config, text, nullptr, options(name + "-again"))), wanted);
    EXPECT_EQ(files_of(cut(config, name + "-cut")), wanted);
  }
}

/// As `study --jobs` does them: while one captures its step others make their memory, or give it
/// back, and wait for the device.
TEST_F(TrainerOnGpu, RunsOfSeveralThreadsHaveTheBytesOfOneAlone) {
  const TrainConfig config = gpu_run();
  const auto wanted = files_of(train(config, text, nullptr, options("alone")));
  std::array<int, 4> equal{};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < equal.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int turn = 0; turn < 5; ++turn) {
        const std::string name = std::to_string(i) + "-" + std::to_string(turn);
        try {
          equal[i] += files_of(train(config, text, nullptr, options(name))) == wanted ? 1 : 0;
        } catch (const Error& error) {
          ADD_FAILURE() << name << ": " << error.what();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(equal, (std::array{5, 5, 5, 5}));
}

TEST_F(TrainerOnGpu, RoutersThatDrawAndBiasesThatMoveResumeAlikeToo) {
  for (const char* router : {"noisy-top-k", "switch", "gshard", "hash", "chain", "bias"}) {
    SCOPED_TRACE(router);
    TrainConfig config = gpu_run();
    const std::string name = router;
    config.model.losses = {};
    if (name == "bias") {
      config.model.bias_rate = 0.01;
      config.model.capacity_factor = 1.0;
    } else {
      config.model.router = router;
    }
    config.accumulate = 2;
    const auto wanted = files_of(train(config, text, nullptr, options(name + "-whole")));
    EXPECT_EQ(files_of(cut(config, name + "-cut")), wanted);
  }
}

/// Each expert's tokens are a function of their bytes, so that no rounding turns a choice and all
/// steps are near those of the CPU. What a learned router adds, its gradient among it, is held
/// tensor by tensor from equal parameters in gpu_model_test.cpp. In bf16, Adam's first steps are as
/// long where a gradient is all rounding as where it is not: those runs part by a share of what
/// they have learned (1.7% at most on an H200).
TEST_F(TrainerOnGpu, LossesByAGivenChoiceAreNearThoseOfTheCpu) {
  TrainConfig config = gpu_run(DType::kF32);
  config.model.router = "hash";
  config.model.losses = {};
  const std::vector<StepRecord> cpu = records(config, options("cpu", Backend::kCpu));
  const std::vector<StepRecord> gpu = records(config, options("gpu"));
  config.accumulate = 4;
  const std::vector<StepRecord> parts = records(config, options("parts"));
  config.accumulate = 1;
  config.compute = DType::kBF16;
  const std::vector<StepRecord> bf16 = records(config, options("bf16"));
  ASSERT_EQ(cpu.size(), 12U);
  ASSERT_EQ(gpu.size(), 12U);
  ASSERT_EQ(parts.size(), 12U);
  ASSERT_EQ(bf16.size(), 12U);
  for (std::size_t i = 0; i < cpu.size(); ++i) {
    EXPECT_NEAR(gpu[i].loss, cpu[i].loss, 2e-3) << i;
    EXPECT_NEAR(gpu[i].norm, cpu[i].norm, 0.02 * cpu[i].norm) << i;
    EXPECT_NEAR(parts[i].loss, cpu[i].loss, 2e-3) << i;
    EXPECT_NEAR(bf16[i].loss, cpu[i].loss, 0.01 + 0.03 * (cpu[0].loss - cpu[i].loss)) << i;
    EXPECT_NEAR(gpu[i].load_cv.value_or(-1), cpu[i].load_cv.value_or(-2), 1e-6) << i;
  }
  EXPECT_NEAR(gpu.back().valid_loss.value_or(0), cpu.back().valid_loss.value_or(9), 5e-3);
  EXPECT_LT(gpu.back().loss, gpu.front().loss - 0.3);
}

/// A token near a tie goes to another expert after other roundings, and from there on two runs of
/// a learned router part: the first steps are near each other, later ones only in the same band,
/// a fifth of what they have learned by then. The run in parts has a CPU's run in parts beside it:
/// the balance loss is of each call's tokens, so parts train by another loss than whole batches.
TEST_F(TrainerOnGpu, LossesByALearnedChoiceAreNearThoseOfTheCpuUntilTheyPart) {
  constexpr std::size_t kTogether = 5;
  TrainConfig config = gpu_run(DType::kF32);
  const auto compare = [&](const std::string& name, DType compute, double near) {
    config.compute = DType::kF32;
    const std::vector<StepRecord> cpu = records(config, options(name + "-cpu", Backend::kCpu));
    config.compute = compute;
    const std::vector<StepRecord> gpu = records(config, options(name + "-gpu"));
    ASSERT_EQ(cpu.size(), 12U);
    ASSERT_EQ(gpu.size(), 12U);
    for (std::size_t i = 0; i < cpu.size(); ++i) {
      EXPECT_NEAR(gpu[i].loss, cpu[i].loss, i < kTogether ? near : 0.2) << name << " " << i;
    }
    EXPECT_LT(gpu.back().loss, gpu.front().loss - 1);
  };
  compare("f32", DType::kF32, 2e-3);
  compare("bf16", DType::kBF16, 0.03);
  config.accumulate = 4;
  compare("parts", DType::kF32, 5e-3);
}

TEST_F(TrainerOnGpu, ACheckpointOfTheGpuGoesOnOnACpu) {
  const TrainConfig config = gpu_run(DType::kF32);
  TrainOptions run = options("run");
  std::int64_t seen = 0;
  run.on_step = [&](const StepRecord& record) { seen = record.step; };
  run.stop = [&] { return seen == 6; };
  (void)train(config, text, nullptr, run);
  run.backend = Backend::kCpu;
  run.resume = true;
  const TrainResult mixed = train(config, text, nullptr, run);
  const TrainResult cpu = train(config, text, nullptr, options("cpu", Backend::kCpu));
  EXPECT_EQ(mixed.steps, 12);
  EXPECT_NEAR(mixed.last.loss, cpu.last.loss, 2e-3);
}

TEST_F(TrainerOnGpu, WhatIsFrozenKeepsItsBitsAndTheRestTrainsAsOnACpu) {
  for (const std::vector<Group>& freeze :
       {std::vector{Group::kExperts}, {Group::kEmbedding, Group::kAttention}}) {
    TrainConfig config = gpu_run(DType::kF32);
    config.model.router = "hash";
    config.model.losses = {};
    config.freeze = freeze;
    const std::string name = to_string(freeze.front());
    const TrainResult result = train(config, text, &valid, options(name));
    const TrainResult cpu = train(config, text, &valid, options(name + "-cpu", Backend::kCpu));
    EXPECT_NEAR(result.last.loss, cpu.last.loss, 2e-3) << name;
    EXPECT_NEAR(result.last.norm, cpu.last.norm, 0.02 * cpu.last.norm) << name;
    Model begin(config.model, {.seed = config.seed});
    Model end = load_model(result.checkpoint);
    for (std::size_t i = 0; i < begin.parameters().size(); ++i) {
      const ParameterTensor& tensor = begin.parameters()[i];
      const bool frozen = std::find(freeze.begin(), freeze.end(), tensor.group) != freeze.end();
      const bool same =
          std::equal(tensor.value, tensor.value + tensor.size(), end.parameters()[i].value);
      EXPECT_EQ(same, frozen) << name << ": " << tensor.name;
    }
  }
}

TEST_F(TrainerOnGpu, NumbersThatAreNotFiniteEndTheRunBeforeTheyChangeAnything) {
  TrainConfig config = gpu_run();
  config.schedule.warmup = 0;
  config.schedule.peak = 1e25;
  const TrainResult result = train(config, text, nullptr, options("run"));
  EXPECT_EQ(result.end, TrainResult::End::kNotFinite);
  ASSERT_TRUE(result.not_finite.has_value());
  EXPECT_GE(result.not_finite->step, 2);
}

}  // namespace
}  // namespace switchyard::models
