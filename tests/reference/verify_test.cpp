#include "verify/verify.hpp"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "switchyard/error.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/sanitized.hpp"
#include "verify/case.hpp"

// `switchyard verify` on random cases, and what it says when something is wrong.

namespace switchyard::verify {
namespace {

const std::vector<int> kRanks{1, 2, 3, 4, 5, 8};
const std::vector<int> kThreads{1, 2};

Case case_number(std::uint64_t index) {
  return make_case(3, index, kRanks, kThreads, Backend::kCpu);
}

TEST(Verify, RandomCasesHold) {
  constexpr std::int64_t kCases = kSanitized ? 300 : 1000;
  std::ostringstream out;
  EXPECT_EQ(run_verify({.cases = kCases, .seed = 1}, out), 0) << out.str();
  EXPECT_EQ(out.str(), std::to_string(kCases) + " cases checked against the reference: all hold\n");
}

TEST(Verify, ACaseSurvivesTheRoundTripThroughJson) {
  for (std::uint64_t index = 0; index < 500; ++index) {
    const Case test = case_number(index);
    const nlohmann::json json = to_json(test);
    const Case back = case_from_json(nlohmann::json::parse(json.dump()));
    ASSERT_EQ(to_json(back), json);
    ASSERT_EQ(back.layer.experts.num_experts, test.layer.experts.num_experts);
    ASSERT_EQ(back.layer.shared.num_experts, test.layer.shared.num_experts);
    ASSERT_EQ(back.layer.shared.activation == test.layer.shared.activation ||
                  test.layer.shared.num_experts == 0,
              true);
  }
}

TEST(Verify, ANumberOfACaseOutOfRangeIsRefusedByName) {
  const nlohmann::json good = to_json(case_number(1));
  const auto refused = [&](const char* name, const nlohmann::json& value) {
    nlohmann::json bad = good;
    bad[name] = value;
    try {
      (void)case_from_json(nlohmann::json::parse(bad.dump()));
      ADD_FAILURE() << name << " = " << value << " is taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      const std::string words = error.what();
      EXPECT_NE(words.find(fmt::format("\"{}\"", name)), std::string::npos) << words;
      EXPECT_NE(words.find(value.dump()), std::string::npos) << words;
    }
  };
  // Each narrows to a number that would be taken.
  constexpr std::int64_t kBeyond32 = (std::int64_t{1} << 32) + 4;
  constexpr std::uint64_t kBeyond63 = (std::uint64_t{1} << 63) + 4;
  for (const char* name : {"E", "K", "H", "I", "T", "groups", "top_groups", "shared_inner",
                           "reduction_groups", "alignment", "ranks", "threads", "again_threads"}) {
    for (const auto& value :
         {nlohmann::json(-1), nlohmann::json(kBeyond32), nlohmann::json(std::int64_t{1} << 60),
          nlohmann::json(kBeyond63), nlohmann::json(2.5), nlohmann::json(true), nlohmann::json("2"),
          nlohmann::json()}) {
      refused(name, value);
    }
  }
  for (const char* name : {"E", "K", "H", "I", "groups", "top_groups", "reduction_groups",
                           "alignment", "ranks", "threads", "again_threads"}) {
    refused(name, 0);
  }
  refused("seed", -1);
  refused("seed", kBeyond63);
  refused("scale", nlohmann::json::parse("1e300"));
  refused("capacity_factor", -0.5);
  refused("capacity_factor", "x");
  refused("gated", 1);
  refused("score", 3);
  refused("router", 3);
  refused("router", std::string(300, 'x'));
}

TEST(Verify, ACaseThatIsNoLayerOrFitsIntoNoMachineIsRefused) {
  const auto refused = [&](const char* words, const std::map<std::string, std::int64_t>& changes) {
    nlohmann::json bad = to_json(case_number(1));
    bad["router"] = "";
    for (const auto& [name, value] : changes) bad[name] = value;
    test::expect_error(ErrorCode::kInvalidArgument, words, [&] { (void)case_from_json(bad); });
  };
  refused("top_k=9 exceeds num_experts=8", {{"E", 8}, {"K", 9}, {"groups", 1}, {"top_groups", 1}});
  refused("groups=3 does not divide num_experts=8",
          {{"E", 8}, {"K", 1}, {"groups", 3}, {"top_groups", 1}});
  refused("reduction_groups=3", {{"reduction_groups", 3}});
  const std::map<std::string, std::int64_t> wide = {
      {"E", 65536}, {"K", 1}, {"groups", 1}, {"top_groups", 1}, {"H", 1 << 20}, {"I", 1 << 20}};
  refused("--case: \"E\" x \"H\" x \"I\" is 65536 x 1048576 x 1048576", wide);
  refused("\"T\" = 1048576 tokens", {{"T", 1 << 20},
                                     {"H", 1 << 20},
                                     {"I", 1},
                                     {"E", 1},
                                     {"K", 1},
                                     {"groups", 1},
                                     {"top_groups", 1}});
}

TEST(Verify, WhatARouterDoesNotGoWithIsRefusedAndNoMiss) {
  nlohmann::json good = to_json(case_number(1));
  good.update({{"E", 8},
               {"K", 2},
               {"T", 12},
               {"groups", 1},
               {"top_groups", 1},
               {"score", "softmax"},
               {"router", "expert-choice:capacity-factor=1"},
               {"data", "plain"},
               {"given", "nothing"},
               {"selection_bias", false},
               {"capacity_factor", 0},
               {"drop_policy", "token"}});
  EXPECT_NO_THROW((void)case_from_json(good));
  const auto refused = [&](const char* words, const nlohmann::json& changes) {
    nlohmann::json bad = good;
    bad.update(changes);
    test::expect_error(ErrorCode::kInvalidArgument, words, [&] { (void)case_from_json(bad); });
  };
  refused("--case: \"selection_bias\" is true", {{"selection_bias", true}});
  refused("\"capacity_factor\" is 1.5", {{"capacity_factor", 1.5}});
  refused("\"drop_policy\" is reroute", {{"drop_policy", "reroute"}});
  refused("\"data\" is nan", {{"router", "hash"}, {"data", "nan"}});
  refused("\"given\" is random", {{"given", "random"}});
}

TEST(Verify, TheSameSeedGivesTheSameCasesAndAnotherGivesOthers) {
  const auto text = [](std::uint64_t seed, std::uint64_t index) {
    return to_json(make_case(seed, index, kRanks, kThreads, Backend::kCpu)).dump();
  };
  EXPECT_EQ(text(5, 9), text(5, 9));
  EXPECT_NE(text(5, 9), text(5, 10));
  EXPECT_NE(text(5, 9), text(6, 9));
}

TEST(Verify, TheCasesReachEveryOptionAndEveryNastyInput) {
  std::set<std::string> seen;
  const auto note = [&](const char* what, auto value) {
    seen.insert(std::string(what) + " " + std::to_string(static_cast<int>(value)));
  };
  for (std::uint64_t index = 0; index < 4000; ++index) {
    const Case test = case_number(index);
    const std::int32_t num_experts = test.layer.router.num_experts;
    const TopKRouter& router = test.base;
    std::string words = test.router;
    if (const auto network = words.find("network="); network != std::string::npos) {
      words.erase(network - 1);
      if (words == "top-k") words.clear();
    }
    seen.insert("router " + words);
    note("network", test.layer.router.network.kind);
    note("training", test.training);
    note("data", test.data);
    note("given", test.given);
    note("split", test.split);
    note("again", test.again);
    note("score", router.score);
    note("group score", router.group_score);
    note("activation", test.layer.experts.activation);
    note("layout", test.layout.kind);
    note("policy", test.drop_policy);
    note("compute", test.compute);
    note("wire", test.wire);
    note("dispatch wire", test.dispatch_wire);
    note("ranks", test.ranks);
    note("threads", test.threads);
    if (test.num_tokens == 0) seen.insert("no token");
    if (test.num_tokens == 1) seen.insert("one token");
    if (router.top_k == num_experts) seen.insert("K = E");
    if (num_experts == 1) seen.insert("E = 1");
    if (num_experts < test.ranks) seen.insert("ranks without experts");
    if (num_experts % test.ranks != 0) seen.insert("R does not divide E");
    if (test.layer.reduction_groups % test.ranks != 0) seen.insert("R does not divide G");
    if (test.layer.experts.hidden % 2 == 1 && test.layer.experts.inner % 2 == 1) {
      seen.insert("odd sizes");
    }
    if (test.layer.shared.num_experts > 0) seen.insert("shared");
    seen.insert(switchyard::to_string(test.weights));
    if (test.layer.shared_gated) seen.insert("shared gate");
    if (test.capacity_factor > 0 && test.ranks > 1) seen.insert("drops over ranks");
    if (test.layer.weight_on_input) seen.insert("weight on input");
    if (test.identity_experts > 0) {
      seen.insert("identity experts");
      if (test.ranks > 1 && test.capacity_factor > 0) seen.insert("identity experts, drops, ranks");
    }
  }
  EXPECT_EQ(seen.size(),
            24U + 3 + 2 + 4 + 2 + 6 + 5 + 4 + 5 + 4 + 2 + 6 + 3 + 4 + 3 + 4 + 4 + 6 + 2 + 18);
}

TEST(Verify, TheCasesForGpusHaveTheRanksAndSizesThatKernelsTake) {
  std::set<int> ranks;
  int of_other_kinds = 0;
  int of_places = 0;
  int groups_sent = 0;
  int compared_with_one_rank = 0;
  for (std::uint64_t index = 0; index < 4000; ++index) {
    const Case test = make_case(3, index, {1, 2, 3, 8, 9}, kThreads, Backend::kCuda);
    ranks.insert(test.ranks);
    ASSERT_EQ(test.layer.experts.hidden % 8, 0);
    ASSERT_EQ(test.layer.experts.inner % 8, 0);
    const RouterConfig& router = test.layer.router;
    ASSERT_TRUE(!router.is_top_k() || router.as_top_k().score != Score::kSparseMixer);
    if (test.identity_experts > 0 || test.layer.weight_on_input) ++of_places;
    ASSERT_TRUE(!router.is_variable() || router.top_k() <= 32) << test.router;
    if (!router.is_top_k()) ++of_other_kinds;
    const std::int32_t groups = test.layer.reduction_groups;
    if (test.ranks > 1 && test.rank_invariant && groups % test.ranks == 0) {
      ASSERT_LE(groups, 8);
      ++groups_sent;
    }
    if (test.ranks > 1 && test.again == Again::kRanks) {
      ASSERT_TRUE(test.wire == DType::kF32 || test.rank_invariant);
      ASSERT_EQ(groups % test.ranks, 0);
      ++compared_with_one_rank;
    }
  }
  EXPECT_EQ(ranks, (std::set<int>{1, 2, 3, 8}));
  EXPECT_GT(of_other_kinds, 400);
  EXPECT_GT(of_places, 400);
  EXPECT_GT(groups_sent, 50);
  EXPECT_GT(compared_with_one_rank, 20);
}

TEST(Verify, OneCaseFromItsJsonIsChecked) {
  std::ostringstream out;
  const std::string text = to_json(case_number(4)).dump();
  EXPECT_EQ(run_verify({.case_json = text}, out), 0) << out.str();
  EXPECT_EQ(out.str(), "1 case checked against the reference: all hold\n");
}

TEST(Verify, ACaseThatIsNoneIsRefusedWithWhatIsWrong) {
  const auto message = [](const std::string& text) -> std::string {
    std::ostringstream out;
    try {
      run_verify({.case_json = text}, out);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "no error";
  };
  nlohmann::json json = to_json(case_number(4));
  EXPECT_NE(message("{").find("not JSON"), std::string::npos);
  EXPECT_NE(message("[]").find("\"seed\" is missing"), std::string::npos);
  const std::string deep = std::string(200000, '[') + std::string(200000, ']');
  EXPECT_NE(message("{\"seed\":" + deep + "}").find("\"seed\" is an array, want a whole number"),
            std::string::npos);
  EXPECT_LT(message(deep + "x").size(), 2000U);
  json["compute"] = "f12";
  EXPECT_NE(message(json.dump()).find("\"compute\" is \"f12\", want one of f32"),
            std::string::npos);
  json = to_json(case_number(4));
  json["H"] = "many";
  EXPECT_NE(message(json.dump()).find("\"H\" is \"many\""), std::string::npos);
}

TEST(Verify, AMissIsReportedWithTheLineThatReproducesIt) {
  const nlohmann::json json = to_json(case_number(4));
  const VerifyOptions options{.case_json = json.dump(),
                              .run = [](const Problem& problem, const RunArgs& args) {
                                RunResult result = run_layer(problem, args);
                                for (auto& rank : result.ranks) {  // NaN in every type
                                  std::fill(rank.out.begin(), rank.out.end(), std::byte{0xff});
                                }
                                return result;
                              }};
  std::ostringstream out;
  EXPECT_EQ(run_verify(options, out), 1);
  EXPECT_NE(out.str().find("miss: "), std::string::npos) << out.str();
  EXPECT_NE(out.str().find("switchyard verify --case '" + json.dump() + "'"), std::string::npos)
      << out.str();
  std::ostringstream object;
  VerifyOptions as_json = options;
  as_json.json = true;
  EXPECT_EQ(run_verify(as_json, object), 1);
  const auto report = nlohmann::json::parse(object.str());
  EXPECT_EQ(report.at("holds"), false);
  EXPECT_EQ(report.at("case"), json);
}

TEST(Verify, ACaseThatCannotBeDrawnIsAMissThatSaysWhichAndWhy) {
  for (const int workers : {1, 3}) {
    VerifyOptions options{.cases = 5, .seed = 8};
    options.workers = workers;
    options.router = "top-p:threshold=7";
    std::ostringstream out;
    EXPECT_EQ(run_verify(options, out), 1);
    EXPECT_NE(out.str().find("miss: case 0 of seed 8 cannot be drawn: "), std::string::npos)
        << out.str();
    EXPECT_NE(out.str().find("threshold"), std::string::npos) << out.str();
  }
}

TEST(Verify, RanksThatShareAGpuAreAloneOnIt) {
  std::atomic<int> inside{0};
  std::atomic<int> of_one_rank{0};
  std::atomic<bool> ranks_had_company{false};
  const LayerRunner run = [&](const Problem& problem, const RunArgs& args) {
    const bool shares = args.rank_begin.size() > 2;
    if (!shares) ++of_one_rank;
    const int with_this = ++inside;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (shares && (with_this > 1 || inside > 1)) ranks_had_company = true;
    RunArgs on_cpu = args;
    on_cpu.backend = Backend::kCpu;
    RunResult result = run_layer(problem, on_cpu);
    --inside;
    return result;
  };
  // A CPU rounds elsewhere than what is expected of a GPU: misses end some of these early.
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    VerifyOptions options{
        .cases = 8, .seed = seed, .ranks = {1, 2}, .backend = Backend::kCuda, .run = run};
    options.workers = 4;
    std::ostringstream out;
    (void)run_verify(options, out);
  }
  EXPECT_FALSE(ranks_had_company);
  EXPECT_GT(of_one_rank, 0);
}

TEST(Verify, EveryFaultIsMetInTimeAndTheNextExchangeIsRight) {
  for (const char* fault : {"absent", "late", "throw", "corrupt-count"}) {
    std::ostringstream out;
    const VerifyOptions options{
        .ranks = {2, 3}, .fault = fault, .timeout = std::chrono::milliseconds(300)};
    EXPECT_EQ(run_verify(options, out), 0) << out.str();
    EXPECT_NE(out.str().find("the next exchange is right"), std::string::npos) << out.str();
  }
}

}  // namespace
}  // namespace switchyard::verify
