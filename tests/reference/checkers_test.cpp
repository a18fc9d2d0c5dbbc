// The checks of `switchyard verify`, checked: a result that is damaged in one place is a miss, and
// the miss says where. The layer itself is sound here.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>

#include "testkit/damaged_rank.hpp"
#include "testkit/gpu/expect_output.hpp"
#include "verify/check_layer.hpp"
#include "verify/verify.hpp"

namespace switchyard::verify {
namespace {

using Damage = std::function<void(RunResult&)>;

/// Two ranks, drops, a token for most experts: every check has something to look at.
Case sound_case() {
  Case test;
  test.seed = 5;
  test.layer.router = {.num_experts = 8, .kind = TopKRouter{.top_k = 3}};
  test.layer.experts = {.num_experts = 8, .hidden = 24, .inner = 16};
  test.num_tokens = 14;
  test.ranks = 2;
  test.capacity_factor = 0.75;
  return test;
}

std::string miss_after(const Case& test, const Damage& damage) {
  const auto run = [&](const Problem& problem, const RunArgs& args) {
    RunResult result = run_layer(problem, args);
    damage(result);
    return result;
  };
  return check_layer(make_problem(test), {.run = run});
}

void expect_miss(const Case& test, const std::string& words, const Damage& damage) {
  const std::string miss = miss_after(test, damage);
  EXPECT_NE(miss.find(words), std::string::npos) << "want '" << words << "', got '" << miss << "'";
}

float* outputs(RunResult& result, std::size_t rank) {
  return reinterpret_cast<float*>(result.ranks[rank].out.data());
}

/// First pick that was kept, or that was not.
std::size_t pick(const RoutingRecord& record, std::uint8_t kept) {
  const auto found = std::find(record.kept.begin(), record.kept.end(), kept);
  return static_cast<std::size_t>(found - record.kept.begin());
}

TEST(Checkers, ASoundRunOfTheCaseHolds) {
  EXPECT_EQ(miss_after(sound_case(), [](RunResult&) {}), "");
  EXPECT_EQ(check_stages(make_problem(sound_case())), "");
}

TEST(Checkers, AnOutputOutsideOfItsBoundIsAMiss) {
  const Case test = sound_case();
  expect_miss(test, "out[0, 0] is", [](RunResult& r) { outputs(r, 0)[0] += 1e-3F; });
  expect_miss(test, "out[13, 23] is", [](RunResult& r) { outputs(r, 1)[7 * 24 - 1] += 1e-3F; });
  expect_miss(test, "out[1, 2] is nan",
              [](RunResult& r) { outputs(r, 0)[24 + 2] = std::nanf(""); });
  expect_miss(test, "out[7, 0] is inf", [](RunResult& r) { outputs(r, 1)[0] = HUGE_VALF; });
  expect_miss(test, "nan, not", [](RunResult& r) {
    for (RankResult& rank : r.ranks) {
      std::fill(rank.out.begin(), rank.out.end(), std::byte{0xff});
    }
  });
  expect_miss(test, "out[0, ", [](RunResult& r) {
    std::swap_ranges(outputs(r, 0), outputs(r, 0) + 24, outputs(r, 0) + 24);
  });
  expect_miss(test, "wrong size", [](RunResult& r) { r.ranks[1].out.resize(24 * 4); });
}

TEST(Checkers, AnOutputOf16BitsThatIsOneUnitOffIsAMiss) {
  Case test = sound_case();
  test.output = DType::kBF16;
  expect_miss(test, "out[0, 0] is", [](RunResult& r) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, r.ranks[0].out.data(), 2);
    ++bits;
    std::memcpy(r.ranks[0].out.data(), &bits, 2);
  });
}

TEST(Checkers, AWrongChoiceOrWeightIsAMiss) {
  const Case test = sound_case();
  expect_miss(test, "rank 0: token 0: a better expert is left out", [](RunResult& r) {
    auto& expert = r.ranks[0].record.expert;
    for (std::int32_t e = 0; e < 8; ++e) {  // instead of the best, one that was not chosen
      if (std::find(expert.begin(), expert.begin() + 3, e) == expert.begin() + 3) expert[2] = e;
    }
  });
  expect_miss(test, "rank 1: token 0: not in descending order", [](RunResult& r) {
    auto& expert = r.ranks[1].record.expert;
    std::swap(expert[0], expert[2]);
  });
  expect_miss(test, "is chosen twice",
              [](RunResult& r) { r.ranks[0].record.expert[4] = r.ranks[0].record.expert[3]; });
  expect_miss(test, "is no expert", [](RunResult& r) { r.ranks[0].record.expert[1] = 8; });
  expect_miss(test, "rank 0: token 0: weight 0 is",
              [](RunResult& r) { r.ranks[0].record.weight[0] *= 1.0001F; });
  expect_miss(test, "rank 0: token 2: weight 1 is nan",
              [](RunResult& r) { r.ranks[0].record.weight[7] = std::nanf(""); });
  expect_miss(test, "picks", [](RunResult& r) { r.ranks[0].record.weight.pop_back(); });
}

TEST(Checkers, ATieForTheHigherExpertIsAMiss) {
  Case test = sound_case();
  test.data = Data::kZero;  // all scores are equal
  test.capacity_factor = 0;
  expect_miss(test, "a tie is not decided for the lower id",
              [](RunResult& r) { r.ranks[0].record.expert[2] = 3; });
}

TEST(Checkers, AGivenRoutingThatIsNotRecordedIsAMiss) {
  Case test = sound_case();
  test.given = Given::kRandom;
  expect_miss(test, "not the routing that was given",
              [](RunResult& r) { r.ranks[0].record.weight[1] += 1.0F; });
  expect_miss(test, "not the routing that was given", [](RunResult& r) {
    auto& expert = r.ranks[1].record.expert;
    expert[0] = (expert[0] + 1) % 8;
  });
}

TEST(Checkers, ADropThatThePolicyDoesNotAskForIsAMiss) {
  const Case test = sound_case();
  expect_miss(test, "keeps", [](RunResult& r) {
    RoutingRecord& record = r.ranks[0].record;
    record.kept[pick(record, 1)] = 0;
  });
  expect_miss(test, "keeps", [](RunResult& r) {
    RoutingRecord& record = r.ranks[0].record;
    record.kept[pick(record, 0)] = 1;
  });
  expect_miss(test, "which comes before it", [](RunResult& r) {
    RoutingRecord& record = r.ranks[0].record;  // the lost one instead of a kept one
    const std::size_t lost = pick(record, 0);
    for (std::size_t i = 0; i < record.kept.size(); ++i) {
      if (record.kept[i] != 1 || record.expert[i] != record.expert[lost]) continue;
      std::swap(record.kept[i], record.kept[lost]);
      return;
    }
  });
}

TEST(Checkers, WrongCountsOfAssignmentsRowsOrTrafficAreMisses) {
  const Case test = sound_case();
  expect_miss(test, "counts are not", [](RunResult& r) { ++r.ranks[1].record.counts[7]; });
  expect_miss(test, "counts_kept are not",
              [](RunResult& r) { --r.ranks[0].record.counts_kept[0]; });
  expect_miss(test, "rank 1 used", [](RunResult& r) { ++r.ranks[1].rows_used; });
  expect_miss(test, "rank 0 executed", [](RunResult& r) { ++r.ranks[0].rows_executed; });
  expect_miss(test, "rows sent", [](RunResult& r) { ++r.ranks[1].traffic.rows[2]; });
  expect_miss(test, "bytes of payload",
              [](RunResult& r) { r.ranks[0].traffic.payload_bytes[1] += 4; });
}

TEST(Checkers, AnErrorWhereNoneIsDueAndNoneWhereOneIsDueAreMisses) {
  expect_miss(sound_case(), "forward threw: timeout: too late",
              [](RunResult& r) { r.error = Error(ErrorCode::kTimeout, "too late"); });
  for (const auto& [data, given] :
       {std::pair{Data::kNan, Given::kNothing}, std::pair{Data::kPlain, Given::kBadId}}) {
    Case test = sound_case();
    test.data = data;
    test.given = given;
    expect_miss(test, "without an error", [](RunResult& r) { r.error.reset(); });
    expect_miss(test, "want an invalid argument, got: timeout",
                [](RunResult& r) { r.error = Error(ErrorCode::kTimeout, "too late"); });
  }
}

TEST(Checkers, ASecondRunWithOtherBitsIsAMiss) {
  for (const Again again : {Again::kCall, Again::kThreads, Again::kRanks, Again::kAlone}) {
    Case test = sound_case();
    test.capacity_factor = 0;
    test.batch_invariant = true;
    test.again = again;
    test.again_threads = 2;
    for (const bool fails : {false, true}) {
      int runs = 0;
      expect_miss(test, fails ? "the second run threw: timeout" : "the second run has other bits",
                  [&](RunResult& r) {
                    if (++runs == 1) return;
                    if (fails) r.error = Error(ErrorCode::kTimeout, "too late");
                    outputs(r, r.ranks.size() - 1)[3] += 0x1p-20F;
                  });
      EXPECT_EQ(runs, 2);
    }
  }
}

TEST(Checkers, VerifyFailsWithTheFirstCaseThatIsWrong) {
  std::ostringstream out;
  std::atomic<int> runs = 0;
  const VerifyOptions options{.cases = 20,
                              .seed = 3,
                              .ranks = {1},
                              .run = [&](const Problem& problem, const RunArgs& args) {
                                RunResult result = run_layer(problem, args);
                                ++runs;
                                if (!result.error && !result.ranks[0].out.empty()) {
                                  const auto last =
                                      result.ranks[0].out.end() - 4;  // NaN in every type
                                  std::fill(last, result.ranks[0].out.end(), std::byte{0xff});
                                }
                                return result;
                              }};
  EXPECT_EQ(run_verify(options, out), 1);
  EXPECT_GT(runs, 0);
  EXPECT_NE(out.str().find("miss: out["), std::string::npos) << out.str();
  EXPECT_NE(out.str().find("switchyard verify --case '{"), std::string::npos) << out.str();
}

TEST(Checkers, VerifyFailsWhenAStageIsWrong) {
  std::ostringstream out;
  VerifyOptions options{.cases = 20, .seed = 3, .ranks = {1}};
  options.stages.finish = [](const FinishArgs& args) {
    finish(args);
    if (args.out.bytes() > 0) args.out.data[0] ^= std::byte{1};
  };
  EXPECT_EQ(run_verify(options, out), 1);
  EXPECT_NE(out.str().find("miss: stage finish: out[0, 0]"), std::string::npos) << out.str();
}

/// What check_stages says of the case when `damage` has spoiled one of the calls.
void expect_stage_miss(const std::string& words, const std::function<void(StageCalls&)>& damage,
                       Case test = sound_case()) {
  StageCalls calls;
  damage(calls);
  const std::string miss = check_stages(make_problem(test), calls);
  EXPECT_NE(miss.find(words), std::string::npos) << "want '" << words << "', got '" << miss << "'";
}

TEST(Checkers, AStageThatRoutesOrDropsWronglyIsAMiss) {
  expect_stage_miss("route, token 2: not in descending order", [](StageCalls& calls) {
    calls.route = [](const RouteArgs& args) {
      route(args);
      std::swap(args.routing.expert.row(2)[0], args.routing.expert.row(2)[1]);
    };
  });
  expect_stage_miss("route, token 13: weight 2 is nan", [](StageCalls& calls) {
    calls.route = [](const RouteArgs& args) {
      route(args);
      args.routing.weight.row(13)[2] = std::nanf("");
    };
  });
  expect_stage_miss("route, token 4: top score nan", [](StageCalls& calls) {
    calls.route = [](const RouteArgs& args) {
      route(args);
      args.request.top_score[4] = std::nanf("");
    };
  });
  expect_stage_miss("capacity_of gives", [](StageCalls& calls) {
    calls.capacity_of = [](double factor, std::int64_t t, std::int64_t k, std::int64_t e) {
      return capacity_of(factor, t, k, e) + 1;
    };
  });
  expect_stage_miss("apply_capacity keeps others", [](StageCalls& calls) {
    calls.apply_capacity = [](const CapacityArgs& args) {
      apply_capacity(args);
      args.kept[3 * 3 + 1] ^= 1;
    };
  });
  expect_stage_miss("apply_capacity counts", [](StageCalls& calls) {
    calls.apply_capacity = [](const CapacityArgs& args) {
      apply_capacity(args);
      ++args.counts[7];
    };
  });
  expect_stage_miss("apply_capacity counts", [](StageCalls& calls) {
    calls.apply_capacity = [](const CapacityArgs& args) {
      apply_capacity(args);
      --args.counts_kept[0];
    };
  });
}

TEST(Checkers, APlanThatIsWrongInOnePlaceIsAMiss) {
  const auto expect_plan = [](const std::string& words, const auto& spoil) {
    expect_stage_miss(words, [&](StageCalls& calls) {
      calls.plan = [&](const PlanArgs& args) {
        plan(args);
        spoil(args.plan);
      };
    });
  };
  expect_plan("plan: expert 1 has", [](const PlanView& p) { ++p.expert_begin[1]; });
  expect_plan("plan: expert 3 has", [](const PlanView& p) { --p.expert_rows[3]; });
  expect_plan("rows, want", [](const PlanView& p) { ++p.expert_begin[p.num_experts]; });
  expect_plan("plan: row 0 is of token", [](const PlanView& p) { ++p.row_token[0]; });
  expect_plan("plan: row 1 is of token", [](const PlanView& p) { p.row_weight[1] += 0x1p-20F; });
  expect_plan("plan: wrong rows for token", [](const PlanView& p) { ++p.token_row[0]; });
  expect_plan("plan: wrong rows for token 0", [](const PlanView& p) { ++p.token_begin[1]; });
  Case padded = sound_case();
  padded.layout = {LayoutKind::kAligned, 4};
  expect_stage_miss(
      "plan: row",
      [](StageCalls& calls) {
        calls.plan = [](const PlanArgs& args) {
          plan(args);
          const std::int64_t rows = args.plan.expert_begin[args.plan.num_experts];
          for (std::int64_t row = 0; row < rows; ++row) {
            if (args.plan.row_token[row] < 0) args.plan.row_weight[row] = 1.0F;
          }
        };
      },
      padded);
}

TEST(Checkers, ARowThatIsPackedCombinedOrFinishedWronglyByOneBitIsAMiss) {
  const auto flip = [](RawMatrix matrix) { matrix.data[matrix.bytes() - 4] ^= std::byte{1}; };
  expect_stage_miss("pack: row", [&](StageCalls& calls) {
    calls.pack = [&](const PackArgs& args) {
      pack(args);
      flip(args.rows);
    };
  });
  expect_stage_miss("combine: sum[13, 23]", [&](StageCalls& calls) {
    calls.combine = [&](const CombineArgs& args) {
      combine(args);
      flip(args.reduced.sums);
    };
  });
  expect_stage_miss("finish: out[13, 23]", [&](StageCalls& calls) {
    calls.finish = [&](const FinishArgs& args) {
      finish(args);
      flip(args.out);
    };
  });
}

TEST(Checkers, ASoakWhoseRowsAreNotThoseSentIsAMiss) {
  const auto alone = make_single_rank();
  DamagedRank world(*alone);
  const VerifyOptions options{.soak = 24, .world = &world};
  std::ostringstream out;
  EXPECT_EQ(run_verify(options, out), 0) << out.str();
  world.damage = [](std::byte* memory, std::size_t bytes) {
    std::fill_n(memory, bytes, std::byte{0xff});
  };
  EXPECT_EQ(run_verify(options, out), 1);
  EXPECT_NE(out.str().find(": rank 0, token 0, element 0 is"), std::string::npos) << out.str();
}

TEST(Checkers, TheBoundsOfTheTestsOnGpusSeeOneElementThatNoNormOfTheWholeOutputShows) {
  Case test = sound_case();
  test.num_tokens = 400;
  const Problem problem = make_problem(test);
  const RunResult sound = run_layer(problem, {.threads = 1, .rank_begin = rank_begin(test)});
  std::vector<RoutingRecord> records;
  std::vector<float> out;
  for (const RankResult& rank : sound.ranks) {
    records.push_back(rank.record);
    const std::vector<float> values = decode(DType::kF32, rank.out);
    out.insert(out.end(), values.begin(), values.end());
  }
  const auto expect_within = [&](const std::vector<float>& values) {
    expect_within_bounds(problem.model, {}, DType::kF32, problem.tokens, records, values);
  };
  expect_within(out);
  double norm = 0;
  for (const float value : out) norm += double{value} * double{value};
  std::vector<float> wrong = out;
  wrong[777] += static_cast<float>(5e-6 * std::sqrt(norm));  // of a norm that may be 1e-5 off
  EXPECT_NONFATAL_FAILURE(expect_within(wrong), "out[32, 9] is");
  wrong = out;
  wrong.back() = std::nanf("");
  EXPECT_NONFATAL_FAILURE(expect_within(wrong), "out[399, 23] is nan");
}

}  // namespace
}  // namespace switchyard::verify
