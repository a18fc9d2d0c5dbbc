// Studies: files and what is wrong with them, tuned rates, the order of runs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <sstream>

#include "switchyard/error.hpp"
#include "switchyard/models/model.hpp"
#include "tests/tool/study/small_study.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/study/plan.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// The message of a study that is refused.
std::string refusal(const json& study) {
  try {
    static_cast<void>(parsed(study));
  } catch (const UsageError& error) {
    return error.what();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(StudyFile, SaysWhatArmsShareAndWhatTheyDoNot) {
  const StudyConfig study = parsed(small_study());
  EXPECT_EQ(study.name, "file");
  EXPECT_EQ(study.texts, std::vector<std::string>{"here/a.txt"});
  ASSERT_EQ(study.arms.size(), 3U);
  EXPECT_EQ(study.reference, 1U);
  EXPECT_EQ(study.arms[0].train.model.top_k, 1);
  EXPECT_EQ(study.arms[1].train.model.top_k, 2);
  EXPECT_EQ(study.arms[2].train.model.losses.balance, 0);
  for (const StudyArm& arm : study.arms) {
    EXPECT_EQ(arm.train.model.head_dim, 8);
    EXPECT_EQ(arm.train.sequences, 2);
    EXPECT_EQ(arm.train.schedule.steps, 20);
    EXPECT_EQ(arm.train.schedule.warmup, 2);
  }
  EXPECT_EQ(study.valid_every, 2);
  json implied = small_study();
  implied["arms"][0].erase("model");
  EXPECT_EQ(parsed(implied).arms[0].train.model.top_k, 1);  // of the router
  json file = small_study();
  file.erase("tuning");
  EXPECT_EQ(parsed(file).tuning.rates, (std::vector<double>{0.0015, 0.003, 0.006, 0.012}));
  EXPECT_EQ(parsed(file).tuning.steps, 10);
}

TEST(StudyFile, WhatIsWrongIsNamed) {
  const auto refused = [](const char* pointer, const json& value,
                          const std::vector<std::string>& words) {
    json study = small_study();
    study[json::json_pointer(pointer)] = value;
    const std::string message = refusal(study);
    for (const std::string& word : words) {
      EXPECT_NE(message.find(word), std::string::npos)
          << pointer << " " << value << ": " << message;
    }
  };
  refused("/colour", 1, {"here/file.json", "'colour'", "arms", "seeds"});
  refused("/model/width", 1, {"model", "'width'", "hidden"});
  refused("/model/preset", "huge", {"preset", "huge", "smoke"});
  refused("/model/hidden", 0, {"model.hidden", "0", "1"});
  refused("/model/hidden", "16", {"model.hidden", "\"16\"", "whole number"});
  refused("/model/hidden", 16.5, {"model.hidden", "16.5"});
  refused("/train/steps", -1, {"train.steps", "-1"});
  refused("/train/schedule", "up", {"train.schedule", "up", "cosine"});
  refused("/train/decay", 2, {"train", "'decay'"});
  refused("/train/beta1", 1.5, {"train.beta1", "1.5"});
  refused("/train/compute", "f8", {"compute", "f8", "bf16"});
  refused("/seeds", json::array(), {"seeds", "[]"});
  refused("/seeds", {1, 1}, {"seeds", "1", "twice"});
  refused("/seeds", {1, 9}, {"seeds", "9", "tuned"});
  refused("/seeds", {1.5}, {"seeds", "1.5"});
  refused("/seeds", json(1001, 7), {"seeds", "1001", "1000"});
  refused("/tuning/rates", {0.1, 0.1}, {"tuning.rates", "ascending"});
  refused("/tuning/rates", {0}, {"tuning.rates", "0"});
  refused("/tuning/grid", {1}, {"tuning", "'grid'", "rates"});
  refused("/reference", "d", {"reference", "'d'", "a, b, c"});
  refused("/arms", json::array(), {"arms"});
  refused("/arms", 3, {"arms"});
  refused("/arms", json(201, json::object()), {"arms", "201", "200"});
  refused("/arms/0/name", "b", {"arms", "'b'", "twice"});
  refused("/arms/0/name", "../up", {"name", "../up"});
  refused("/arms/0/name", "", {"name"});
  refused("/arms/0/thaw", true, {"arms[0]", "'thaw'", "router"});
  refused("/arms/0/router", "top-q", {"'a'", "top-q"});
  refused("/arms/0/router", "switch:jitters=1", {"'a'", "jitters"});
  refused("/arms/0/model/sequence", 8, {"'a'", "'sequence'"});
  refused("/arms/0/model/experts", 0, {"'a'", "experts=0"});
  refused("/arms/0/train", json{{"steps", 5}}, {"'a'", "'steps'"});
  refused("/arms/0/model/top_k", 2, {"'a'", "top_k: 2", "switch takes 1"});
  refused("/arms/1/router", "top-k:top-k=9", {"'b'", "9"});
  refused("/arms/2/model/balance", 0.01, {"'c'", "hash", "losses"});
  refused("/arms/1/model", json{{"capacity_factor", -1}}, {"capacity_factor", "-1"});
  refused("/arms/1/model", json{{"drop_policy", "all"}}, {"drop_policy: 'all'", "token"});
  refused("/arms/1/model", 3, {"'b'", "no JSON object"});
  refused("/equal_time", 1, {"equal_time", "true or false"});
  json study = small_study();
  study.erase("model");
  EXPECT_NE(refusal(study).find("'model' is missing"), std::string::npos);
  EXPECT_THROW(static_cast<void>(parse_study("{", "x.json")), Error);
  EXPECT_THROW(static_cast<void>(parse_study("[]", "x.json")), UsageError);
  EXPECT_THROW(static_cast<void>(parse_study(R"({"name": "a", "name": "b"})", "x.json")), Error);
}

TEST(StudyFile, ThoseOfTheProjectAreRight) {
  for (const char* name : {"smoke", "cpu-10min"}) {
    const std::filesystem::path path =
        std::filesystem::path(SWITCHYARD_STUDIES) / (std::string(name) + ".json");
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    const StudyConfig study = parse_study(text.str(), path);
    EXPECT_EQ(study.name, name);
    EXPECT_EQ(study.arms.size(), 5U);
    for (const std::string& read : study.texts) EXPECT_TRUE(std::filesystem::exists(read)) << read;
    for (const std::string& read : study.valid) EXPECT_TRUE(std::filesystem::exists(read)) << read;
    // Equal operations: all but the gates.
    const auto flops_of = [&](std::size_t arm) {
      return models::count(study.arms[arm].train.model).flops_per_token;
    };
    for (std::size_t i = 0; i < study.arms.size(); ++i) {
      EXPECT_NEAR(flops_of(i) / flops_of(study.reference), 1, 0.011) << study.arms[i].name;
    }
    // Pairs: what two arms share begins with the same bits, and sees the same bytes.
    const auto model_of = [&](std::size_t arm) {
      models::ModelConfig config = study.arms[arm].train.model;
      return models::Model(config, {.seed = 5});
    };
    const models::Model reference = model_of(study.reference);
    for (std::size_t i = 0; i < study.arms.size(); ++i) {
      const models::TrainConfig mine = train_config(study, {.arm = i, .seed = 5, .steps = 7});
      const models::TrainConfig theirs =
          train_config(study, {.arm = study.reference, .seed = 5, .steps = 7});
      EXPECT_EQ(mine.seed, theirs.seed);
      EXPECT_EQ(mine.sequences, theirs.sequences);
      EXPECT_EQ(mine.model.sequence, theirs.model.sequence);
      const models::Model model = model_of(i);
      int shared = 0;
      for (const models::ParameterTensor& tensor : model.parameters()) {
        for (const models::ParameterTensor& other : reference.parameters()) {
          if (tensor.name != other.name || tensor.shape != other.shape) continue;
          ++shared;
          EXPECT_EQ(std::memcmp(tensor.value, other.value, std::size_t(tensor.size()) * 4), 0)
              << study.arms[i].name << " " << tensor.name;
        }
      }
      EXPECT_GE(shared, 12) << study.arms[i].name;
    }
  }
}

TEST(StudyTuning, TriesAllThenBeyondTheEdgeThenTakesTheParabola) {
  StudyTuning tuning{.rates = {0.001, 0.002, 0.004}, .extend = 1};
  std::vector<TriedRate> tried;
  const auto loss_of = [](double rate) { return 2 + std::pow(std::log(rate / 0.0052), 2); };
  std::vector<double> order;
  for (TunedRate now = tune(tuning, tried); now.next; now = tune(tuning, tried)) {
    order.push_back(*now.next);
    tried.emplace_back(*now.next, loss_of(*now.next));
  }
  EXPECT_EQ(order, (std::vector<double>{0.001, 0.002, 0.004, 0.008}));
  const TunedRate found = tune(tuning, tried);
  EXPECT_DOUBLE_EQ(found.rate, 0.0052);
  EXPECT_FALSE(found.is_edge);
  EXPECT_NEAR(found.above.value(), loss_of(0.008) - loss_of(0.004), 1e-12);
  EXPECT_NEAR(found.below.value(), loss_of(0.002) - loss_of(0.004), 1e-12);
  // The other side, and no further than `extend`.
  tried = {{0.001, 1.0}, {0.002, 2.0}, {0.004, 3.0}};
  EXPECT_EQ(tune(tuning, tried).next, 0.0005);
  tried.emplace_back(0.0005, 0.5);
  EXPECT_FALSE(tune(tuning, tried).next);
  EXPECT_TRUE(tune(tuning, tried).is_edge);
  EXPECT_EQ(tune(tuning, tried).rate, 0.0005);
  // Diverged neighbours have no parabola; where all diverged the smallest is taken.
  tried = {{0.001, 1.5}, {0.002, 1.0}, {0.004, std::nullopt}};
  EXPECT_EQ(tune(tuning, tried).rate, 0.002);
  EXPECT_FALSE(tune(tuning, tried).above);
  tuning.extend = 0;
  tried = {{0.001, std::nullopt}, {0.002, std::nullopt}, {0.004, std::nullopt}};
  EXPECT_EQ(tune(tuning, tried).rate, 0.001);
  EXPECT_TRUE(tune(tuning, tried).is_edge);
  EXPECT_EQ(tune({.rates = {0.3}}, {}).rate, 0.3);
}

TEST(StudyPlan, RunsComeInTheOrderOfTheirWorth) {
  json file = small_study();
  file["equal_time"] = true;
  const StudyConfig study = parsed(file);
  RunResults results;
  std::vector<std::string> order;
  while (const auto run = next_run(study, {0, 1}, results)) {
    order.push_back(name_of(study, *run));
    ASSERT_LT(order.size(), 99U);
    const double loss = 2 + std::pow(std::log(run->rate / 0.002), 2);
    results[order.back()] = result_of(loss, run->rate, run->arm == 0 ? 1500 : 1000);
    EXPECT_EQ(run->steps, run->kind == RunKind::kTune ? 10 : run->kind == RunKind::kTest ? 20 : 30);
    EXPECT_EQ(run->seed == 9, run->kind == RunKind::kTune);
  }
  EXPECT_EQ(order, (std::vector<std::string>{
                       "a/tune-0.001", "a/tune-0.002", "a/tune-0.004", "b/tune-0.001",
                       "b/tune-0.002", "b/tune-0.004", "a/seed-1", "b/seed-1", "a/seed-2",
                       "b/seed-2", "a/seed-3", "b/seed-3", "a/time-1", "a/time-2", "a/time-3"}));
  EXPECT_EQ(planned_runs(study, {0, 1}).size(), order.size());
  const models::TrainConfig config =
      train_config(study, {.arm = 0, .kind = RunKind::kTime, .seed = 2, .rate = 0.5, .steps = 30});
  EXPECT_EQ(config.schedule.steps, 30);
  EXPECT_EQ(config.schedule.warmup, 3);
  EXPECT_EQ(config.schedule.peak, 0.5);
  EXPECT_EQ(config.seed, 2U);
}

/// Losses by the rate, best beyond the grid, so that it is extended.
json made_up_result(const StudyRun& run) {
  return result_of(2 + std::pow(std::log(run.rate / 0.009), 2) + 0.1 * static_cast<double>(run.arm),
                   run.rate, run.arm == 0 ? 1500 : 1000);
}

TEST(StudyPlan, SeveralAtATimeAreTheSameRunsWhateverEndsFirst) {
  json file = small_study();
  file["equal_time"] = true;
  file["arms"].push_back({{"name", "d"}, {"router", "top-k:top-k=2"}, {"init", "b"}});
  const StudyConfig study = parsed(file);
  const std::vector<std::size_t> arms = {0, 1, 3};
  RunResults one_by_one;
  while (const auto run = next_run(study, arms, one_by_one)) {
    one_by_one[name_of(study, *run)] = made_up_result(*run);
  }
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    RunResults results;
    std::map<std::string, StudyRun> under_way;
    std::set<std::string> running;
    std::size_t most = 0;
    while (true) {
      if (running.size() < 5) {
        if (const auto run = next_run(study, arms, results, running)) {
          const std::string name = name_of(study, *run);
          EXPECT_FALSE(results.contains(name)) << name;
          EXPECT_TRUE(running.insert(name).second) << name;
          under_way[name] = *run;
          if (const auto from = init_run(study, *run, results)) {
            EXPECT_TRUE(results.contains(name_of(study, *from))) << name;
          }
          if (run->kind != RunKind::kTune) {
            EXPECT_FALSE(tuned_rate(study, run->arm, results).next) << name;
          }
          most = std::max(most, running.size());
          continue;
        }
      }
      if (running.empty()) break;
      auto ends = under_way.begin();
      std::advance(ends, random() % under_way.size());
      results[ends->first] = made_up_result(ends->second);
      running.erase(ends->first);
      under_way.erase(ends);
    }
    EXPECT_EQ(results, one_by_one);
    EXPECT_EQ(most, 5U);
  }
}

}  // namespace
}  // namespace switchyard::tool
