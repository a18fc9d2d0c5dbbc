// The numbers of a case: weights, tokens and, where the router is skipped, the routing.
#include "verify/problem.hpp"
#include "testkit/quantised_source.hpp"
#include "testkit/random.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace switchyard::verify {
namespace {

enum Stream : std::uint64_t {
  kTokens = 1,
  kRouter,
  kExperts,
  kShared,
  kRouting,
  kTokenIds,
  kNoise,
  kNetwork,
  kConstants,
  kResidual
};

/// How large the numbers of a case are.
struct Sizes {
  float tokens = 1.7F;
  float gate = 3.0F;     ///< Times 1 / sqrt(H).
  float weights = 1.7F;  ///< Times 1 / sqrt(length of the sum).
};

Sizes sizes_of(const Case& test) {
  switch (test.data) {
    case Data::kLarge: return {.tokens = test.compute == DType::kF16 ? 8.0F : 40.0F, .gate = 6.0F};
    case Data::kSmall: return {.tokens = 0x1p-10F, .weights = 0x1p-7F};
    case Data::kZero: return {.tokens = 0.0F};
    default: return {};
  }
}

void fill(Random& random, std::vector<float>& values, DType dtype, float size) {
  for (float& value : values) value = round_to(dtype, size * random.signed_unit());
}

float per_term(float size, std::int64_t terms) {
  return size / std::sqrt(static_cast<float>(terms));
}

std::shared_ptr<const ExpertSource> make_source(const Case& test, const ExpertConfig& config,
                                                Stream stream) {
  Random random(test.seed, stream);
  const Sizes sizes = sizes_of(test);
  if (has_codes(test.weights)) {
    return std::make_shared<QuantisedSource>(config, test.weights, random.bits(), sizes.weights,
                                             int4_form_of(test));
  }
  auto source = std::make_shared<PlainSource>(config, test.stored);
  fill(random, source->gate, test.stored, per_term(sizes.weights, config.hidden));
  fill(random, source->up, test.stored, per_term(sizes.weights, config.hidden));
  fill(random, source->down, test.stored, per_term(sizes.weights, config.inner));
  for (auto* bias : {&source->gate_bias, &source->up_bias, &source->down_bias}) {
    fill(random, *bias, DType::kF32, 0.5F * sizes.weights);
  }
  return source;
}

/// Sums of matrices around 1, biases too; the logarithm of a scale is beyond its clamp at times.
std::vector<float> network_of(const Case& test) {
  const RouterNetwork& network = test.layer.router.network;
  const std::int64_t hidden = test.layer.experts.hidden;
  std::vector<float> values(static_cast<std::size_t>(network.size(hidden)));
  if (values.empty()) return values;
  Random random(test.seed, kNetwork);
  fill(random, values, DType::kF32, per_term(1.7F, hidden));
  if (network.kind == RouterNetwork::Kind::kCosine) {
    values.back() = random.one_in(4) ? 5.0F : 3 * random.signed_unit();
  }
  return values;
}

void make_router(Problem& problem) {
  const Case& test = problem.test;
  const RouterConfig& config = test.layer.router;
  const auto gates = static_cast<std::size_t>(config.num_gates());
  const auto num_experts = gates * static_cast<std::size_t>(config.num_experts);
  const auto hidden = static_cast<std::size_t>(test.layer.experts.hidden);
  Random random(test.seed, kRouter);
  const auto num_logits = gates * static_cast<std::size_t>(config.num_logits());
  const auto features =
      static_cast<std::size_t>(config.network.features(test.layer.experts.hidden));
  std::vector<float> gate(num_logits * features);
  std::vector<float> router_bias(test.router_bias ? num_logits : 0);
  std::vector<float> selection_bias(test.selection_bias ? num_experts : 0);
  fill(random, gate, DType::kF32, per_term(sizes_of(test).gate, test.layer.experts.hidden));
  fill(random, router_bias, DType::kF32, 1.0F);
  fill(random, selection_bias, DType::kF32, 0.3F);
  if (test.data == Data::kTies) {
    for (float& value : gate) value = std::round(4 * value) / 4;
    for (std::size_t e = 1; e < num_experts; ++e) {
      if (random.one_in(2)) continue;
      const auto twin =
          static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(e) - 1));
      std::copy_n(&gate[twin * features], features, &gate[e * features]);
      if (test.router_bias) router_bias[e] = router_bias[twin];
      if (test.selection_bias) selection_bias[e] = selection_bias[twin];
    }
  }
  LayerModel& model = problem.model;
  model.router_network = network_of(test);
  model.gate = std::move(gate);
  model.router_bias = std::move(router_bias);
  model.selection_bias = std::move(selection_bias);
  if (config.noise.kind == RouterNoise::Kind::kLearned) {
    Random of_noise(test.seed, kNoise);
    std::vector<float> noise_gate(num_experts * hidden);
    fill(of_noise, noise_gate, DType::kF32,
         per_term(sizes_of(test).gate, test.layer.experts.hidden));
    model.noise_gate = std::move(noise_gate);
  }
}

/// Logits of W around those of a gate, vectors as tokens are, but exact in no 16 bits.
void make_zero_computation(Problem& problem) {
  const Case& test = problem.test;
  const RouterConfig& router = test.layer.router;
  const std::int64_t hidden = test.layer.experts.hidden;
  Random random(test.seed, kConstants);
  std::vector<float> constants;
  for (std::int32_t c = 0; c < router.zero_computation.constant; ++c) {
    const float of_logits = per_term(sizes_of(test).gate, hidden);
    for (const float size : {of_logits, of_logits, std::max(sizes_of(test).tokens, 1.0F)}) {
      std::vector<float> row(static_cast<std::size_t>(hidden));
      fill(random, row, DType::kF32, size);
      constants.insert(constants.end(), row.begin(), row.end());
    }
  }
  problem.model.constant_experts = std::move(constants);
  if (!router.gating_residual) return;
  const std::int64_t columns = router.num_logits();
  Random of_residual(test.seed, kResidual);
  std::vector<float> residual(static_cast<std::size_t>(columns * columns));
  fill(of_residual, residual, DType::kF32, per_term(1.7F, columns));
  problem.model.gating_residual = std::move(residual);
  problem.previous_logits.resize(static_cast<std::size_t>(test.num_tokens * columns));
  fill(of_residual, problem.previous_logits, DType::kF32, 2.0F);
}

void make_tokens(Problem& problem) {
  const Case& test = problem.test;
  const auto hidden = static_cast<std::size_t>(test.layer.experts.hidden);
  Random random(test.seed, kTokens);
  problem.tokens.resize(static_cast<std::size_t>(test.num_tokens) * hidden);
  fill(random, problem.tokens, test.tokens, sizes_of(test).tokens);
  if (test.data == Data::kTies) {
    for (float& value : problem.tokens) value = std::round(value);
  }
  if (test.data == Data::kNan && test.num_tokens > 0) {
    const auto token = static_cast<std::size_t>(random.between(0, test.num_tokens - 1));
    problem.tokens[token * hidden + hidden / 2] = std::nanf("");
  }
}

void make_routing(Problem& problem) {
  const Case& test = problem.test;
  if (test.given == Given::kNothing) return;
  const RouterConfig& router = test.layer.router;
  Random random(test.seed, kRouting);
  const std::int64_t one = random.between(0, router.num_experts - 1);
  for (std::int64_t i = 0; i < test.num_tokens * router.top_k(); ++i) {
    std::int64_t expert = random.between(random.one_in(3) ? -1 : 0, router.num_experts - 1);
    if (test.given == Given::kOne) expert = one;
    if (test.given == Given::kNone) expert = -1;
    problem.given_expert.push_back(static_cast<std::int32_t>(expert));
    // Quarters, at times: equal weights are what a drop policy has to decide.
    const float weight = random.signed_unit();
    problem.given_weight.push_back(random.one_in(2) ? weight : std::round(4 * weight) / 4);
  }
  if (test.given == Given::kBadId && !problem.given_expert.empty()) {
    const auto place = random.between(0, std::ssize(problem.given_expert) - 1);
    problem.given_expert[static_cast<std::size_t>(place)] =
        random.one_in(2) ? router.num_experts : -2;
  }
}

}  // namespace

Problem make_problem(const Case& test) {
  Problem problem;
  problem.test = test;
  problem.model.config = test.layer;
  problem.model.experts = make_source(test, test.layer.experts, kExperts);
  if (test.layer.shared.num_experts > 0) {
    problem.model.shared = make_source(test, test.layer.shared, kShared);
  }
  if (test.layer.shared_gated) {
    Random random(test.seed, kShared + 100);
    std::vector<float> gate(static_cast<std::size_t>(test.layer.experts.hidden));
    fill(random, gate, DType::kF32, per_term(sizes_of(test).gate, test.layer.experts.hidden));
    problem.model.shared_gate = std::move(gate);
  }
  make_router(problem);
  make_zero_computation(problem);
  make_tokens(problem);
  Random random(test.seed, kTokenIds);
  for (std::int64_t t = 0; t < test.num_tokens; ++t) {
    problem.token_ids.push_back(static_cast<std::int32_t>(random.between(0, 999)));
  }
  make_routing(problem);
  return problem;
}

RouteRequest request_of(const Problem& problem, std::int64_t begin, std::int64_t end) {
  const bool residual =
      problem.test.layer.router.gating_residual && problem.test.given == Given::kNothing;
  const std::int64_t columns = problem.test.layer.router.num_logits();
  return {.previous_logits =
              residual ? Matrix<const float>{problem.previous_logits.data() + begin * columns,
                                             {end - begin, columns}}
                       : Matrix<const float>{},
          .token_ids = {problem.token_ids.data() + begin, {end - begin}},
          .seed = problem.test.seed,
          .step = problem.test.seed % 1000,
          .layer = 3,
          .first_token = begin,
          .training = problem.test.training};
}

std::vector<std::byte> encode(DType dtype, std::span<const float> values) {
  std::vector<std::byte> bytes(values.size() * static_cast<std::size_t>(size_of(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_float(bytes.data(), dtype, static_cast<std::int64_t>(i), values[i]);
  }
  return bytes;
}

std::vector<float> decode(DType dtype, std::span<const std::byte> bytes) {
  const std::size_t count = bytes.size() / static_cast<std::size_t>(size_of(dtype));
  std::vector<float> values;
  values.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    values.push_back(load_float(bytes.data(), dtype, static_cast<std::int64_t>(i)));
  }
  return values;
}

}  // namespace switchyard::verify
