// What the runs of a study are said to show: pairs, intervals, sentences.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "bench/measure/inference.hpp"
#include "tests/tool/study/small_study.hpp"
#include "tool/study/findings.hpp"
#include "tool/study/plan.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// Runs of three arms with these losses, seeds 1 to 3.
RunResults results_with(const std::vector<std::vector<double>>& losses) {
  RunResults results;
  for (std::size_t arm = 0; arm < losses.size(); ++arm) {
    for (std::size_t i = 0; i < losses[arm].size(); ++i) {
      const std::string name(1, char('a' + arm));
      results[name + "/seed-" + std::to_string(i + 1)] = result_of(losses[arm][i]);
    }
  }
  return results;
}

std::string text_of(const std::vector<std::string>& sentences) {
  return std::accumulate(sentences.begin(), sentences.end(), std::string());
}

TEST(StudyFindings, SayWhatTheirIntervalsCarryAndNoMore) {
  const StudyConfig study = parsed(small_study());
  // a is lower by 0.1 and little noise; c is not to be told from b.
  const RunResults results =
      results_with({{1.9, 2.001, 2.1}, {2.0, 2.1, 2.201}, {2.02, 2.06, 2.21}});
  const json arms = findings_of(study, results);
  const json& found = arms[0]["difference"];
  const bench::PairedTest wanted = bench::paired_test({-0.1, 2.001 - 2.1, 2.1 - 2.201});
  EXPECT_NEAR(found["mean"], wanted.mean, 1e-12);
  EXPECT_NEAR(found["low"], wanted.interval.low, 1e-12);
  EXPECT_NEAR(found["holm"], 2 * wanted.p.value(), 1e-12);
  EXPECT_EQ(found["verdict"], "lower");
  EXPECT_EQ(arms[2]["difference"]["verdict"], "none found");
  EXPECT_NEAR(arms[2]["difference"]["smallest"],
              arms[2]["difference"]["deviation"].get<double>() * bench::smallest_effect(3, 0.025),
              1e-12);
  EXPECT_FALSE(arms[1].contains("difference"));
  const std::string text = text_of(sentences_of(study, arms, {3.0, 2.05}, 1));
  EXPECT_NE(text.find("a against b: a lower loss (-0.1000"), std::string::npos) << text;
  EXPECT_NE(text.find("c against b: no difference found"), std::string::npos) << text;
  EXPECT_NE(text.find("would have been"), std::string::npos) << text;
  EXPECT_NE(text.find("b is 0.050 nats a byte above byte n-grams of order 2"), std::string::npos)
      << text;
}

TEST(StudyFindings, OneSeedCarriesNothing) {
  const StudyConfig study = parsed(small_study());
  const json arms = findings_of(study, results_with({{1.0}, {2.0}}));
  EXPECT_EQ(arms[0]["difference"]["verdict"], "one seed");
  EXPECT_TRUE(arms[0]["difference"]["holm"].is_null());
  EXPECT_TRUE(arms[2]["difference"].is_null());
  EXPECT_NE(text_of(sentences_of(study, arms, {}, 1)).find("carries no claim"), std::string::npos);
}

TEST(StudyFindings, DivergedRunsStayAndLeaksAreNoFamily) {
  const StudyConfig study = parsed(small_study());
  RunResults results = results_with({{1.9, NAN, 2.1}, {2.0, 2.1, 2.2}, {1.0, 1.1, 1.201}});
  results["c/seed-2"]["leaks"]["later tokens"] = 0.5;
  json arms = findings_of(study, results);
  EXPECT_EQ(arms[0]["difference"]["verdict"], "diverged");
  EXPECT_EQ(arms[0]["diverged"].size(), 1U);
  EXPECT_EQ(arms[0]["n"], 3);
  EXPECT_EQ(arms[0]["difference"]["n"], 2);
  EXPECT_EQ(arms[2]["difference"]["verdict"], "leaks");
  EXPECT_EQ(arms[2]["leaks"]["later tokens"], 0.5);
  const std::string text = text_of(sentences_of(study, arms, {}, 1));
  EXPECT_NE(text.find("a diverged with seed 2: step 3"), std::string::npos) << text;
  EXPECT_NE(text.find("proves nothing"), std::string::npos) << text;
  EXPECT_EQ(text.find("lower loss"), std::string::npos) << text;
  // A reference that diverged carries no claim either.
  results = results_with({{1.9, 2.0, 2.1}, {2.0, NAN, 2.2}, {1.0, 1.1, 1.201}});
  arms = findings_of(study, results);
  EXPECT_EQ(arms[0]["difference"]["verdict"], "diverged");
}

TEST(StudyFindings, WhatTrainedForTooLongIsSaidTo) {
  const StudyConfig study = parsed(small_study());
  RunResults results = results_with({{1.9}, {2.0}});
  const auto curve = [](std::vector<double> losses) {
    json points = json::array();
    for (const double loss : losses) {
      const std::size_t step = 10 * (points.size() + 1);
      points.push_back({{"step", step},
                        {"valid_loss", loss},
                        {"seconds", 1},
                        {"load_cv", nullptr},
                        {"max_vio", nullptr},
                        {"picks", 2},
                        {"dropped", nullptr}});
    }
    return points;
  };
  results["a/seed-1"]["curve"] = curve({1.8, 1.7, 1.9});
  results["b/seed-1"]["curve"] = curve({2.1, 1.999, 2.0});
  const std::string text = text_of(sentences_of(study, findings_of(study, results), {}, 7.96));
  EXPECT_NE(text.find("a: from 1.7000 nats a byte behind step 20 its loss rises to 1.9000"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("reads the text 8.0 times"), std::string::npos) << text;
  EXPECT_EQ(text.find("b: from"), std::string::npos) << text;
}

TEST(StudyFindings, AnotherTextMaySayOtherwise) {
  const StudyConfig study = parsed(small_study());
  RunResults results = results_with({{1.9, 2.001, 2.1}, {2.0, 2.1, 2.201}});
  // All of the difference is in one block of many, and against it in the others.
  for (auto& [name, result] : results) {
    json blocks = json::array();
    for (int i = 0; i < 12; ++i) {
      const double gain = i == 0 ? -40 : 2.5;
      blocks.push_back({100, 200 + (name.starts_with("a/") ? gain : 0)});
    }
    result["blocks"] = blocks;
  }
  const json arms = findings_of(study, results);
  EXPECT_EQ(arms[0]["difference"]["verdict"], "this text");
  EXPECT_NE(text_of(sentences_of(study, arms, {}, 1)).find("only on this text"), std::string::npos);
}

}  // namespace
}  // namespace switchyard::tool
