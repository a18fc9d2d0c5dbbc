// Sweeps: the closed form of what capacity drops, grids as points, files that end in the middle.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>

#include "bench/measure/results.hpp"
#include "bench/sweep/capacity_case.hpp"
#include "bench/sweep/estimate.hpp"
#include "bench/sweep/uniform_drops.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/sweep/done_points.hpp"
#include "tool/sweep/duration.hpp"
#include "tool/sweep/points.hpp"

namespace switchyard::tool {
namespace {

using bench::UniformDrops;
using nlohmann::json;

/// Mean and deviation over all routings there are, each as likely.
UniformDrops enumerate(int num_tokens, int num_experts, int top_k, int capacity) {
  std::vector<std::vector<int>> choices;
  for (int set = 0; set < 1 << num_experts; ++set) {
    std::vector<int> chosen;
    for (int e = 0; e < num_experts; ++e) {
      if ((set >> e & 1) != 0) chosen.push_back(e);
    }
    if (static_cast<int>(chosen.size()) == top_k) choices.push_back(chosen);
  }
  double sum = 0;
  double squares = 0;
  double routings = 0;
  std::vector<int> counts(static_cast<std::size_t>(num_experts));
  const std::function<void(int)> go_on = [&](int token) {
    if (token == num_tokens) {
      double dropped = 0;
      for (const int n : counts) dropped += std::max(0, n - capacity);
      dropped /= num_tokens * top_k;
      sum += dropped;
      squares += dropped * dropped;
      ++routings;
      return;
    }
    for (const std::vector<int>& choice : choices) {
      for (const int e : choice) ++counts[static_cast<std::size_t>(e)];
      go_on(token + 1);
      for (const int e : choice) --counts[static_cast<std::size_t>(e)];
    }
  };
  go_on(0);
  const double mean = sum / routings;
  return {.expected = mean,
          .deviation = std::sqrt(std::max(0.0, squares / routings - mean * mean))};
}

TEST(UniformDrops, AreTheMeanOverAllRoutings) {
  for (const auto& [tokens, experts, top_k, capacity] :
       {std::array{8, 3, 1, 3}, std::array{8, 3, 2, 4}, std::array{8, 3, 2, 6},
        std::array{6, 4, 2, 2}, std::array{6, 4, 3, 5}, std::array{5, 3, 3, 4},
        std::array{5, 1, 1, 2}}) {
    const UniformDrops exact = enumerate(tokens, experts, top_k, capacity);
    const UniformDrops drops = bench::uniform_drops(tokens, experts, top_k, capacity);
    EXPECT_NEAR(drops.expected, exact.expected, 1e-12) << tokens << " " << experts << " " << top_k;
    // To the second order in -1 / (E - 1), which is as large here as it gets.
    EXPECT_NEAR(drops.deviation, exact.deviation, 0.12 * exact.deviation + 1e-9)
        << tokens << " " << experts << " " << top_k << " " << capacity;
  }
}

TEST(UniformDrops, HaveTheDeviationOfManyRoutingsWhereExpertsAreMany) {
  // 1000 routings of 32768 tokens drawn in NumPy: 1.7483% +- 0.1679%, and 9.9755% +- 0.0228%.
  const UniformDrops at_mean = bench::uniform_drops(32768, 64, 1, 512);
  EXPECT_NEAR(at_mean.expected, 0.017483, 3 * 0.001679 / std::sqrt(1000.0));
  EXPECT_NEAR(at_mean.deviation, 0.001679, 0.001679 * 3 / std::sqrt(2000.0));
  const UniformDrops below = bench::uniform_drops(32768, 64, 1, 461);
  EXPECT_NEAR(below.expected, 0.0997548, 3 * 0.000228 / std::sqrt(1000.0));
  EXPECT_NEAR(below.deviation, 0.000228, 0.000228 * 0.15);  // most experts are full: skewed
}

TEST(Duration, IsThatOfThePublishedExamples) {
  EXPECT_EQ(text_seconds(2000, 300, 150, 3000), 300);
  EXPECT_EQ(human_duration(text_seconds(2000, 300, 150, 3000)), "5 minutes");
  EXPECT_NEAR(text_seconds(10000, 500, 300, 1000) / 3600, 2.22, 0.005);
  EXPECT_EQ(human_duration(text_seconds(10000, 500, 300, 1000)), "2.22 hours");
  EXPECT_EQ(human_duration(0.25), "0.25 s");
}

/// A folder for files.
class Sweeps : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::temp_directory_path() / (std::string("sweep_test_") + info->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::string write(const std::string& text) const {
    const std::filesystem::path path = folder_ / "file";
    std::ofstream(path) << text;
    return path.string();
  }
  [[nodiscard]] Sweep grid(const std::string& text) const {
    Options options;
    options.command = kSweep;
    options.grid = write(text);
    return sweep_of(options);
  }
  /// What a grid that is none is told.
  [[nodiscard]] std::string refusal(const std::string& text) const {
    try {
      static_cast<void>(grid(text));
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  }

  std::filesystem::path folder_;
};

constexpr const char* kSmall =
    R"("experts": [4, 8], "top_k": 2, "hidden": 64, "inner": 32, "compute": "f32")";

TEST_F(Sweeps, AGridIsEveryCombinationAndItsOrderThatOfTheOptions) {
  const Sweep sweep =
      grid(std::string(R"({"work": "layer", "name": "mine", "capacity_factor": [null, 1.25],
                              "num_tokens": [16, 32], )") +
           kSmall + "}");
  EXPECT_EQ(sweep.name, "mine");
  ASSERT_EQ(sweep.points.size(), 8U);
  EXPECT_EQ(sweep.points[1].at, json({{"capacity_factor", 1.25},
                                      {"num_tokens", 16},
                                      {"experts", 4},
                                      {"top_k", 2},
                                      {"hidden", 64},
                                      {"inner", 32},
                                      {"compute", "f32"}}));
  const bench::LayerCase& last = sweep.points.back().work.layer;
  EXPECT_EQ(last.num_tokens, 32);
  EXPECT_EQ(last.config.router.num_experts, 8);
  EXPECT_EQ(last.options.capacity_factor, 1.25);
  EXPECT_EQ(last.dtype, DType::kF32);
  EXPECT_FALSE(sweep.points.front().work.layer.options.capacity_factor);
}

TEST_F(Sweeps, TokensOfARankGrowWithTheRanks) {
  const Sweep sweep = grid(
      std::string(R"({"work": "layer", "ranks": [1, 4], "tokens_per_rank": 8, )") + kSmall + "}");
  ASSERT_EQ(sweep.points.size(), 4U);
  EXPECT_EQ(sweep.points.front().work.layer.num_tokens, 8);
  EXPECT_EQ(sweep.points.back().work.layer.num_tokens, 32);
  EXPECT_EQ(sweep.points.back().work.layer.num_ranks, 4);
  EXPECT_EQ(sweep.points.back().at.at("num_tokens"), 32);
}

TEST_F(Sweeps, ARouterWithoutKIsOnePointForAllK) {
  const Sweep sweep = grid(R"({"work": "router", "router": ["top-k", "gshard"], "top_k": [1, 2],
                               "num_tokens": 8, "experts": 4, "hidden": 64})");
  ASSERT_EQ(sweep.points.size(), 3U);
  int without = 0;
  for (const SweepPoint& point : sweep.points) without += point.at.contains("top_k") ? 0 : 1;
  EXPECT_EQ(without, 1);
}

/// What an H200 took of its memory for points of "padding" (results/h200-sweeps.jsonl), less the
/// workspaces, whose size only that GPU says.
TEST_F(Sweeps, TheEstimateOfAGpuCountsItsBuffers) {
  const bench::Machine h200{.gpu_l2_bytes = 62914560, .gpu_memory_bytes = 150000000000};
  const bench::Limits limits{.bandwidth = 4.2e12,
                             .read_bandwidth = 4.3e12,
                             .flops_f32 = 5e13,
                             .flops_bf16 = 7.5e14,
                             .flops_f16 = 7.5e14,
                             .tensor_router = true};
  const auto estimate = [&](const char* layout, const char* factor) {
    json point = {{"work", "layer"}, {"num_tokens", 4096}, {"experts", 16},    {"top_k", 2},
                  {"hidden", 1024},  {"inner", 1024},      {"compute", "bf16"}};
    point["layout"] = layout;
    point["capacity_factor"] = json::parse(factor);
    bench::SuiteCase work = grid(point.dump()).points.front().work;
    work.layer.options.backend = Backend::kCuda;
    return bench::estimate_case(work, h200, limits, {.normals = 2.6e7, .copied = 1.6e9});
  };
  constexpr double kWorkspaces = 3 * 4.33e6;
  EXPECT_NEAR(estimate("padded", "null").bytes + kWorkspaces, 1987722304, 2e7);
  EXPECT_NEAR(estimate("padded", "4.0").bytes + kWorkspaces, 778.2e6, 8e6);
  EXPECT_NEAR(estimate("compact", "1.0").bytes + kWorkspaces, 442.3e6, 4e6);
  EXPECT_NEAR(estimate("compact", "1.0").seconds, 0.105, 0.02);
}

TEST_F(Sweeps, AnUnknownKeyIsToldTheKnownOnes) {
  const std::string said =
      refusal(std::string(R"({"work": "layer", "num_tokens": 8, "colour": 1, )") + kSmall + "}");
  for (const char* word :
       {"--grid: ", "'colour'", "num_tokens", "tokens_per_rank", "capacity_factor"}) {
    EXPECT_NE(said.find(word), std::string::npos) << said;
  }
  // A key of another work, too.
  EXPECT_NE(
      refusal(R"({"work": "capacity", "num_tokens": 8, "inner": 32})").find("'inner' is no key"),
      std::string::npos);
}

TEST_F(Sweeps, AWrongValueIsNamed) {
  const auto layer = [](const std::string& more) {
    return R"({"work": "layer", )" + std::string(kSmall) + ", " + more + "}";
  };
  for (
      const auto& [text, word] : std::vector<std::pair<std::string, std::string>>{
          {"[]", "no object"},
          {"{", "is no JSON"},
          {R"({"work": "sleep", "num_tokens": 1})", "layer, pack, router, capacity"},
          {R"({"num_tokens": 1})", "work: missing"},
          {layer(R"("num_tokens": [])"), "the list is empty"},
          {layer(R"("num_tokens": [8, 8])"), "8 is listed twice"},
          {layer(R"("num_tokens": 8, "num_tokens": 9)"), "is there twice"},
          {layer(R"("num_tokens": "8,9")"), "want a whole number"},
          {layer(R"("num_tokens": -1)"), "-1"},
          {layer(R"("num_tokens": 1.5)"), "1.5 is no value"},
          {layer(R"("num_tokens": [[1]])"), "[1] is no value"},
          {layer(R"("activation": "silu")"), "num_tokens is missing"},
          {layer(R"("num_tokens": 8, "tokens_per_rank": 8)"), "both given"},
          {layer(R"("num_tokens": 8, "plain": 1)"), "neither true nor false"},
          {layer(R"("num_tokens": 8, "skew": "even")"), "'even' is unknown"},
          {layer(R"("num_tokens": 8, "router": "nobody")"), "nobody"},
          {layer(R"("num_tokens": 8, "router": "relu", "skew": "zipf:1")"), "both given"},
          {layer(R"("num_tokens": 8, "router": "relu", "capacity_factor": 1.0)"), "no capacity"},
          {layer(R"("num_tokens": 8, "model": "mixtral-8x7b")"), "has its sizes"},
          {R"({"work": "capacity", "num_tokens": 8, "experts": 4, "top_k": 8, "capacity_factor": 1})",
           "exceeds"},
          {R"({"work": "capacity", "num_tokens": 8, "experts": 4, "top_k": 2})",
           "capacity_factor is missing"}}) {
    EXPECT_NE(refusal(text).find(word), std::string::npos) << text << ": " << refusal(text);
  }
}

TEST_F(Sweeps, MeasuredDropsAreWithinThreeStandardErrors) {
  const Sweep sweep = grid(R"({"work": "capacity", "num_tokens": 2048, "experts": 16, "top_k": 2,
                               "capacity_factor": [0.9, 1.0, 1.1, 2.0]})");
  for (const SweepPoint& point : sweep.points) {
    const bench::CaseResult result =
        bench::run_capacity_case(point.work.layer, {.bandwidth = 1, .flops_f32 = 1});
    EXPECT_TRUE(result.holds) << result.verdict;
    EXPECT_EQ(result.stages.front().samples, 200U);
    EXPECT_GT(result.more.at("capacity").at("standard_error").get<double>(), 0);
  }
}

/// Of a file with `lines` of points and then `tail`: how many points are done, and the file after.
struct Mended {
  int done = 0;
  std::string text{};
};

TEST_F(Sweeps, WhatAKilledSweepHasLeftAtTheEndOfAFileIsCutOff) {
  const Sweep sweep =
      grid(std::string(R"({"work": "layer", "num_tokens": [1, 2, 3], )") + kSmall + "}");
  const SweepPlace place{
      .suite = "grid", .commit = "c", .cpu = "p", .isa = "i", .backend = "cpu", .seed = 17};
  const auto line_of = [&](std::size_t i) {
    const SweepPoint& point = sweep.points[i];
    return json{{"suite", "grid"},
                {"work", "layer"},
                {"point", point.at},
                {"lines", 2},
                {"commit", "c"},
                {"backend", "cpu"},
                {"seed", 17},
                {"case", {{"threads", point.work.layer.num_threads}}},
                {"machine", {{"cpu", "p"}, {"isa", "i"}, {"gpu", ""}}}}
               .dump() +
           "\n";
  };
  const auto mended = [&](const std::string& text) {
    const std::string path = write(text);
    const DonePoints done(path, place);
    Mended out;
    for (const SweepPoint& point : sweep.points) out.done += done.has(point) ? 1 : 0;
    std::ifstream file(path);
    out.text.assign(std::istreambuf_iterator<char>(file), {});
    return out;
  };
  const std::string one = line_of(0) + line_of(0);
  const std::string foreign = "{\"program\": \"streaming_bench\"}\n";
  for (const std::string& before : {std::string(), foreign, one, foreign + one}) {
    const int done = before.ends_with(one) ? 1 : 0;
    const std::string next = line_of(1) + line_of(1);
    for (std::size_t size = 0; size < next.size() - 1; size += 7) {  // killed after `size` bytes
      const Mended out = mended(before + next.substr(0, size));
      EXPECT_EQ(out.done, done) << size;
      EXPECT_EQ(out.text, before) << size;
    }
    EXPECT_EQ(mended(before + next).done, done + 1);
    EXPECT_EQ(mended(before + next).text, before + next);
  }
  EXPECT_EQ(mended(one + foreign.substr(0, foreign.size() - 1)).text, one + foreign);
  EXPECT_THROW(mended("no JSON\n" + one), UsageError);
  EXPECT_EQ(mended(line_of(0) + foreign).text, line_of(0) + foreign);  // not at the end: kept
}

}  // namespace
}  // namespace switchyard::tool
