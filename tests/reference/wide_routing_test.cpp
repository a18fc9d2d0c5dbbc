#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "testkit/expect_error.hpp"
#include "verify/case.hpp"
#include "verify/problem.hpp"
#include "verify/verify.hpp"

// More experts, and more of them a token, than kernels of GPUs take; what a call may ask of a
// layer's router.

namespace switchyard::verify {
namespace {

Case wide_case() {
  Case test;
  test.seed = 5;
  test.layer.router = {.num_experts = 2000, .kind = TopKRouter{.top_k = 40}};
  test.layer.experts.num_experts = 2000;
  test.layer.experts.hidden = 16;
  test.layer.experts.inner = 8;
  test.num_tokens = 12;
  return test;
}

TEST(WideRouting, FortyOf2000ExpertsATokenHoldOnOneRankAndOnThreeWithACapacity) {
  for (const int ranks : {1, 3}) {
    for (const DropPolicy policy : {DropPolicy::kChoice, DropPolicy::kBpr}) {
      Case test = wide_case();
      test.ranks = ranks;
      test.threads = 2;
      test.capacity_factor = policy == DropPolicy::kBpr ? 1.0 : 0.0;
      test.drop_policy = policy;
      std::ostringstream out;
      EXPECT_EQ(run_verify({.case_json = to_json(test).dump()}, out), 0) << out.str();
    }
  }
}

TEST(WideRouting, ALayerTellsTheTopScoresThatRouteTells) {
  const Problem problem = make_problem(wide_case());
  const LayerModel& model = problem.model;
  const std::int64_t num_tokens = problem.test.num_tokens;
  const ConstRawMatrix tokens{reinterpret_cast<const std::byte*>(problem.tokens.data()),
                              DType::kF32, num_tokens, 16};
  std::vector<float> logits(static_cast<std::size_t>(num_tokens * 2000));
  std::vector<std::int32_t> expert(static_cast<std::size_t>(num_tokens * 40));
  std::vector<float> weight(expert.size());
  std::vector<float> want(static_cast<std::size_t>(num_tokens), -1.0F), got = want;
  const Matrix<float> all_logits{logits.data(), {num_tokens, 2000}};
  router_gemm({.tokens = tokens, .gate = model.gate.matrix(2000, 16), .logits = all_logits});
  route({.logits = all_logits,
         .config = model.config.router,
         .routing = {.expert = {expert.data(), {num_tokens, 40}},
                     .weight = {weight.data(), {num_tokens, 40}}},
         .request = {.top_score = {want.data(), {num_tokens}}}});

  std::vector<float> out(static_cast<std::size_t>(num_tokens * 16));
  ForwardArgs args{.tokens = tokens,
                   .out = {reinterpret_cast<std::byte*>(out.data()), DType::kF32, num_tokens, 16},
                   .request = {.top_score = {got.data(), {num_tokens}}}};
  MoeLayer layer(model, {});
  layer.forward(args);
  EXPECT_EQ(got, want);

  args.request.top_score.shape[0] = 3;
  test::expect_error(ErrorCode::kInvalidArgument, "top_score is [3], want [12]",
                     [&] { layer.forward(args); });
  args.request.top_score.shape[0] = num_tokens;
  args.expert = {expert.data(), {num_tokens, 40}};
  args.weight = {weight.data(), {num_tokens, 40}};
  test::expect_error(ErrorCode::kInvalidArgument, "the routing is given",
                     [&] { layer.forward(args); });
}

}  // namespace
}  // namespace switchyard::verify
