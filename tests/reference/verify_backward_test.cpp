#include <fmt/core.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "switchyard/error.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/expect_gradients.hpp"
#include "testkit/sanitized.hpp"
#include "verify/case.hpp"
#include "verify/check_backward.hpp"
#include "verify/verify.hpp"

// `switchyard verify --pass`: all gradients of random layers, and what it says of wrong ones.

namespace switchyard::verify {
namespace {

Case case_number(std::uint64_t index) { return make_case(3, index, {1}, {1, 2, 3}, Backend::kCpu); }

/// The first case from `index` on in which all gradients of `names` are asked for and not empty.
Case case_with(const std::set<std::string>& names, std::uint64_t index) {
  while (true) {
    Case test = case_number(index++);
    if (!has_backward(test)) continue;
    std::set<std::string> missing = names;
    for (const GradientArray& array : make_backward_problem(make_problem(test)).gradients) {
      if (!array.bytes.empty()) missing.erase(array.name);
    }
    if (missing.empty()) return test;
  }
}

TEST(VerifyBackward, RandomCasesHold) {
  constexpr std::int64_t kCases = kSanitized ? 150 : 1000;
  std::ostringstream out;
  EXPECT_EQ(
      run_verify({.cases = kCases, .seed = 2, .ranks = {1, 2, 3, 4, 5, 8}, .pass = Pass::kBackward},
                 out),
      0)
      << out.str();
  EXPECT_NE(out.str().find(" of them backward: all hold\n"), std::string::npos) << out.str();
}

TEST(VerifyBackward, TheSummarySaysHowManyCasesOverRanksWentBack) {
  std::ostringstream out;
  EXPECT_EQ(run_verify({.cases = 60, .ranks = {2, 3}, .pass = Pass::kBoth, .json = true}, out), 0)
      << out.str();
  const auto report = nlohmann::json::parse(out.str());
  EXPECT_EQ(report.at("pass"), "both");
  EXPECT_EQ(report.at("cases"), 60);
  EXPECT_GT(report.at("backward"), 15);
  EXPECT_LT(report.at("backward"), 60);
}

TEST(VerifyBackward, AWrongNumberInAnyGradientIsAMissThatNamesIt) {
  for (const char* name :
       {"dtokens", "dweight", "dgate", "drouter_bias", "dw13", "dw2", "db13", "db2", "shared dw13",
        "shared dw2", "shared db13", "shared db2", "dshared_gate", "drouter_network"}) {
    const Problem problem = make_problem(case_with({name}, 0));
    const std::string wrong = check_backward(
        problem, [&](const Problem& p, const BackwardProblem& backward, const BackwardRun& run) {
          BackwardResult result = run_backward(p, backward, run);
          for (GradientArray& array : result.gradients) {
            if (array.name != name) continue;
            std::vector<float> values = decode(array.dtype, array.bytes);
            values.back() = 1.01F * values.back() + 0.01F;
            array.bytes = encode(array.dtype, values);
          }
          return result;
        });
    EXPECT_EQ(wrong.find(std::string(name) + "["), 0U) << name << ": " << wrong;
  }
}

/// The layer's backward with other arguments.
BackwardRunner with(const std::function<void(BackwardProblem&)>& change) {
  return [change](const Problem& problem, const BackwardProblem& backward, const BackwardRun& run) {
    BackwardProblem other = backward;
    change(other);
    return run_backward(problem, other, run);
  };
}

TEST(VerifyBackward, ALayerThatMissesALossOrWritesWhereItShouldAddIsFound) {
  bool losses = false;
  bool sums = false;
  for (std::uint64_t index = 0; !losses || !sums; ++index) {
    const Problem problem = make_problem(case_with({"dw13", "dgate"}, index));
    const BackwardProblem backward = make_backward_problem(problem);
    if (problem.test.num_tokens == 0) continue;
    if (!backward.dlogits.empty()) {
      losses = true;
      EXPECT_NE(check_backward(problem, with([](BackwardProblem& b) { b.dlogits.clear(); })), "");
    }
    if (backward.accumulate) {
      sums = true;
      EXPECT_NE(check_backward(problem, with([](BackwardProblem& b) { b.accumulate = false; })),
                "");
    }
  }
}

TEST(VerifyBackward, OtherBitsWithOtherThreadsOrRecomputeAreAMiss) {
  const Problem problem = make_problem(case_with({"dtokens"}, 7));
  int runs = 0;
  const std::string wrong = check_backward(
      problem, [&](const Problem& p, const BackwardProblem& backward, const BackwardRun& run) {
        BackwardResult result = run_backward(p, backward, run);
        if (++runs == 2) result.gradients[0].bytes[0] ^= std::byte{1};
        return result;
      });
  EXPECT_EQ(wrong.find("dtokens has other bits with "), 0U) << wrong;
}

TEST(VerifyBackward, OtherBitsOnSomeRankOrOnOneRankAreAMiss) {
  Case test;
  for (std::uint64_t index = 0;; ++index) {
    test = make_case(3, index, {2}, {1}, Backend::kCpu);
    if (!has_backward(test) || test.capacity_factor > 0 || test.num_tokens == 0) continue;
    if (test.layer.reduction_groups % 2 == 0 &&
        !make_backward_problem(make_problem(test)).gradients[0].bytes.empty()) {
      break;
    }
  }
  const Problem problem = make_problem(test);
  const std::string apart = check_backward(
      problem, [](const Problem& p, const BackwardProblem& backward, const BackwardRun& run) {
        BackwardResult result = run_backward(p, backward, run);
        result.apart = "dgate";
        return result;
      });
  EXPECT_EQ(apart, "dgate has not the same bits on all ranks");
  const std::string alone = check_backward(
      problem, [](const Problem& p, const BackwardProblem& backward, const BackwardRun& run) {
        BackwardResult result = run_backward(p, backward, run);
        if (p.test.ranks == 1) result.gradients[0].bytes[0] ^= std::byte{1};
        return result;
      });
  EXPECT_EQ(alone, "dtokens has other bits on 2 ranks than on one");
}

TEST(VerifyBackward, TheBoundsOfSumsOverTokensSeeOneElementThatNoNormOfTheWholeGradientShows) {
  Case test;
  test.seed = 8;
  test.layer.router = {.num_experts = 8, .kind = TopKRouter{.top_k = 3}};
  test.layer.experts = {.num_experts = 8, .hidden = 24, .inner = 16};
  test.layer.shared = {.num_experts = 1, .hidden = 24, .inner = 8};
  test.layer.shared_gated = true;
  test.compute = test.tokens = DType::kBF16;
  test.num_tokens = 60;
  Problem problem = make_problem(test);
  BackwardProblem backward = make_backward_problem(problem);
  backward.accumulate = false;
  backward.dlogits.clear();
  backward.gradients = all_gradients(test);
  const BackwardResult one = run_backward(problem, backward, {});
  problem.test.ranks = 4;
  const BackwardResult four = run_backward(problem, backward, {});
  const GradientTerms terms =
      gradient_terms(problem.model, test.compute, problem.tokens, backward.dout, one.record);
  const auto values = [](const BackwardResult& result, Gradient which) {
    const GradientArray& array = result.gradients[static_cast<std::size_t>(which)];
    return decode(array.dtype, array.bytes);
  };
  for (const auto& [which, magnitudes] : {std::pair{Gradient::kGate, &terms.gate},
                                          {Gradient::kW13, &terms.w13},
                                          {Gradient::kW2, &terms.w2},
                                          {Gradient::kSharedW13, &terms.shared13},
                                          {Gradient::kSharedGate, &terms.shared_gate}}) {
    const std::vector<float> want = values(one, which);
    expect_sums_of(terms, *magnitudes, "sums", values(four, which), want);
    std::vector<float> wrong = want;
    const auto least = std::min_element(magnitudes->begin(), magnitudes->end());
    const auto at = static_cast<std::size_t>(least - magnitudes->begin());
    double norm = 0;
    for (const float value : want) norm += double{value} * double{value};
    if (want.size() > 100) {
      wrong[at] += static_cast<float>(9e-6 * std::sqrt(norm));  // of a norm that may be 1e-5 off
      EXPECT_NONFATAL_FAILURE(expect_sums_of(terms, *magnitudes, "sums", wrong, want), "sums[");
    }
    wrong[at] = std::nanf("");
    EXPECT_NONFATAL_FAILURE(expect_sums_of(terms, *magnitudes, "sums", wrong, want), "is nan");
  }
  EXPECT_NE(values(four, Gradient::kGate), values(one, Gradient::kGate)) << "in one order";
}

TEST(VerifyBackward, AMissIsReportedWithTheLineThatReproducesIt) {
  const nlohmann::json json = to_json(case_with({"dw2"}, 11));
  std::ostringstream out;
  EXPECT_EQ(run_verify({.pass = Pass::kBoth,
                        .case_json = json.dump(),
                        .run_backward =
                            [](const Problem& problem, const BackwardProblem& backward,
                               const BackwardRun& run) {
                              BackwardResult result = run_backward(problem, backward, run);
                              for (GradientArray& array : result.gradients) {
                                array.bytes.assign(array.bytes.size(), std::byte{0xff});
                              }
                              return result;
                            }},
                       out),
            1);
  EXPECT_NE(out.str().find("miss: backward: d"), std::string::npos) << out.str();
  EXPECT_NE(out.str().find("switchyard verify --pass both --case '" + json.dump() + "'"),
            std::string::npos)
      << out.str();
}

TEST(VerifyBackward, WhatHasNoWayBackIsRefusedByName) {
  const auto refused = [](const char* words, const VerifyOptions& options) {
    std::ostringstream out;
    test::expect_error(ErrorCode::kUnsupported, words, [&] { (void)run_verify(options, out); });
  };
  refused("--pass both: there is no backward over nccl-pairs, want 1 among --ranks",
          {.ranks = {2, 3},
           .backend = Backend::kCuda,
           .device_engine = DeviceEngine::kNcclPairs,
           .pass = Pass::kBoth});
  nlohmann::json json = to_json(case_with({"dw2"}, 0));
  json["weights"] = "q8";
  refused("--pass both: this case has no backward",
          {.pass = Pass::kBoth, .case_json = json.dump()});
}

TEST(VerifyBackward, TheCasesReachEveryTypeAndEveryNastyInput) {
  std::set<std::string> seen;
  const auto note = [&](const char* what, auto value) {
    seen.insert(fmt::format("{} {}", what, static_cast<int>(value)));
  };
  for (std::uint64_t index = 0; index < 1500; ++index) {
    const Case test = case_number(index);
    if (!has_backward(test)) continue;
    const BackwardProblem backward = make_backward_problem(make_problem(test));
    note("recompute", backward.recompute);
    note("accumulate", backward.accumulate);
    note("dout", backward.dout_type);
    note("losses", !backward.dlogits.empty());
    for (const GradientArray& array : backward.gradients) {
      if (array.bytes.empty()) continue;
      seen.insert(fmt::format("{} {}", array.name, to_string(array.dtype)));
    }
    if (test.num_tokens == 0) seen.insert("no token");
    if (test.layer.router.top_k() == test.layer.router.num_experts) seen.insert("K = E");
    if (test.given == Given::kOne) seen.insert("all tokens to one expert");
    if (test.capacity_factor > 0) seen.insert("drops");
  }
  // Types three ways: 3 of the tokens, 4 of weights. f32 alone: gates, biases, what routers have.
  EXPECT_EQ(seen.size(), 2U + 2 + 3 + 2 + 3 * (3 + 4) + 11 + 4);
}

}  // namespace
}  // namespace switchyard::verify
