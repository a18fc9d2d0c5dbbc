// Losses of a changed routing, beside the model in double with the same change.
#include "switchyard/models/ablation.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "switchyard/error.hpp"
#include "testkit/expect_error.hpp"
#include "tests/models/evaluation/made_model.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::models {
namespace {

using Choices = test::DoubleModel::Choices;

/// Nats of each window, with `change` between routers and experts.
template <class Change>
std::vector<double> nats_in_double(test::DoubleModel& twin, const std::string& content,
                                   const Change& change) {
  twin.on_choices = change;
  std::vector<double> nats;
  for (const DoubleWindow& window : double_windows(content, 16)) {
    const test::Doubles each =
        test::in_double::nll(twin.logits(window.tokens, window.tokens.size()), window.targets, 256);
    nats.push_back(std::accumulate(each.begin(), each.end(), 0.0));
  }
  return nats;
}

void expect_near(const std::vector<double>& have, const std::vector<double>& want) {
  ASSERT_EQ(have.size(), want.size());
  for (std::size_t i = 0; i < have.size(); ++i) EXPECT_NEAR(have[i], want[i], 5e-4) << i;
}

const std::string kContent = small_text(75);

TEST(Ablation, OfAnExpertIsTheLossWithoutItsTerm) {
  const TestFolder folder;
  const Text text({folder.file("a", kContent)});
  for (const AblatedWeight how : {AblatedWeight::kDrop, AblatedWeight::kRenormalise}) {
    ModelConfig config = small_bytes_model();
    config.shared_inner = 8;
    Model model = made_model(config);
    test::DoubleModel twin(model);
    const Ablations found = ablate(model, text, {.weight = how, .sequences = 2});
    expect_near(found.base.nats,
                nats_in_double(twin, kContent, [](std::int32_t, const Choices&) {}));
    EXPECT_EQ(found.bytes, (std::vector<std::int64_t>{16, 16, 16, 16, 10}));
    ASSERT_EQ(found.layers.size(), 2U);
    for (std::int32_t l = 0; l < 2; ++l) {
      ASSERT_EQ(found.layers[std::size_t(l)].layer, l);
      ASSERT_EQ(found.layers[std::size_t(l)].experts.size(), 4U);
      for (std::size_t e = 0; e < 4; ++e) {
        std::int64_t gone = 0;
        const auto wanted =
            nats_in_double(twin, kContent, [&](std::int32_t layer, Choices& choices) {
              for (auto& token : choices) {
                if (layer != l) continue;
                double all = 0, left = 0;
                for (const auto& [expert, weight] : token) {
                  all += weight;
                  if (expert != e) left += weight;
                }
                gone += std::int64_t(
                    std::erase_if(token, [&](const auto& choice) { return choice.first == e; }));
                if (how == AblatedWeight::kDrop) continue;
                for (auto& choice : token) choice.second *= all / left;
              }
            });
        const ExpertAblation& of = found.layers[std::size_t(l)].experts[e];
        expect_near(of.loss.nats, wanted);
        EXPECT_EQ(of.assignments, gone);
        double change = 0;  // what the bound must see
        for (std::size_t w = 0; w < wanted.size(); ++w) {
          change = std::max(change, std::abs(wanted[w] - found.base.nats[w]));
        }
        if (gone > 0) {
          EXPECT_GT(change, 0.02) << l << " " << e;
        }
      }
    }
  }
}

TEST(Ablation, OfATokensOnlyExpertLeavesNothing) {
  const TestFolder folder;
  const Text text({folder.file("a", kContent)});
  ModelConfig config = small_bytes_model();
  config.top_k = 1;
  Model model = made_model(config);
  const Ablations dropped = ablate(model, text);
  const Ablations scaled = ablate(model, text, {.weight = AblatedWeight::kRenormalise});
  for (std::size_t l = 0; l < 2; ++l) {
    for (std::size_t e = 0; e < 4; ++e) {
      EXPECT_EQ(dropped.layers[l].experts[e].loss.nats, scaled.layers[l].experts[e].loss.nats);
    }
  }
}

TEST(Ablation, ShufflingTwoTokensSwapsTheirExperts) {
  const TestFolder folder;
  const std::string content = "abz";
  const Text text({folder.file("a", content)});
  Model model = made_model(small_bytes_model());
  test::DoubleModel twin(model);
  const Ablations found = ablate(model, text);
  expect_near(found.shuffled.nats,
              nats_in_double(twin, content, [](std::int32_t, Choices& choices) {
                std::swap(choices[0], choices[1]);
              }));
  for (std::int32_t l = 0; l < 2; ++l) {
    const auto wanted = nats_in_double(twin, content, [&](std::int32_t layer, Choices& choices) {
      if (layer == l) std::swap(choices[0], choices[1]);
    });
    expect_near(found.layers[std::size_t(l)].shuffled.nats, wanted);
    EXPECT_GT(std::abs(wanted[0] - found.base.nats[0]), 0.01);
  }
}

TEST(Ablation, ShufflingIsACycleThroughAllTokensBySeed) {
  const TestFolder folder;
  const std::string content = "abcz";
  const Text text({folder.file("a", content)});
  ModelConfig config = small_bytes_model();
  config.layers = 1;
  Model model = made_model(config);
  test::DoubleModel twin(model);
  std::vector<double> cycles;
  for (const int first : {1, 2}) {
    cycles.push_back(nats_in_double(twin, content, [&](std::int32_t, Choices& choices) {
      std::rotate(choices.begin(), choices.begin() + first, choices.end());
    })[0]);
  }
  ASSERT_GT(std::abs(cycles[0] - cycles[1]), 0.01);
  std::vector<int> seen(2);
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const double nats = ablate(model, text, {.seed = seed}).shuffled.nats[0];
    const bool is_second = std::abs(nats - cycles[1]) < std::abs(nats - cycles[0]);
    EXPECT_NEAR(nats, cycles[is_second ? 1 : 0], 1e-3) << seed;
    ++seen[is_second ? 1 : 0];
  }
  EXPECT_GT(seen[0], 5);
  EXPECT_GT(seen[1], 5);
}

TEST(Ablation, IsTheSameForAnyThreadsAndSaysItsCostBefore) {
  const TestFolder folder;
  const Text text({folder.file("a", small_text(400))});
  ModelConfig config = small_bytes_model();
  config.layers = 3, config.first_dense = 1, config.dense_inner = 8;
  const auto made = [&](int threads, const AblationOptions& options) {
    Model model(config, {.num_threads = threads, .seed = 3});
    return ablate(model, text, options);
  };
  std::vector<double> shares;
  AblationOptions options{.max_tokens = 100, .sequences = 4};
  const Ablations one = made(1, options);
  EXPECT_EQ(made(2, options).shuffled.nats, one.shuffled.nats);
  options.progress = [&](double share) { shares.push_back(share); };
  (void)made(1, options);
  const AblationCost cost = count_ablations(Model(config), text, options);
  EXPECT_EQ(cost.windows, 6);
  EXPECT_EQ(cost.tokens, 96);
  EXPECT_EQ(cost.passes, 2 + 2 * (1 + 4));
  EXPECT_EQ(one.windows.size(), 6U);
  ASSERT_EQ(shares.size(), 12U * 2);  // calls of a pass
  EXPECT_DOUBLE_EQ(shares.back(), 1);
  EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
}

TEST(Ablation, WhatIsWrongIsRefusedByName) {
  const TestFolder folder;
  const Text text({folder.file("a", kContent)});
  Model model(small_bytes_model());
  test::expect_error(ErrorCode::kInvalidArgument, "max_tokens=0",
                     [&] { (void)ablate(model, text, {.max_tokens = 0}); });
  test::expect_error(ErrorCode::kInvalidArgument, "want drop or renormalise",
                     [] { (void)parse_ablated_weight("zero"); });
  ModelConfig chain = small_bytes_model();
  chain.router = "chain";
  Model of_chain(chain);
  test::expect_error(ErrorCode::kUnsupported, "and the router chain decides in each iteration",
                     [&] { (void)ablate(of_chain, text); });
  ModelConfig soft = small_bytes_model();
  soft.router = "soft-moe";
  Model of_soft(soft);
  test::expect_error(ErrorCode::kUnsupported, "the router soft-moe gives no token to an expert",
                     [&] { (void)ablate(of_soft, text); });
  EXPECT_EQ(parse_ablated_weight("renormalise"), AblatedWeight::kRenormalise);
  EXPECT_EQ(parse_ablated_weight("drop"), AblatedWeight::kDrop);
}

}  // namespace
}  // namespace switchyard::models
