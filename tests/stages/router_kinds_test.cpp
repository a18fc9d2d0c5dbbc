// How routers are spelled.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "switchyard/routing/router_kinds.hpp"
#include "testkit/expect_error.hpp"

namespace switchyard {
namespace {

TEST(RouterKinds, WhatIsNotSaidIsTheBasesOrTheDefault) {
  const RouterConfig base{.num_experts = 6,
                          .kind = TopKRouter{.top_k = 3, .score = Score::kSigmoid, .scale = 2.5F}};
  const TopKRouter same = parse_router("top-k", base).as_top_k();
  EXPECT_EQ(same.top_k, 3);
  EXPECT_EQ(same.score, Score::kSigmoid);
  EXPECT_EQ(same.scale, 2.5F);
  const RouterConfig other = parse_router("top-k:top-k=2,score=softmax,renormalize=no", base);
  EXPECT_EQ(other.as_top_k().top_k, 2);
  EXPECT_EQ(other.as_top_k().score, Score::kSoftmax);
  EXPECT_FALSE(other.as_top_k().renormalize);
  EXPECT_EQ(parse_router("hash", base).top_k(), 3);
  RouterConfig deep = parse_router("top-k:network=mlp,width=5", base);
  EXPECT_EQ(deep.network.kind, RouterNetwork::Kind::kMlp);
  EXPECT_EQ(deep.network.width, 5);
  EXPECT_EQ(parse_router("top-p", deep).network.width, 5);
  EXPECT_EQ(parse_router("top-p:network=cosine", deep).network.width, 0);
  EXPECT_TRUE(parse_router("hash", deep).network.is_linear());
  EXPECT_EQ(parse_router("v-moe", base).noise.size, 1.0F / 6);
  EXPECT_EQ(parse_router("switch", base).top_k(), 1);
  const RouterConfig choice = parse_router("expert-choice:capacity_factor=2,group=8", base);
  EXPECT_EQ(std::get<ExpertChoiceRouter>(choice.kind).capacity_factor, 2.0);
  EXPECT_EQ(std::get<ExpertChoiceRouter>(choice.kind).group, 8);
  EXPECT_EQ(parse_router("uniform", choice).top_k(), 3);
  const RouterConfig chain = parse_router("chain", base);
  EXPECT_EQ(chain.chain.iterations, 2);
  EXPECT_TRUE(chain.chain.inner_residual);
  EXPECT_FALSE(chain.chain.outer_residual);
  EXPECT_EQ(chain.as_top_k().top_k, 2);  // 3 / 2, rounded up
  EXPECT_TRUE(chain.as_top_k().renormalize);
  EXPECT_EQ(chain.as_top_k().score, Score::kSigmoid);
  const RouterConfig one = parse_router("chain:iterations=3,inner-residual=no", base);
  EXPECT_EQ(one.num_gates(), 3);
  EXPECT_FALSE(one.as_top_k().renormalize);  // whose one expert has a gradient so
  EXPECT_FALSE(parse_router("top-k", chain).is_chain());
}

TEST(RouterKinds, ZeroComputationExpertsStandBesideTheBasesAndStayWithOtherRules) {
  const RouterConfig base{.num_experts = 6, .kind = TopKRouter{.top_k = 3}};
  const RouterConfig beside = parse_router("moe++", base);
  EXPECT_EQ(beside.num_experts, 10);
  EXPECT_EQ(beside.num_logits(), 10);
  EXPECT_EQ(beside.num_computing(), 6);
  EXPECT_EQ(beside.zero_computation.constant, 2);
  EXPECT_EQ(beside.zero_computation.copy, 1);
  EXPECT_EQ(beside.zero_computation.zero, 1);
  EXPECT_EQ(beside.zero_computation.tau, 0.75F);
  EXPECT_EQ(beside.top_k(), 3);
  EXPECT_TRUE(beside.as_top_k().renormalize);
  EXPECT_FALSE(beside.gating_residual);
  // Of such a model they are taken, not added to.
  EXPECT_EQ(parse_router("moe++:constant=0,zero=0,tau=0", beside).num_experts, 7);
  const RouterConfig same = parse_router("top-k:top-k=1", beside);
  EXPECT_EQ(same.num_experts, 10);
  EXPECT_EQ(same.zero_computation.total(), 4);
  EXPECT_EQ(same.zero_computation.tau, 0.75F);
  EXPECT_TRUE(parse_router("moe++:residual=yes,network=mlp", base).gating_residual);
}

TEST(RouterKinds, ASpellingThatIsWrongIsToldWhatWouldBeRight) {
  const auto wrong = [](const char* spelling, const std::vector<std::string>& words) {
    SCOPED_TRACE(spelling);
    for (const std::string& word : words) {
      test::expect_error(ErrorCode::kInvalidArgument, word, [&] {
        (void)parse_router(spelling, {.num_experts = 8, .kind = TopKRouter{.top_k = 2}});
      });
    }
  };
  wrong("topk", {"'topk' is not one of", "top-k, switch", "dirichlet"});
  wrong("", {"'' is not one of"});
  wrong("hash:seed=1", {"router hash has no option 'seed'", "top-k, salt"});
  wrong("relu:top-k=1", {"router relu has no option 'top-k'", "network, width"});
  wrong("top-p:threshold", {"'threshold' is not OPTION=VALUE", "threshold"});
  wrong("top-p:threshold=1.5", {"threshold='1.5'", "to 1"});
  wrong("top-p:threshold=nan", {"threshold='nan'"});
  wrong("top-p:threshold=", {"threshold=''"});
  wrong("top-p:threshold=0.5,threshold=0.6", {"threshold is given twice"});
  wrong("top-p:threshold=0.5,", {"'' is not OPTION=VALUE"});
  wrong("uniform:top-k=1.5", {"top-k='1.5'", "whole number"});
  wrong("uniform:top-k=9", {"router uniform", "top_k=9 exceeds num_experts=8"});
  wrong("gshard:second=maybe", {"second='maybe'", "all|threshold|random"});
  wrong("top-k:renormalize=1", {"renormalize='1'", "yes|no"});
}

}  // namespace
}  // namespace switchyard
