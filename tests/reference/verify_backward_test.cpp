#include <fmt/core.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "switchyard/error.hpp"
#include "testkit/expect_error.hpp"
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

TEST(VerifyBackward, AThousandRandomCasesHold) {
  std::ostringstream out;
  EXPECT_EQ(
      run_verify({.cases = 1000, .seed = 2, .ranks = {1, 2, 3, 4, 5, 8}, .pass = Pass::kBackward},
                 out),
      0)
      << out.str();
  EXPECT_NE(out.str().find(" of them backward: all hold\n"), std::string::npos) << out.str();
}

TEST(VerifyBackward, TheSummarySaysHowManyCasesOverRanksWentBack) {
  std::ostringstream out;
  EXPECT_EQ(run_verify({.cases = 200, .ranks = {2, 3}, .pass = Pass::kBoth, .json = true}, out), 0)
      << out.str();
  const auto report = nlohmann::json::parse(out.str());
  EXPECT_EQ(report.at("pass"), "both");
  EXPECT_EQ(report.at("cases"), 200);
  EXPECT_GT(report.at("backward"), 50);
  EXPECT_LT(report.at("backward"), 200);
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
  EXPECT_EQ(seen.size(), 2U + 2 + 3 + 2 + 3 * (3 + 4) + 8 + 4);
}

}  // namespace
}  // namespace switchyard::verify
