// Runs: what they leave in their directory, and how they go on.
#include "switchyard/models/trainer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "models/training/run_directory.hpp"
#include "switchyard/checkpoint.hpp"
#include "switchyard/error.hpp"
#include "switchyard/models/files.hpp"
#include "switchyard/models/specialisation.hpp"
#include "tests/models/run_files.hpp"
#include "tests/models/small_run.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::models {
namespace {

namespace fs = std::filesystem;

class Trainer : public testing::Test {
 protected:
  TrainOptions options(const std::string& name) const {
    TrainOptions out;
    out.directory = folder.path() / name;
    return out;
  }
  std::string refusal(const TrainConfig& config, const TrainOptions& options, ErrorCode code,
                      const Text* other = nullptr) const {
    try {
      (void)train(config, other == nullptr ? text : *other, nullptr, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return {};
  }

  TestFolder folder;
  Text text{{folder.file("text", small_text())}};
  Text valid{{folder.file("valid", small_text(200).substr(50))}};
};

TEST_F(Trainer, LeavesCheckpointsAndALogAndLearns) {
  TrainOptions run = options("run");
  run.save_every = 5;
  run.valid_every = 6;
  const TrainResult result = train(small_run(), text, &valid, run);
  EXPECT_EQ(result.end, TrainResult::End::kFinished);
  EXPECT_EQ(result.steps, 12);
  EXPECT_EQ(checkpoint_steps(run.directory), (std::vector<std::int64_t>{5, 10, 12}));
  const std::vector<nlohmann::json> log = log_of(run.directory);
  ASSERT_EQ(log.size(), 12U);
  for (std::size_t i = 0; i < log.size(); ++i) {
    EXPECT_EQ(log[i]["step"], i + 1);
    EXPECT_EQ(log[i].contains("valid_loss"), i == 5 || i == 11) << i;
    EXPECT_GT(log[i]["norm"], 0);
    EXPECT_GE(log[i]["load_cv"], 0);
    EXPECT_TRUE(log[i]["dropped"].is_null());
  }
  EXPECT_NEAR(log[0]["loss"], std::log(256), 0.05);
  EXPECT_LT(log[11]["loss"], log[0]["loss"].get<double>() - 0.3);
  EXPECT_EQ(result.checkpoint, run.directory / "step-000012");
  EXPECT_EQ(model_directory(run.directory), result.checkpoint);
}

TEST_F(Trainer, ResumedRunsHaveTheBytesOfUninterruptedOnesForAnyThreads) {
  TrainOptions whole = options("whole");
  (void)train(small_run(), text, nullptr, whole);
  const auto wanted = files_below(whole.directory / "step-000012");
  ASSERT_EQ(wanted.size(), 3U);
  TrainOptions cut = options("cut");
  cut.num_threads = 2;
  std::int64_t seen = 0;
  cut.on_step = [&](const StepRecord& record) { seen = record.step; };
  for (const std::int64_t until : {1, 7, 12}) {
    cut.stop = [&] { return seen == until; };
    const TrainResult result = train(small_run(), text, nullptr, cut);
    EXPECT_EQ(result.steps, until);
    EXPECT_EQ(result.end,
              until < 12 ? TrainResult::End::kInterrupted : TrainResult::End::kFinished);
    cut.resume = true;
  }
  EXPECT_EQ(files_below(cut.directory / "step-000012"), wanted);
  EXPECT_EQ(log_of(cut.directory), log_of(whole.directory));
  // A run that is done has nothing to do, and says so.
  EXPECT_EQ(train(small_run(), text, nullptr, cut).first_step, 12);
  EXPECT_EQ(files_below(cut.directory / "step-000012"), wanted);
}

TEST_F(Trainer, WhatIsMeasuredBesideStandsInTheLogAndChangesNoBit) {
  TrainConfig config = small_run();
  config.model.router = "noisy-top-k:top-k=2";
  TrainOptions plain = options("plain");
  plain.valid_every = 4;
  (void)train(config, text, &valid, plain);
  TrainOptions beside = options("beside");
  beside.valid_every = 4;
  beside.measure = [&](Model& model) {
    const TextRouting routing = route_text(model, valid, {.max_tokens = 64, .sequences = 2});
    return std::map<std::string, double>{
        {"information", specialisation(routing, 3).front().token_type.corrected}};
  };
  (void)train(config, text, &valid, beside);
  EXPECT_EQ(files_below(beside.directory / "step-000012"),
            files_below(plain.directory / "step-000012"));
  std::vector<nlohmann::json> log = log_of(beside.directory);
  for (std::size_t i = 0; i < log.size(); ++i) {
    EXPECT_EQ(log[i].contains("information"), i % 4 == 3) << i;
    log[i].erase("information");
  }
  EXPECT_EQ(log, log_of(plain.directory));
  beside.resume = true;
  beside.ranks = 2;
  EXPECT_NE(refusal(config, beside, ErrorCode::kInvalidArgument).find("one rank, not of 2"),
            std::string::npos);
}

TEST_F(Trainer, RoutersWithNoiseBiasesAndThresholdsResumeAlikeToo) {
  for (const char* router :
       {"top-k", "expert-threshold", "relu", "hash", "chain", "soft-moe:slots=2"}) {
    TrainConfig config = small_run();
    config.model.router = router;
    if (config.model.router == "top-k") {
      config.model.bias_rate = 0.01;
      config.model.capacity_factor = 1.0;
    }
    config.schedule.steps = 6;
    config.schedule.warmup = 1;
    const std::string name = router;
    (void)train(config, text, nullptr, options(name + "-whole"));
    TrainOptions cut = options(name + "-cut");
    std::int64_t seen = 0;
    cut.on_step = [&](const StepRecord& record) { seen = record.step; };
    cut.stop = [&] { return seen == 3; };
    (void)train(config, text, nullptr, cut);
    cut.resume = true;
    (void)train(config, text, nullptr, cut);
    EXPECT_EQ(files_below(cut.directory / "step-000006"),
              files_below(folder.path() / (name + "-whole") / "step-000006"))
        << router;
  }
}

TEST_F(Trainer, WhatAKilledProcessLeavesIsTakenAway) {
  TrainOptions run = options("run");
  run.save_every = 4;
  std::int64_t seen = 0;
  run.on_step = [&](const StepRecord& record) { seen = record.step; };
  run.stop = [&] { return seen == 8; };
  (void)train(small_run(), text, nullptr, run);
  const auto before = files_below(run.directory / "step-000008");
  const fs::path hidden = run.directory / ".step-000009.4242-0.tmp";
  fs::create_directory(hidden);
  std::ofstream(hidden / ".model.safetensors.4242-1.tmp") << "half";
  std::ofstream(run.directory / "log.jsonl", std::ios::app) << R"({"step": 9, "loss": 1}
{"step": 10, "lo)";
  run.resume = true;
  run.stop = {};
  (void)train(small_run(), text, nullptr, run);
  EXPECT_FALSE(fs::exists(hidden));
  EXPECT_EQ(files_below(run.directory / "step-000008"), before);
  ASSERT_EQ(log_of(run.directory).size(), 12U);
  EXPECT_NE(log_of(run.directory)[8]["loss"], 1);
}

TEST_F(Trainer, OnlyTheNewestCheckpointsAreKept) {
  TrainOptions run = options("run");
  run.save_every = 2;
  run.keep = 2;
  (void)train(small_run(), text, nullptr, run);
  EXPECT_EQ(checkpoint_steps(run.directory), (std::vector<std::int64_t>{10, 12}));
  EXPECT_EQ(files_below(run.directory).size(), 7U);
}

TEST_F(Trainer, AnotherConfigurationOrTextIsRefusedByItsName) {
  TrainOptions run = options("run");
  TrainConfig config = small_run();
  config.schedule.steps = 3;
  config.schedule.warmup = 1;
  (void)train(config, text, nullptr, run);
  EXPECT_NE(refusal(config, run, ErrorCode::kInvalidArgument).find("has a run already"),
            std::string::npos);
  run.resume = true;
  const auto refused_for = [&](const char* name, const auto& change) {
    TrainConfig other = config;
    change(other);
    const std::string message = refusal(other, run, ErrorCode::kInvalidArgument);
    EXPECT_NE(message.find(name), std::string::npos) << message;
  };
  refused_for("seed is 6", [](TrainConfig& c) { c.seed = 6; });
  refused_for("schedule/steps is 4", [](TrainConfig& c) { c.schedule.steps = 4; });
  refused_for("schedule/peak", [](TrainConfig& c) { c.schedule.peak = 0.5; });
  refused_for("sequences is 8", [](TrainConfig& c) { c.sequences = 8; });
  refused_for("adamw/clip", [](TrainConfig& c) { c.adamw.clip = 2; });
  refused_for("model/", [](TrainConfig& c) { c.model.inner = 12; });
  const Text other{{folder.file("other", small_text(2999))}};
  EXPECT_NE(refusal(config, run, ErrorCode::kInvalidArgument, &other).find("text/"),
            std::string::npos);
}

TEST_F(Trainer, DamagedCheckpointsAreRefusedByFileAndTensor) {
  TrainOptions run = options("run");
  TrainConfig config = small_run();
  config.schedule.steps = 2;
  config.schedule.warmup = 1;
  const TrainResult result = train(config, text, nullptr, run);
  run.resume = true;
  const auto refused = [&](const char* file, const auto& change, const char* word) {
    const fs::path path = result.checkpoint / file;
    const std::string good = content_of(path);
    std::string bad = good;
    change(bad);
    std::ofstream(path, std::ios::binary) << bad;
    const std::string message = refusal(config, run, ErrorCode::kBadFile);
    EXPECT_NE(message.find(file), std::string::npos) << message;
    EXPECT_NE(message.find(word), std::string::npos) << message;
    std::ofstream(path, std::ios::binary) << good;
  };
  const auto renamed = [](std::string from, std::string to) {
    return [=](std::string& bytes) { bytes.replace(bytes.find(from), from.size(), to); };
  };
  const auto spoiled = [](std::string& bytes) {  // the last number, or the last before `run`
    const std::size_t at = bytes.size() - bytes.size() / 4 / 4 * 4;
    bytes.replace(
        at, 16,
        std::string("\xff\xff\xff\x7f\xff\xff\xff\x7f\xff\xff\xff\x7f\xff\xff\xff\x7f", 16));
  };
  const auto shorter = [](std::string& bytes) { bytes.pop_back(); };
  refused("optimizer.safetensors", shorter, "truncated");
  refused(
      "optimizer.safetensors", [](std::string& bytes) { bytes.clear(); }, "truncated");
  refused("optimizer.safetensors", renamed("\"m.model.norm.weight\"", "\"m.model.norm.weighs\""),
          "has no tensor 'm.model.norm.weight'");
  refused("optimizer.safetensors", renamed("\"run\"", "\"ran\""), "has no tensor 'run'");
  refused("optimizer.safetensors", spoiled, "nan at");
  refused("model.safetensors", shorter, "truncated");
  refused("model.safetensors", spoiled, "nan at");
  refused("model.safetensors", renamed("\"model.norm.weight\"", "\"model.norm.weighs\""),
          "has no tensor 'model.norm.weight'");
  EXPECT_EQ(train(config, text, nullptr, run).steps, 2);  // and whole again
}

// Fails with: a resumed run that begins anew, moments that go while they are wanted.
TEST_F(Trainer, ARunThatHasEndedNeedsNoMoments) {
  TrainOptions run = options("run");
  run.save_every = 6;
  const TrainResult result = train(small_run(), text, nullptr, run);
  const std::map<std::string, std::string> before = files_below(run.directory);
  drop_moments(result.checkpoint);
  drop_moments(result.checkpoint);
  std::map<std::string, std::string> after = files_below(run.directory);
  EXPECT_LT(3 * after["step-000012/optimizer.safetensors"].size(),
            before.at("step-000012/optimizer.safetensors").size());
  after["step-000012/optimizer.safetensors"] = before.at("step-000012/optimizer.safetensors");
  EXPECT_EQ(after, before);
  EXPECT_EQ(read_origin(result.checkpoint)->step, 12);
  EXPECT_EQ(to_json(load_model(result.checkpoint).config()), to_json(small_run().model));
  run.resume = true;
  EXPECT_EQ(train(small_run(), text, nullptr, run).steps, 12);
  EXPECT_EQ(log_of(run.directory).size(), 12U);
  try {
    drop_moments(run.directory / "step-000006");
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("step 6"), std::string::npos) << error.what();
  }
}

TEST_F(Trainer, OneProcessAtATimeHasTheDirectory) {
  const TrainOptions run = options("run");
  const RunDirectory held(run.directory);
  EXPECT_NE(refusal(small_run(), run, ErrorCode::kIo).find("another process"), std::string::npos);
}

TEST_F(Trainer, StopsOrSkipsWhereSomethingIsNotFiniteAndNamesIt) {
  TrainConfig config = small_run();
  config.schedule.peak = 1e30;
  config.schedule.warmup = 0;
  TrainOptions run = options("stop");
  run.save_every = 1;
  const TrainResult stopped = train(config, text, nullptr, run);
  EXPECT_EQ(stopped.end, TrainResult::End::kNotFinite);
  ASSERT_TRUE(stopped.not_finite.has_value());
  EXPECT_NE(stopped.not_finite->text().find("step "), std::string::npos);
  EXPECT_EQ(stopped.not_finite->step, stopped.steps + 1);
  EXPECT_GE(stopped.steps, 1);
  EXPECT_EQ(checkpoint_steps(run.directory).back(), stopped.steps);  // what was there stays
  EXPECT_EQ(log_of(run.directory).size(), static_cast<std::size_t>(stopped.steps));

  TrainOptions skip = options("skip");
  skip.on_nan = OnNan::kSkip;
  const TrainResult skipped = train(config, text, nullptr, skip);
  if (skipped.end == TrainResult::End::kFinished) {
    EXPECT_GT(skipped.skipped, 0);
    EXPECT_EQ(log_of(skip.directory).back()["skipped"], true);
  } else {
    EXPECT_EQ(skipped.not_finite->what, "weight");
  }
}

TEST_F(Trainer, TheTextOfWhatIsNotFiniteNamesStepLayerAndTensor) {
  const NotFinite found{12, 3, "gradient", {"model.layers.3.mlp.gate.weight", 17, NAN}};
  EXPECT_EQ(found.text(),
            "step 12: layer 3: gradient of model.layers.3.mlp.gate.weight has nan at 17");
  const NotFinite loss{4, -1, "loss", {}};
  EXPECT_EQ(loss.text(), "step 4: the loss is not finite");
}

TEST_F(Trainer, CallsThatAccumulateHaveTheLossOfOne) {
  TrainConfig config = small_run();
  config.schedule.steps = 2;
  config.schedule.warmup = 1;
  (void)train(config, text, nullptr, options("one"));
  config.accumulate = 4;
  (void)train(config, text, nullptr, options("four"));
  const auto one = log_of(folder.path() / "one");
  const auto four = log_of(folder.path() / "four");
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_NEAR(one[i]["loss"], four[i]["loss"], 1e-4);
    EXPECT_NEAR(one[i]["norm"], four[i]["norm"], 1e-3 * one[i]["norm"].get<double>() + 1e-5);
  }
}

TEST_F(Trainer, WrongConfigurationsAreRefused) {
  const auto refused_for = [&](const char* word, const auto& change) {
    TrainConfig config = small_run();
    change(config);
    const std::string message = refusal(config, options("x"), ErrorCode::kInvalidArgument);
    EXPECT_NE(message.find(word), std::string::npos) << message;
    EXPECT_FALSE(fs::exists(folder.path() / "x"));
  };
  refused_for("vocabulary", [](TrainConfig& c) { c.model.vocabulary = 300; });
  refused_for("calls", [](TrainConfig& c) { c.accumulate = 3; });
  refused_for("sequences", [](TrainConfig& c) { c.sequences = 0; });
  refused_for("want a document of 4097", [](TrainConfig& c) { c.model.sequence = 4096; });
}

TEST_F(Trainer, ACheckpointIsOneOfItsFamily) {
  for (const QkNorm norm : {QkNorm::kHead, QkNorm::kWhole}) {
    TrainConfig config = small_run();
    config.model.qk_norm = norm;
    if (norm == QkNorm::kWhole) config.model.kv_heads = config.model.heads;
    config.schedule.steps = 1;
    config.schedule.warmup = 0;
    const TrainResult result = train(config, text, nullptr, options(to_string(norm)));
    const Checkpoint checkpoint(result.checkpoint);
    EXPECT_EQ(checkpoint.family(), norm == QkNorm::kHead ? "qwen3-moe" : "olmoe");
    EXPECT_EQ(checkpoint.moe_layers(), (std::vector<std::int32_t>{0, 1}));
    Model model = load_model(result.checkpoint);
    EXPECT_EQ(checkpoint.embed({7}), std::vector<float>(model.parameters()[0].value + 7 * 16,
                                                        model.parameters()[0].value + 8 * 16));
    EXPECT_EQ(checkpoint.layer(1).config.router.num_experts, 4);
  }
}

}  // namespace
}  // namespace switchyard::models
