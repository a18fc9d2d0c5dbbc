// The routers by name against numbers that numpy has computed from the definitions
// (tests/data/routers_golden.py): experts, weights, noise, and gradients by complex steps.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/philox.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/route.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/golden_json.hpp"

namespace switchyard {
namespace {

using nlohmann::json;
using test::flat;

const json& golden() {
  static const json document = [] {
    std::ifstream file(SWITCHYARD_TEST_DATA "/routers_golden.json");
    return json::parse(file);
  }();
  return document;
}

RouteRequest request_of(const json& entry) {
  const json& request = entry.at("request");
  return {.seed = request.at("seed"),
          .step = request.at("step"),
          .layer = request.at("layer"),
          .first_token = request.at("first_token"),
          .training = request.at("training")};
}

template <typename T>
Matrix<T> matrix(std::vector<T>& values, std::int64_t rows) {
  return {values.data(), {rows, std::ssize(values) / rows}};
}

void expect_near(const std::vector<float>& have, const std::vector<double>& want, double bound) {
  ASSERT_EQ(have.size(), want.size());
  for (std::size_t i = 0; i < have.size(); ++i) {
    EXPECT_NEAR(double{have[i]}, want[i], bound * (1 + std::abs(want[i]))) << "number " << i;
  }
}

std::vector<float> floats(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

/// What a rule of logits chooses, with the noise of the call.
struct Routed {
  RouterConfig config;
  RouteRequest request;
  std::int64_t num_tokens;
  std::vector<float> logits, noise_logits, weight;
  std::vector<std::int32_t> expert;

  explicit Routed(const json& entry) : request(request_of(entry)) {
    const json& rows = golden().at("logits").at(entry.at("logits").get<std::string>());
    num_tokens = std::ssize(rows);
    logits = flat<float>(rows);
    config = parse_router(entry.at("router").get<std::string>(),
                          {.num_experts = entry.at("experts"), .kind = TopKRouter{.top_k = 1}});
    if (entry.contains("noise_logits")) noise_logits = flat<float>(entry.at("noise_logits"));
    if (request.training && config.noise.is_on_logits()) {
      add_noise({.logits = matrix(logits, num_tokens),
                 .noise_logits = matrix(noise_logits, num_tokens),
                 .noise = config.noise,
                 .request = request});
    }
    expert.assign(static_cast<std::size_t>(num_tokens * config.top_k()), -7);
    weight.assign(expert.size(), -7.0F);
    const auto bias = entry.value("selection_bias", std::vector<float>());
    route({.logits = logits_view(),
           .selection_bias = {bias.empty() ? nullptr : bias.data(), {std::ssize(bias)}},
           .config = config,
           .routing = {.expert = matrix(expert, num_tokens), .weight = matrix(weight, num_tokens)},
           .request = request});
  }

  [[nodiscard]] Matrix<const float> logits_view() const {
    return {logits.data(), {num_tokens, config.num_logits()}};
  }
};

TEST(RoutersGolden, TheGeneratorGivesThePublishedVectors) {
  const auto words = [](PhiloxWords counter, PhiloxKey key) {
    const PhiloxWords out = philox4x32(counter, key);
    return std::vector<std::uint32_t>(out.word, out.word + 4);
  };
  using Words = std::vector<std::uint32_t>;
  EXPECT_EQ(words({{0, 0, 0, 0}}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kAll = 0xffffffff;
  EXPECT_EQ(words({{kAll, kAll, kAll, kAll}}, {kAll, kAll}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(words({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RoutersGolden, EveryRuleOfLogitsChoosesWeighsAndGoesBackAsNumpyDoes) {
  for (const json& entry : golden().at("rules")) {
    SCOPED_TRACE(entry.at("router").get<std::string>() + " on " +
                 entry.at("logits").get<std::string>());
    const Routed routed(entry);
    if (entry.contains("noisy")) {
      expect_near(routed.logits, flat<double>(entry.at("noisy")), 1e-6);
    }
    EXPECT_EQ(routed.expert, flat<std::int32_t>(entry.at("expert")));
    expect_near(routed.weight, flat<double>(entry.at("weight")), 2e-6);

    const std::vector<float> dweight = floats(flat<double>(entry.at("dweight")));
    for (const bool accumulate : {false, true}) {
      std::vector<double> want = flat<double>(entry.at("dlogits"));
      std::vector<float> dlogits(want.size(), accumulate ? 0.75F : -7.0F);
      const std::int64_t top_k = routed.config.top_k();
      route_backward({.logits = routed.logits_view(),
                      .expert = {routed.expert.data(), {routed.num_tokens, top_k}},
                      .dweight = {dweight.data(), {routed.num_tokens, top_k}},
                      .config = routed.config,
                      .request = routed.request,
                      .dlogits = matrix(dlogits, routed.num_tokens),
                      .accumulate = accumulate});
      for (double& value : want) value += accumulate ? 0.75 : 0;
      expect_near(dlogits, want, 2e-6);
    }
    if (!entry.contains("dnoise_logits")) continue;
    const std::vector<float> dlogits = floats(flat<double>(entry.at("dlogits")));
    std::vector<float> dnoise(dlogits.size(), -7.0F);
    noise_backward({.noise_logits = {routed.noise_logits.data(), routed.logits_view().shape},
                    .dlogits = {dlogits.data(), routed.logits_view().shape},
                    .noise = routed.config.noise,
                    .request = routed.request,
                    .dnoise_logits = matrix(dnoise, routed.num_tokens)});
    expect_near(dnoise, flat<double>(entry.at("dnoise_logits")), 2e-6);
  }
}

TEST(RoutersGolden, EveryRuleWithoutLogitsChoosesAsNumpyDoes) {
  for (const json& entry : golden().at("by_place")) {
    SCOPED_TRACE(entry.at("router").get<std::string>());
    const auto num_tokens = entry.at("tokens").get<std::int64_t>();
    const RouterConfig config =
        parse_router(entry.at("router").get<std::string>(),
                     {.num_experts = entry.at("experts"), .kind = TopKRouter{.top_k = 1}});
    const auto ids = entry.at("token_ids").get<std::vector<std::int32_t>>();
    std::vector<std::int32_t> expert(static_cast<std::size_t>(num_tokens * config.top_k()), -7);
    std::vector<float> weight(expert.size(), -7.0F);
    RouteRequest request = request_of(entry);
    if (!ids.empty()) request.token_ids = {ids.data(), {std::ssize(ids)}};
    route({.config = config,
           .routing = {.expert = matrix(expert, num_tokens), .weight = matrix(weight, num_tokens)},
           .request = request});
    EXPECT_EQ(expert, flat<std::int32_t>(entry.at("expert")));
    EXPECT_EQ(weight, std::vector<float>(weight.size(), 1.0F / static_cast<float>(config.top_k())));
  }
}

TEST(RoutersGolden, JitterMultipliesTokensAndTheirGradientByTheSameFactors) {
  const json& entry = golden().at("jitter");
  const auto factor = flat<double>(entry.at("factor"));
  std::vector<float> tokens(factor.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<float>(i) - 7;
  const RouterNoise noise{RouterNoise::Kind::kInputJitter, entry.at("size")};
  std::vector<float> jittered(tokens.size(), -7.0F);
  add_noise({.tokens = {reinterpret_cast<const std::byte*>(tokens.data()), DType::kF32, 3, 7},
             .jittered = matrix(jittered, 3),
             .noise = noise,
             .request = request_of(entry)});
  std::vector<double> want(factor);
  for (std::size_t i = 0; i < want.size(); ++i) want[i] *= double{tokens[i]};
  expect_near(jittered, want, 1e-6);
  std::vector<float> gradient = tokens;
  add_noise({.jittered = matrix(gradient, 3), .noise = noise, .request = request_of(entry)});
  EXPECT_EQ(gradient, jittered);
}

TEST(RoutersGolden, LearnedNoiseWantsTheLogitsOfItsSize) {
  std::vector<float> values(8, 1.0F);
  std::vector<float> out(8);
  const RouterNoise noise{RouterNoise::Kind::kLearned, 0.01F};
  const Matrix<float> logits = matrix(values, 4);
  NoiseArgs args{.logits = logits, .noise_logits = {out.data(), {3, 2}}, .noise = noise};
  test::expect_error(ErrorCode::kInvalidArgument, "noise_logits", [&] { add_noise(args); });
  NoiseBackwardArgs back{.dlogits = logits,
                         .noise = noise,
                         .request = {.training = true},
                         .dnoise_logits = matrix(out, 4)};
  test::expect_error(ErrorCode::kInvalidArgument, "noise_logits", [&] { noise_backward(back); });
  back.request.training = false;  // then there was no noise
  out.assign(out.size(), -7.0F);
  noise_backward(back);
  EXPECT_EQ(out, std::vector<float>(out.size(), 0.0F));
  back.noise.kind = RouterNoise::Kind::kLogits;
  test::expect_error(ErrorCode::kInvalidArgument, "not learned", [&] { noise_backward(back); });
}

}  // namespace
}  // namespace switchyard
