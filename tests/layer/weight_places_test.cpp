// Weights that do not go on the outputs of experts: on their inputs, and on tokens that experts
// return. By definition, in double; random layers are `verify`'s.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "switchyard/layer.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"
#include "testkit/rank_harness.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kTokens = 9;
constexpr std::int32_t kExperts = 3;
constexpr std::int64_t kHidden = 40;
constexpr std::int64_t kInner = 12;

struct Given {
  std::vector<std::int32_t> expert;
  std::vector<float> weight;
};

class Places : public testing::Test {
 protected:
  explicit Places(std::int32_t identity = 0, std::int32_t top_k = 1, bool on_input = false) {
    LayerConfig& config = model_.config;
    config.weight_on_input = on_input;
    config.router = {.num_experts = kExperts + identity, .kind = TopKRouter{.top_k = top_k}};
    config.router.zero_computation.copy = identity;
    config.experts = {.num_experts = kExperts, .hidden = kHidden, .inner = kInner};
    model_.experts = make_memory_source(config.experts, DType::kF32, w13_.data(), w2_.data());
    model_.gate = random_floats((kExperts + identity) * kHidden, 3U);
  }

  std::vector<float> run(MoeLayer& layer, const Given& given, RoutingRecord* record = nullptr) {
    std::vector<float> out(tokens_.size());
    const std::int64_t top_k = layer.config().router.top_k();
    ForwardArgs args{.tokens = matrix(tokens_), .out = matrix(out)};
    if (!given.expert.empty()) {
      args.expert = {given.expert.data(), {kTokens, top_k}};
      args.weight = {given.weight.data(), {kTokens, top_k}};
    }
    args.request.record = record;
    layer.forward(args);
    return out;
  }
  static RawMatrix matrix(std::vector<float>& values) {
    return {reinterpret_cast<std::byte*>(values.data()), DType::kF32, kTokens, kHidden};
  }

  /// acc += weight * expert(x).
  void add_expert(std::int32_t e, const double* x, double weight, double* acc) const {
    for (std::int64_t i = 0; i < kInner; ++i) {
      double gate = 0;
      double up = 0;
      for (std::int64_t h = 0; h < kHidden; ++h) {
        gate += x[h] * double{w13_[at((2 * e * kInner + i) * kHidden + h)]};
        up += x[h] * double{w13_[at(((2 * e + 1) * kInner + i) * kHidden + h)]};
      }
      const double a = gate / (1 + std::exp(-gate)) * up;
      for (std::int64_t h = 0; h < kHidden; ++h) {
        acc[h] += weight * a * double{w2_[at((e * kHidden + h) * kInner + i)]};
      }
    }
  }
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  void expect_near(const std::vector<float>& out, const std::vector<double>& want) const {
    for (std::size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], want[i], 2e-5) << i / kHidden << ", " << i % kHidden;
    }
  }

  std::vector<float> w13_ = random_floats(kExperts * 2 * kInner * kHidden, 1U, 0.2F);
  std::vector<float> w2_ = random_floats(kExperts * kHidden * kInner, 2U, 0.3F);
  std::vector<float> tokens_ = random_floats(kTokens * kHidden, 4U);
  LayerModel model_;
};

class IdentityExperts : public Places {
 protected:
  IdentityExperts() : Places(2, 3) {}

  [[nodiscard]] std::vector<double> expected(const Given& given, std::int64_t top_k = 3) const {
    std::vector<double> want(tokens_.size());
    const std::vector<double> tokens(tokens_.begin(), tokens_.end());
    for (std::int64_t i = 0; i < kTokens * top_k; ++i) {
      const std::int32_t e = given.expert[at(i)];
      const double* x = &tokens[at(i / top_k * kHidden)];
      double* y = &want[at(i / top_k * kHidden)];
      if (e < 0) continue;
      if (e < kExperts) {
        add_expert(e, x, given.weight[at(i)], y);
      } else {
        for (std::int64_t h = 0; h < kHidden; ++h) y[h] += double{given.weight[at(i)]} * x[h];
      }
    }
    return want;
  }
  /// Tokens with none, one, two of them, one twice, and nothing.
  Given given_ = {
      {0, 1, 2, 3, 0, 1, 4, 3, 2, 3, 3, 4, -1, 4, -1, -1, -1, -1, 2, 2, 4, 1, 0, 3, 4, 4, 4},
      random_floats(kTokens * 3, 5U)};
};

TEST_F(IdentityExperts, ReturnTheirInputTimesItsWeight) {
  MoeLayer layer(model_, {});
  expect_near(run(layer, given_), expected(given_));
}

TEST_F(IdentityExperts, AreChosenByTheRouterAndStandInTheRecord) {
  MoeLayer layer(model_, {});
  RoutingRecord record;
  const std::vector<float> out = run(layer, {}, &record);
  expect_near(out, expected({record.expert, record.weight}));
  std::vector<std::int64_t> counts(kExperts + 2);
  for (const std::int32_t e : record.expert) ++counts[at(e)];
  EXPECT_GT(counts[3] + counts[4], 0);
  EXPECT_EQ(record.counts, counts);
  EXPECT_EQ(record.counts_kept, counts);
  EXPECT_EQ(layer.stats().counts, counts);
  EXPECT_EQ(layer.rows_used(), counts[0] + counts[1] + counts[2]);
}

TEST_F(IdentityExperts, AreNeverFull) {
  MoeLayer layer(model_, {.capacity_factor = 0.2});  // 2 slots for 27 / 5
  RoutingRecord record;
  const std::vector<float> out = run(layer, given_, &record);
  std::vector<std::int64_t> counts(kExperts + 2);
  std::vector<std::int64_t> counts_kept(kExperts + 2);
  Given kept = given_;
  for (std::size_t i = 0; i < kept.expert.size(); ++i) {
    const std::int32_t e = kept.expert[i];
    if (e < 0) continue;
    ++counts[at(e)];
    const bool has_room = e >= kExperts || counts[at(e)] <= 2;
    EXPECT_EQ(record.kept[i], has_room ? 1 : 0) << i;
    counts_kept[at(e)] += has_room ? 1 : 0;
    if (!has_room) kept.expert[i] = -1;
  }
  ASSERT_GT(counts[0], 2);
  EXPECT_EQ(record.counts, counts);
  EXPECT_EQ(record.counts_kept, counts_kept);
  expect_near(out, expected(kept));
}

TEST_F(IdentityExperts, OfATokenCountWithSharedExpertsAndOverRanks) {
  model_.config.shared = {.num_experts = 1, .hidden = kHidden, .inner = kInner};
  model_.shared = make_memory_source(model_.config.shared, DType::kF32, w13_.data(), w2_.data());
  MoeLayer layer(model_, {});
  const std::vector<float> out = run(layer, given_);
  std::vector<double> want = expected(given_);
  const std::vector<double> tokens(tokens_.begin(), tokens_.end());
  for (std::int64_t t = 0; t < kTokens; ++t) {
    add_expert(0, &tokens[at(t * kHidden)], 1, &want[at(t * kHidden)]);
  }
  expect_near(out, want);

  // All tokens are the first rank's: of some nothing travels, and the other has none.
  on_ranks(2, [&](Communicator& communicator) {
    MoeLayer ranks(model_, {.max_tokens = kTokens}, &communicator);
    const std::int64_t mine = communicator.rank() == 0 ? kTokens : 0;
    std::vector<float> over_ranks(out.size());
    RawMatrix tokens_here = matrix(tokens_);
    RawMatrix out_here = matrix(over_ranks);
    tokens_here.rows = out_here.rows = mine;
    ranks.forward({.tokens = tokens_here,
                   .out = out_here,
                   .expert = {given_.expert.data(), {mine, 3}},
                   .weight = {given_.weight.data(), {mine, 3}}});
    if (mine > 0) {
      EXPECT_EQ(over_ranks, out);
    }
  });
}

class WeightOnInput : public Places {
 protected:
  WeightOnInput() : Places(0, 1, true) {}
  Given given_ = {{0, 1, 2, 0, -1, 1, 1, 2, 0}, random_floats(kTokens, 6U)};
};

TEST_F(WeightOnInput, MultipliesTheTokenBeforeItsExpert) {
  MoeLayer layer(model_, {});
  std::vector<double> want(tokens_.size());
  std::vector<double> other(tokens_.size());
  for (std::int64_t t = 0; t < kTokens; ++t) {
    if (given_.expert[at(t)] < 0) continue;
    std::vector<double> x;
    std::vector<double> unweighted;
    for (std::int64_t h = 0; h < kHidden; ++h) {
      unweighted.push_back(double{tokens_[at(t * kHidden + h)]});
      x.push_back(double{given_.weight[at(t)]} * unweighted.back());
    }
    add_expert(given_.expert[at(t)], x.data(), 1, &want[at(t * kHidden)]);
    add_expert(given_.expert[at(t)], unweighted.data(), given_.weight[at(t)],
               &other[at(t * kHidden)]);
  }
  const std::vector<float> out = run(layer, given_);
  expect_near(out, want);
  double difference = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference = std::max(difference, std::abs(want[i] - other[i]));
  }
  EXPECT_GT(difference, 0.01);  // it is not the weight behind the expert
}

TEST_F(WeightOnInput, IsTheLayerOfWeightedTokensBitForBit) {
  model_.config.router.as_top_k().score = Score::kSigmoid;
  model_.config.router.as_top_k().renormalize = false;
  MoeLayer layer(model_, {.compute = DType::kBF16});
  RoutingRecord record;
  const std::vector<float> out = run(layer, {}, &record);
  LayerModel plain = model_;
  plain.config.weight_on_input = false;
  MoeLayer by_hand(plain, {.compute = DType::kBF16});
  for (std::int64_t i = 0; i < kTokens * kHidden; ++i) {
    // Rounded to bf16 first, as the layer has it, and again by the layer below.
    const float token = round_to(DType::kBF16, tokens_[at(i)]);
    tokens_[at(i)] = record.weight[at(i / kHidden)] * token;
  }
  EXPECT_EQ(run(by_hand, {record.expert, std::vector<float>(kTokens, 1.0F)}), out);
}

class Refusals : public Places {
 protected:
  Refusals() : Places(2, 1, true) {}
  void refuse(ErrorCode code, const char* words, const LayerOptions& options = {}) {
    test::expect_error(code, words, [&] { MoeLayer(model_, options); });
  }
};

TEST_F(Refusals, NameWhatCannotBe) {
  refuse(
      ErrorCode::kUnsupported,
      "2 zero-computation experts with drop_policy=reroute: they have other slots than the others",
      {.capacity_factor = 1.0, .drop_policy = DropPolicy::kReroute});
  model_.config.router.chain = {.iterations = 1};
  refuse(ErrorCode::kUnsupported, "weight_on_input with the router chain: want another router");
  model_.config.router.chain = {};
  model_.config.router.as_top_k().top_k = 2;
  refuse(ErrorCode::kInvalidArgument, "weight_on_input with top_k=2: a token has one input");
  model_.config.router.as_top_k().top_k = 1;
  model_.config.router.zero_computation.copy = 1;
  refuse(ErrorCode::kInvalidArgument,
         "the router has 5 experts, the layer 3 and 1 zero-computation experts");
  model_.config.router.zero_computation.copy = -1;
  refuse(ErrorCode::kInvalidArgument, "copy=-1 zero-computation experts, want 0 to 4");
}

/// The gradients that change with where weights go, of one call with its routing given.
struct Back {
  std::vector<float> dtokens, dweight;
};

class Backwards : public IdentityExperts {
 protected:
  Back back(MoeLayer& layer, const Given& given) {
    const std::int64_t top_k = layer.config().router.top_k();
    std::vector<float> out(tokens_.size());
    SavedForward saved;
    layer.forward({.tokens = matrix(tokens_),
                   .out = matrix(out),
                   .expert = {given.expert.data(), {kTokens, top_k}},
                   .weight = {given.weight.data(), {kTokens, top_k}},
                   .saved = &saved});
    Back all{std::vector<float>(tokens_.size(), NAN), std::vector<float>(given.weight.size(), NAN)};
    layer.backward({.saved = &saved,
                    .dout = matrix(dout_),
                    .dtokens = matrix(all.dtokens),
                    .dweight = {all.dweight.data(), {kTokens, top_k}}});
    return all;
  }
  std::vector<float> dout_ = random_floats(kTokens * kHidden, 7U);
};

TEST_F(Backwards, IdentityExpertsPassTheirWeightAndTokensTheirProduct) {
  MoeLayer layer(model_, {});
  const Back found = back(layer, given_);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const bool alone = t == 5 || t == 8;  // no expert, or these alone
    double weight = 0;
    double product = 0;
    for (std::int64_t h = 0; h < kHidden; ++h) {
      product += double{tokens_[at(t * kHidden + h)]} * double{dout_[at(t * kHidden + h)]};
    }
    for (std::int64_t k = 0; k < 3; ++k) {
      const std::int32_t e = given_.expert[at(3 * t + k)];
      if (e >= kExperts) {
        weight += double{given_.weight[at(3 * t + k)]};
        EXPECT_NEAR(found.dweight[at(3 * t + k)], product, 1e-5) << t << ", " << k;
      }
      if (e < 0) {
        EXPECT_EQ(found.dweight[at(3 * t + k)], 0.0F);
      }
    }
    for (std::int64_t h = 0; alone && h < kHidden; ++h) {
      const std::int64_t i = t * kHidden + h;
      EXPECT_NEAR(found.dtokens[at(i)], weight * double{dout_[at(i)]}, 1e-6) << t << ", " << h;
    }
  }
}

TEST_F(Backwards, OverRanksHaveTheBitsOfOne) {
  for (const bool on_input : {false, true}) {
    model_.config.weight_on_input = on_input;
    model_.config.router.as_top_k().top_k = on_input ? 1 : 3;
    Given given = given_;
    if (on_input) given = {{0, 1, 2, 3, -1, 4, 1, 0, 2}, random_floats(kTokens, 8U)};
    MoeLayer layer(model_, {});
    const Back want = back(layer, given);
    on_ranks(2, [&](Communicator& communicator) {
      MoeLayer ranks(model_, {.max_tokens = kTokens}, &communicator);
      const std::int64_t mine = communicator.rank() == 0 ? kTokens : 0;
      const std::int64_t top_k = on_input ? 1 : 3;
      const auto rows = [&](RawMatrix whole) {
        whole.rows = mine;
        return whole;
      };
      std::vector<float> out(tokens_.size());
      Back found{std::vector<float>(tokens_.size()), std::vector<float>(given.weight.size())};
      SavedForward saved;
      ranks.forward({.tokens = rows(matrix(tokens_)),
                     .out = rows(matrix(out)),
                     .expert = {given.expert.data(), {mine, top_k}},
                     .weight = {given.weight.data(), {mine, top_k}},
                     .saved = &saved});
      ranks.backward({.saved = &saved,
                      .dout = rows(matrix(dout_)),
                      .dtokens = rows(matrix(found.dtokens)),
                      .dweight = {found.dweight.data(), {mine, top_k}}});
      if (mine == 0) return;
      EXPECT_EQ(found.dtokens, want.dtokens);
      EXPECT_EQ(found.dweight, want.dweight);
    });
  }
}

TEST_F(Backwards, AWeightOnTheInputHasTheGradientOfItsDifferences) {
  model_.config.weight_on_input = true;
  model_.config.router.as_top_k().top_k = 1;
  const Given given = {{0, 1, 2, 0, -1, 1, 3, 2, 4}, random_floats(kTokens, 8U)};
  MoeLayer layer(model_, {});
  const Back found = back(layer, given);
  const auto loss = [&](const std::vector<double>& tokens, const std::vector<double>& weight) {
    double sum = 0;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const std::int32_t e = given.expert[at(t)];
      std::vector<double> x;
      std::vector<double> y(kHidden);
      for (std::int64_t h = 0; h < kHidden; ++h) {
        x.push_back(weight[at(t)] * tokens[at(t * kHidden + h)]);
      }
      if (e >= 0 && e < kExperts) add_expert(e, x.data(), 1, y.data());
      if (e >= kExperts) y = x;
      for (std::int64_t h = 0; h < kHidden; ++h)
        sum += y[at(h)] * double{dout_[at(t * kHidden + h)]};
    }
    return sum;
  };
  const std::vector<double> tokens(tokens_.begin(), tokens_.end());
  const std::vector<double> weight(given.weight.begin(), given.weight.end());
  constexpr double kStep = 1e-5;
  const auto slope = [&](bool of_weight, std::int64_t i) {
    double ends[2] = {};
    for (int end = 0; end < 2; ++end) {
      std::vector<double> x = tokens;
      std::vector<double> w = weight;
      (of_weight ? w : x)[at(i)] += end == 0 ? -kStep : kStep;
      ends[end] = loss(x, w);
    }
    return (ends[1] - ends[0]) / (2 * kStep);
  };
  for (std::int64_t t = 0; t < kTokens; ++t) {
    EXPECT_NEAR(found.dweight[at(t)], slope(true, t), 2e-5) << t;
    for (std::int64_t h = 0; h < kHidden; h += 7) {
      EXPECT_NEAR(found.dtokens[at(t * kHidden + h)], slope(false, t * kHidden + h), 2e-5) << t;
    }
  }
}

}  // namespace
}  // namespace switchyard
