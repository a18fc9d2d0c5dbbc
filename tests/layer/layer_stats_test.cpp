// Statistics that a layer tells of its last forward: those of what it recorded, and when there are
// none.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "switchyard/layer.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"
#include "verify/problem.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using verify::Case;
using verify::Problem;

constexpr std::int64_t kTokens = 40;
constexpr std::int64_t kHidden = 11;
constexpr std::int32_t kExperts = 6;

Problem make_layer(const char* router) {
  Case test;
  test.seed = 5;
  test.layer.router =
      parse_router(router, {.num_experts = kExperts, .kind = TopKRouter{.top_k = 2}});
  test.layer.experts = {.num_experts = kExperts, .hidden = kHidden, .inner = 6};
  return make_problem(test);
}

struct Call {
  std::vector<float> tokens = random_floats(kTokens * kHidden, 1);
  std::vector<float> out = std::vector<float>(tokens.size());
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(kTokens, 3);

  [[nodiscard]] ForwardArgs args(std::int64_t num_tokens = kTokens) {
    const auto matrix = [&](std::vector<float>& values) {
      return RawMatrix{reinterpret_cast<std::byte*>(values.data()), DType::kF32, num_tokens,
                       kHidden};
    };
    return {.tokens = matrix(tokens),
            .out = matrix(out),
            .request = {.token_ids = {ids.data(), {num_tokens}}}};
  }
};

TEST(LayerStats, AreThoseOfWhatWasDecidedWithEveryRouterAndCapacity) {
  struct Set {
    const char* router;
    std::optional<double> capacity;
  };
  for (const auto& [router, capacity] :
       {Set{"top-k", 0.75}, Set{"top-k", {}}, Set{"gshard", 1.0}, Set{"relu", {}},
        Set{"expert-choice:capacity-factor=2", {}}, Set{"hash", 1.0}}) {
    SCOPED_TRACE(router);
    const Problem problem = make_layer(router);
    MoeLayer layer(problem.model, {.capacity_factor = capacity});
    Call run;
    RoutingRecord record;
    ForwardArgs args = run.args();
    args.request.record = &record;
    SavedForward saved;
    args.saved = &saved;
    layer.forward(args);
    const std::int64_t top_k = problem.model.config.router.top_k();
    metrics::Routed routed{
        .num_experts = kExperts,
        .assignments = DenseAssignments{.expert = {record.expert.data(), {kTokens, top_k}},
                                        .weight = {record.weight.data(), {kTokens, top_k}}},
        .logits = saved.logits()};
    if (capacity) routed.kept = {record.kept.data(), {std::ssize(record.kept)}};
    const metrics::Routing want = metrics::routing(routed);
    const metrics::Routing found = layer.stats();
    EXPECT_EQ(found.counts, record.counts);
    EXPECT_EQ(found.load.cv, want.load.cv);
    EXPECT_EQ(found.entropies.has_value(), problem.model.config.router.has_logits());
    if (found.entropies) {
      EXPECT_EQ(found.entropies->router, want.entropies->router);
      EXPECT_EQ(found.entropies->weights, want.entropies->weights);
    }
    EXPECT_EQ(found.drops.has_value(), capacity.has_value());
    if (found.drops) {
      EXPECT_EQ(found.drops->by_choice, want.drops->by_choice);
      EXPECT_EQ(found.drops->mass, want.drops->mass);
      EXPECT_GT(found.drops->assignments, 0);
    }
    EXPECT_FALSE(found.rank_imbalance.has_value());
    layer.forward(run.args(0));  // the next one has no tokens
    EXPECT_EQ(layer.stats().load.dead_experts, kExperts);
  }
}

TEST(LayerStats, OfARankAreOfItsTokensWithTheImbalanceOfAll) {
  const Problem problem = make_layer("top-k");
  std::array<metrics::Routing, 2> found;
  run_ranks(2, [&](Communicator& ranks) {
    MoeLayer layer(problem.model, {.max_tokens = kTokens}, &ranks);
    Call run;
    layer.forward(run.args(ranks.rank() == 0 ? kTokens : 7));
    found[static_cast<std::size_t>(ranks.rank())] = layer.stats();
  });
  const std::vector<std::int64_t>& counts = found[0].counts;
  const std::int64_t first = counts[0] + counts[1] + counts[2];
  const auto most = static_cast<double>(std::max(first, 2 * kTokens - first));
  EXPECT_EQ(found[0].rank_imbalance, most / kTokens);
  EXPECT_EQ(found[1].load.cv_floor, std::sqrt(5.0 / 14));
}

TEST(LayerStats, AreAnErrorWhereTheLayerHasRoutedNothing) {
  const Problem problem = make_layer("top-k");
  MoeLayer layer(problem.model, {});
  const auto expect_none = [&] {
    expect_error(ErrorCode::kInvalidArgument, "no routing to tell of",
                 [&] { (void)layer.stats(); });
  };
  expect_none();
  Call run;
  layer.forward(run.args());
  (void)layer.stats();
  const std::vector<std::int32_t> expert(kTokens * 2, 1);
  const std::vector<float> weight(expert.size(), 0.5F);
  ForwardArgs given = run.args();
  given.expert = {expert.data(), {kTokens, 2}};
  given.weight = {weight.data(), {kTokens, 2}};
  layer.forward(given);
  expect_none();
  layer.forward(run.args());
  (void)layer.stats();
  run.tokens[0] = NAN;
  EXPECT_THROW(layer.forward(run.args()), Error);
  expect_none();
}

}  // namespace
}  // namespace switchyard
