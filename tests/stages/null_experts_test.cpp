// Null experts: logits of their own, and neither weight nor work.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "switchyard/route.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "testkit/expect_error.hpp"

namespace switchyard {
namespace {

constexpr std::int32_t kExperts = 4;

struct Routed {
  std::vector<std::int32_t> expert;
  std::vector<float> weight;
};

/// One token of 4 experts, then null experts.
Routed route_one(const std::string& spelling, const std::vector<float>& logits) {
  const RouterConfig config =
      parse_router(spelling, {.num_experts = kExperts, .kind = TopKRouter{.top_k = 3}});
  Routed out{std::vector<std::int32_t>(3, -7), std::vector<float>(3, -7.0F)};
  route(
      {.logits = {logits.data(), {1, std::ssize(logits)}},
       .config = config,
       .routing = {.expert = {out.expert.data(), {1, 3}}, .weight = {out.weight.data(), {1, 3}}}});
  return out;
}

using Ids = std::vector<std::int32_t>;

TEST(NullExperts, TakePlacesAndTheRestIsRenormalised) {
  const Routed both = route_one("adamoe:null-experts=2", {1, 5, 0, 4, 4.5F, -9});
  EXPECT_EQ(both.expert, (Ids{1, 3, -1}));
  EXPECT_FLOAT_EQ(both.weight[0] + both.weight[1], 1.0F);
  EXPECT_FLOAT_EQ(both.weight[0] / both.weight[1], std::exp(1.0F));
  EXPECT_EQ(both.weight[2], 0.0F);
}

TEST(NullExperts, LeaveATokenThatIsAllTheirsWithoutExpertsAndWithoutWeight) {
  const Routed none = route_one("adamoe:null-experts=3", {1, 2, 3, 4, 5, 6, 7});
  EXPECT_EQ(none.expert, (Ids{-1, -1, -1}));
  EXPECT_EQ(none.weight, (std::vector<float>{0, 0, 0}));
  // As many as stand beside the experts when nothing is said.
  EXPECT_EQ(route_one("adamoe", {1, 2, 3, 4, 5, 6, 7, 8}).expert, (Ids{-1, -1, -1}));
}

TEST(NullExperts, LoseATieToExperts) {
  EXPECT_EQ(route_one("adamoe:null-experts=1", {1, 1, 1, 1, 1}).expert, (Ids{0, 1, 2}));
  EXPECT_EQ(route_one("adamoe:null-experts=1", {0, 1, 1, 0, 1}).expert, (Ids{1, 2, -1}));
}

TEST(NullExperts, KeepWeightsFiniteWhereTheirLogitsAreFarAbove) {
  const Routed far = route_one("adamoe:null-experts=1", {-300, -301, -302, -303, 300});
  EXPECT_EQ(far.expert, (Ids{0, 1, -1}));
  EXPECT_FLOAT_EQ(far.weight[0], 1 / (1 + std::exp(-1.0F)));
}

TEST(NullExperts, AreInTheShapesThatAreAskedFor) {
  test::expect_error(ErrorCode::kInvalidArgument, "logits", [] {
    (void)route_one("adamoe:null-experts=2", {1, 2, 3, 4});
  });
  test::expect_error(ErrorCode::kInvalidArgument, "null-experts='0'", [] {
    (void)route_one("adamoe:null-experts=0", {1, 2, 3, 4});
  });
  test::expect_error(ErrorCode::kInvalidArgument, "null_experts=-1", [] {
    check({.num_experts = 4, .kind = AdaMoeRouter{.top_k = 1, .null_experts = -1}});
  });
}

}  // namespace
}  // namespace switchyard
