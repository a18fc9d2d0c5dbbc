// Golden values: routers, capacities and drop policies against numbers that an independent
// pure-Python oracle has computed: random ones (tests/data/routing_golden.json), and ones full of
// ties (routing_ties.json). The library and the reference must both give them.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "reference/reference.hpp"
#include "switchyard/names.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/route.hpp"
#include "testkit/golden_json.hpp"

namespace switchyard {
namespace {

using nlohmann::json;
using test::flat;

/// Both files as one.
const json& golden() {
  static const json document = [] {
    std::ifstream random(SWITCHYARD_TEST_DATA "/routing_golden.json");
    std::ifstream ties(SWITCHYARD_TEST_DATA "/routing_ties.json");
    json all = json::parse(random);
    const json more = json::parse(ties);
    all.at("logits").update(more.at("logits"));
    for (const char* kind : {"routers", "drops"}) {
      all.at(kind).insert(all.at(kind).end(), more.at(kind).begin(), more.at(kind).end());
    }
    return all;
  }();
  return document;
}

template <typename Enum>
Enum named(const std::string& name) {
  return parse<Enum>(name).value();
}

RouterConfig config_of(const json& entry, std::int32_t num_experts) {
  return {.num_experts = num_experts,
          .kind = TopKRouter{.top_k = entry.at("top_k"),
                             .score = named<Score>(entry.at("score")),
                             .renormalize = entry.at("renormalize"),
                             .scale = entry.at("scale"),
                             .groups = entry.at("groups"),
                             .top_groups = entry.at("top_groups"),
                             .group_score = named<GroupScore>(entry.at("group_score"))}};
}

TEST(Golden, TheFileHasValuesOfEveryRouterAndPolicy) {
  EXPECT_GE(golden().at("routers").size(), 49U + 28U);
  EXPECT_GE(golden().at("capacities").size(), 30U);
  EXPECT_GE(golden().at("drops").size(), 72U + 20U);
}

TEST(Golden, EveryRouterChoosesAndWeighsAsTheOracleDoes) {
  for (const json& entry : golden().at("routers")) {
    SCOPED_TRACE(entry.at("name").get<std::string>());
    const json& rows = golden().at("logits").at(entry.at("logits").get<std::string>());
    const auto logits = flat<float>(rows);
    const auto num_tokens = static_cast<std::int64_t>(rows.size());
    const auto num_experts = static_cast<std::int32_t>(rows.at(0).size());
    const RouterConfig config = config_of(entry, num_experts);
    const auto bias = entry.at("selection_bias").get<std::vector<float>>();
    const auto want_expert = flat<std::int32_t>(entry.at("expert"));
    const auto want_weight = flat<double>(entry.at("weight"));

    std::vector<std::int32_t> expert(want_expert.size(), -7);
    std::vector<float> weight(want_expert.size(), -7.0F);
    std::vector<float> top_score(static_cast<std::size_t>(num_tokens), -7.0F);
    route({.logits = {logits.data(), {num_tokens, num_experts}},
           .selection_bias = {bias.data(), {std::ssize(bias)}},
           .config = config,
           .routing = {.expert = {expert.data(), {num_tokens, config.top_k()}},
                       .weight = {weight.data(), {num_tokens, config.top_k()}}},
           .request = {.top_score = {top_score.data(), {num_tokens}}},
           .execution = {}});
    EXPECT_EQ(expert, want_expert);
    for (std::size_t i = 0; i < weight.size(); ++i) {
      EXPECT_NEAR(weight[i], want_weight[i], 1e-6 * want_weight[i]) << i;
    }

    for (std::int64_t t = 0; t < num_tokens; ++t) {
      std::vector<reference::Bounded> row;
      for (std::int64_t e = 0; e < num_experts; ++e) {
        row.push_back({double{logits[static_cast<std::size_t>(t * num_experts + e)]}, 0});
      }
      const auto scores = reference::token_scores(config, row, bias);
      const auto chosen = reference::choose(config, scores);
      const auto weights = reference::chosen_weights(config, row, chosen);
      for (std::size_t k = 0; k < chosen.size(); ++k) {
        const auto i = static_cast<std::size_t>(t * config.top_k()) + k;
        EXPECT_EQ(chosen[k], want_expert[i]);
        EXPECT_NEAR(weights[k].value, want_weight[i], 1e-12 * want_weight[i] + 1e-15);
      }
      const auto best = reference::top_score(scores);
      EXPECT_NEAR(top_score[static_cast<std::size_t>(t)], best.value, best.error);
    }
  }
}

TEST(Golden, EveryCapacityIsTheOracles) {
  for (const json& entry : golden().at("capacities")) {
    SCOPED_TRACE(entry.dump());
    const double factor = entry.at("factor");
    const std::int64_t num_tokens = entry.at("num_tokens");
    const std::int64_t top_k = entry.at("top_k");
    const std::int64_t num_experts = entry.at("num_experts");
    const std::int64_t want = entry.at("capacity");
    EXPECT_EQ(capacity_of(factor, num_tokens, top_k, num_experts), want);
    EXPECT_EQ(reference::capacity(factor, num_tokens, top_k, num_experts), want);
  }
}

TEST(Golden, EveryDropPolicyKeepsWhatTheOracleKeeps) {
  for (const json& entry : golden().at("drops")) {
    SCOPED_TRACE(entry.at("name").get<std::string>());
    const auto expert = flat<std::int32_t>(entry.at("expert"));
    const auto weight = flat<float>(entry.at("weight"));
    const auto want = flat<std::uint8_t>(entry.at("kept"));
    const auto num_tokens = static_cast<std::int64_t>(entry.at("expert").size());
    const auto top_k = static_cast<std::int64_t>(entry.at("expert").at(0).size());
    const std::int32_t num_experts = entry.at("num_experts");
    const std::int64_t capacity = entry.at("capacity");
    const DropPolicy policy = named<DropPolicy>(entry.at("policy"));

    std::vector<std::uint8_t> kept(want.size(), 7);
    std::vector<std::int64_t> counts(static_cast<std::size_t>(num_experts), -7);
    std::vector<std::int64_t> counts_kept = counts;
    apply_capacity({.assignments = DenseAssignments{.expert = {expert.data(), {num_tokens, top_k}},
                                                    .weight = {weight.data(), {num_tokens, top_k}}},
                    .top_score = {},
                    .num_experts = num_experts,
                    .capacity = capacity,
                    .policy = policy,
                    .kept = {kept.data(), {num_tokens * top_k}},
                    .counts = {counts.data(), {num_experts}},
                    .counts_kept = {counts_kept.data(), {num_experts}},
                    .execution = {}});
    EXPECT_EQ(kept, want);
    const reference::Wanted wanted{
        .expert = expert, .weight = weight, .top_k = top_k, .capacity = capacity, .policy = policy};
    EXPECT_EQ(reference::kept_mask(wanted), want);
    for (std::int32_t e = 0; e < num_experts; ++e) {
      std::int64_t wanted_count = 0;
      std::int64_t kept_count = 0;
      for (std::size_t i = 0; i < want.size(); ++i) {
        if (expert[i] != e) continue;
        ++wanted_count;
        kept_count += want[i];
      }
      EXPECT_EQ(counts[static_cast<std::size_t>(e)], wanted_count) << e;
      EXPECT_EQ(counts_kept[static_cast<std::size_t>(e)], kept_count) << e;
    }
  }
}

}  // namespace
}  // namespace switchyard
