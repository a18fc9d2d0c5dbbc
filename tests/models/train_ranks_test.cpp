// Runs over ranks beside runs on one: losses, norms and held-out losses of every step, checkpoints
// that go from any number of ranks to any other, and ranks that fail.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "models/training/replicas.hpp"
#include "models/training/run_state.hpp"
#include "switchyard/models/files.hpp"
#include "testkit/expect_error.hpp"
#include "tests/models/run_files.hpp"
#include "tests/models/small_run.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::models {
namespace {

namespace fs = std::filesystem;

TrainConfig run_of_ranks(const std::string& router = "top-k") {
  TrainConfig config = small_run();
  config.sequences = 8;
  config.accumulate = 2;
  config.model.router = router;
  config.model.shared_inner = 6;
  if (router == "hash") return config;
  config.model.losses = {.balance = 0.02, .z = 0.001};
  config.model.bias_rate = router == "top-k" ? 0.01 : 0;
  return config;
}

class TrainOverRanks : public testing::Test {
 protected:
  TrainOptions options(const std::string& name, int ranks) const {
    TrainOptions out;
    out.directory = folder.path() / name;
    out.ranks = ranks;
    out.valid_every = 4;
    return out;
  }
  std::vector<nlohmann::json> run(const TrainConfig& config, const std::string& name, int ranks) {
    (void)train(config, text, &valid, options(name, ranks));
    return log_of(folder.path() / name);
  }

  TestFolder folder;
  Text text{{folder.file("text", small_text())}};
  Text valid{{folder.file("valid", small_text(200).substr(50))}};
};

void expect_near(const std::vector<nlohmann::json>& got, const std::vector<nlohmann::json>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    SCOPED_TRACE(i);
    for (const char* key : {"loss", "valid_loss", "norm"}) {
      ASSERT_EQ(got[i].contains(key), want[i].contains(key)) << key;
      if (!want[i].contains(key)) continue;
      EXPECT_NEAR(got[i][key], want[i][key], 1e-6) << key;
    }
    for (const char* key : {"load_cv", "max_vio", "picks", "dropped", "lr", "step"}) {
      EXPECT_EQ(got[i][key], want[i][key]) << key;
    }
  }
}

TEST_F(TrainOverRanks, HasTheLossesOfOneRank) {
  for (const char* const router : {"top-k", "hash", "noisy-top-k", "chain"}) {
    SCOPED_TRACE(router);
    const std::string name = router;
    const auto one = run(run_of_ranks(router), name + "-1", 1);
    EXPECT_LT(one.back()["loss"], one.front()["loss"].get<double>() - 0.3);
    for (const int ranks : {2, 4}) {
      SCOPED_TRACE(ranks);
      expect_near(run(run_of_ranks(router), name + std::to_string(ranks), ranks), one);
    }
  }
}

TEST_F(TrainOverRanks, HasTheLossesOfOneRankWithFrozenGroupsAndAnothersWeights) {
  const TrainConfig before = run_of_ranks();
  const TrainResult begun = train(before, text, nullptr, options("begun", 1));
  TrainConfig config = before;
  config.init = begun.checkpoint;
  config.seed = 6;
  config.freeze = {Group::kEmbedding, Group::kExperts};
  const auto one = run(config, "one", 1);
  expect_near(run(config, "two", 2), one);
  config.init.clear();
  config.freeze = {Group::kRouter, Group::kNorm};
  config.model.losses = {};
  config.model.bias_rate = 0;
  const auto still = run(config, "still", 1);
  expect_near(run(config, "four", 4), still);
}

TEST_F(TrainOverRanks, HasTheSameBytesInEveryRunForAnyThreadsAndResumed) {
  const TrainConfig config = run_of_ranks();
  (void)train(config, text, nullptr, options("whole", 2));
  TrainOptions cut = options("cut", 2);
  cut.num_threads = 5;
  std::int64_t seen = 0;
  cut.on_step = [&](const StepRecord& record) { seen = record.step; };
  cut.stop = [&] { return seen == 5; };
  EXPECT_EQ(train(config, text, nullptr, cut).steps, 5);
  cut.resume = true;
  (void)train(config, text, nullptr, cut);
  EXPECT_EQ(files_below(folder.path() / "cut" / "step-000012"),
            files_below(folder.path() / "whole" / "step-000012"));
}

TEST_F(TrainOverRanks, GoesOnWithAnotherNumberOfThem) {
  const TrainConfig config = run_of_ranks();
  const auto one = run(config, "one", 1);
  TrainOptions mixed = options("mixed", 4);
  std::int64_t until = 3, seen = 0;
  mixed.on_step = [&](const StepRecord& record) { seen = record.step; };
  mixed.stop = [&] { return seen == until; };
  for (const int ranks : {4, 1, 2, 4}) {
    mixed.ranks = ranks;
    EXPECT_EQ(train(config, text, &valid, mixed).steps, until);
    mixed.resume = true;
    until += 3;
  }
  expect_near(log_of(mixed.directory), one);
}

TEST_F(TrainOverRanks, WritesTheFilesOfOneRankAndReadsThemWhole) {
  const TrainConfig config = run_of_ranks();
  const TrainResult result = train(config, text, nullptr, options("one", 1));
  const auto wanted = files_below(result.checkpoint);
  const nlohmann::json run = run_json(config, text);
  for (const int ranks : {1, 2, 4}) {
    Replicas replicas(config, options("unused", ranks));
    EXPECT_EQ(read_checkpoint(replicas, run, result.checkpoint), 12);
    const fs::path again = folder.path() / std::to_string(ranks);
    fs::create_directory(again);
    write_checkpoint(replicas, run, 12, again);
    EXPECT_EQ(files_below(again), wanted) << ranks;
    if (ranks == 1) continue;
    // A rank has its share and no more, and no file is made of a share.
    Model& model = replicas.model(1);
    EXPECT_EQ(model.num_parameters(),
              count(config.model).parameters - count(config.model).routed * (ranks - 1) / ranks);
    test::expect_error(ErrorCode::kInvalidArgument, "a rank's share of model.layers.0.mlp.experts",
                       [&] { save_model(model, again); });
    test::expect_error(ErrorCode::kInvalidArgument, "a rank's share of model.layers.0.mlp.experts",
                       [&] { load_parameters(model, again); });
  }
}

TEST_F(TrainOverRanks, EndsForAllWhereARankFailsAndCanGoOn) {
  const TrainConfig config = run_of_ranks();
  const auto wanted = run(config, "one", 2);
  TrainOptions short_wait = options("unused", 2);
  short_wait.timeout = std::chrono::milliseconds(50);
  Replicas replicas(config, short_wait);
  Batch batch;
  draw_batch(text, config.seed, 0, 8, config.model.sequence, batch);
  const auto step = [&](int rank) {
    const std::int64_t tokens = 2 * batch.length;
    return replicas.model(rank).loss_and_gradients(
        {.tokens = {batch.tokens.data() + rank * tokens, {2, batch.length}},
         .targets = {batch.targets.data() + rank * tokens, {2, batch.length}}});
  };
  double before = 0, after = 0;
  replicas.on_each([&](int rank) { (rank == 0 ? before : after) = step(rank); });
  EXPECT_EQ(before, after);
  // One throws in its step: its own error. One ends without a word: the others' deadline.
  test::expect_error(ErrorCode::kIo, "disk of rank 1", [&] {
    replicas.on_each([&](int rank) {
      if (rank == 1) throw Error(ErrorCode::kIo, "disk of rank 1");
      (void)step(rank);
    });
  });
  test::expect_error(ErrorCode::kTimeout, "rank 1", [&] {
    replicas.on_each([&](int rank) {
      if (rank == 0) (void)step(rank);
    });
  });
  replicas.on_each([&](int rank) {
    const double loss = step(rank);
    replicas.model(rank).sum_gradients();
    if (rank == 0) after = loss;
  });
  EXPECT_EQ(after, before);
}

TEST_F(TrainOverRanks, StopsOrSkipsWhereSomethingIsNotFinite) {
  TrainConfig config = run_of_ranks();
  config.schedule.peak = 1e30;
  config.schedule.warmup = 0;
  TrainOptions stop = options("stop", 2);
  stop.save_every = 1;
  const TrainResult stopped = train(config, text, nullptr, stop);
  EXPECT_EQ(stopped.end, TrainResult::End::kNotFinite);
  ASSERT_TRUE(stopped.not_finite.has_value());
  ASSERT_GE(stopped.steps, 1);
  // What was there stays, and is read by one rank.
  TrainOptions again = options("stop", 1);
  again.resume = true;
  again.stop = [] { return true; };
  EXPECT_EQ(train(config, text, nullptr, again).first_step, stopped.steps);

  TrainOptions skip = options("skip", 2);
  skip.on_nan = OnNan::kSkip;
  const TrainResult skipped = train(config, text, nullptr, skip);
  EXPECT_TRUE(skipped.skipped > 0 || skipped.not_finite->what == "weight");
}

TEST_F(TrainOverRanks, RefusesByNameBeforeAnythingIsMade) {
  const auto refused = [&](ErrorCode code, const char* words, int ranks, const auto& change) {
    TrainConfig config = run_of_ranks();
    TrainOptions run = options("x", ranks);
    change(config, run);
    test::expect_error(code, words, [&] { (void)train(config, text, nullptr, run); });
    EXPECT_FALSE(fs::exists(folder.path() / "x"));
  };
  const auto nothing = [](TrainConfig&, TrainOptions&) {};
  refused(ErrorCode::kInvalidArgument, "4 sequences of a call do not divide into 3 ranks", 3,
          nothing);
  refused(ErrorCode::kInvalidArgument, "8 ranks share 4 experts", 8,
          [](TrainConfig& c, TrainOptions&) { c.accumulate = 1; });
  refused(ErrorCode::kInvalidArgument, "0 ranks, want 1 to 64", 0, nothing);
  refused(ErrorCode::kUnsupported, "the router expert-choice over 2 ranks", 2,
          [](TrainConfig& c, TrainOptions&) {
            c.model.router = "expert-choice";
            c.model.bias_rate = 0;
          });
  refused(ErrorCode::kUnsupported, "capacity_factor=1 over 2 ranks", 2,
          [](TrainConfig& c, TrainOptions&) { c.model.capacity_factor = 1; });
}

TEST(TrainEstimateOverRanks, CountsWhatEveryRankHas) {
  const TrainConfig config = run_of_ranks();
  const ModelCounts counts = count(config.model);
  EXPECT_EQ(counts.routed, 2 * 4 * 3 * 16 * 8);
  const TrainEstimate one = estimate_training(config, 10, 1e9, 1e9);
  const TrainEstimate four = estimate_training(config, 10, 1e9, 1e9, {.ranks = 4});
  EXPECT_EQ(four.flops, one.flops);
  EXPECT_EQ(four.checkpoint_bytes, one.checkpoint_bytes);
  const auto alike = static_cast<double>(counts.parameters - counts.routed);
  EXPECT_NEAR(four.seconds - one.seconds, 3 * 10 * 32 * alike / 1e9, 1e-9);
  // Values, gradients and moments of what is alike, three times more, and windows.
  EXPECT_GT(four.bytes - one.bytes, 3 * 16 * alike);
  EXPECT_LT(four.bytes - one.bytes, 3 * 40 * alike + 4e6);
}

}  // namespace
}  // namespace switchyard::models
