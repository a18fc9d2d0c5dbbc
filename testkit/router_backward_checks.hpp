#pragma once

// The router's way back, each stage by itself, against the reference in double. Memory is the
// host's; who runs a stage elsewhere copies.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "reference/backward.hpp"
#include "switchyard/backward.hpp"
#include "testkit/random_values.hpp"

namespace switchyard::test {

using reference::Bounded;
using reference::BoundedSum;

using RunRoute = std::function<void(const RouteBackwardArgs&)>;
using RunProducts = std::function<void(const RouterGemmBackwardArgs&)>;

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// A routing with the gradients of its weights.
struct Routed {
  RouterConfig config{};
  std::int64_t num_tokens = 0;
  std::vector<float> logits{}, dweight{}, losses{};
  std::vector<std::int32_t> expert{};

  Routed(std::int64_t tokens, std::int32_t num_experts, const TopKRouter& kind, float size,
         unsigned seed)
      : config{.num_experts = num_experts, .kind = kind}, num_tokens(tokens) {
    std::mt19937 random(seed);
    logits = random_floats(tokens * num_experts, random, size);
    losses = random_floats(tokens * num_experts, random);
    dweight = random_floats(tokens * kind.top_k, random);
    std::vector<std::int32_t> ids(at(num_experts));
    for (std::int32_t e = 0; e < num_experts; ++e) ids[at(e)] = e;
    for (std::int64_t t = 0; t < tokens; ++t) {  // any choice: that it is the best is no matter
      std::shuffle(ids.begin(), ids.end(), random);
      expert.insert(expert.end(), ids.begin(), ids.begin() + kind.top_k);
    }
  }

  /// The best of each token, in descending order, where logits are moved up by `level`: nearer to
  /// each other for what goes by quotients.
  void choose_best(float level) {
    for (float& logit : logits) logit += level;
    const std::int32_t num_experts = config.num_experts;
    std::vector<std::int32_t> ids(at(num_experts));
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      for (std::int32_t e = 0; e < num_experts; ++e) ids[at(e)] = e;
      const float* of_token = &logits[at(t * num_experts)];
      std::stable_sort(ids.begin(), ids.end(),
                       [&](std::int32_t a, std::int32_t b) { return of_token[a] > of_token[b]; });
      std::copy_n(ids.begin(), config.top_k(), expert.begin() + t * config.top_k());
    }
  }

  [[nodiscard]] std::vector<float> back(bool accumulate,
                                        const RunRoute& run = route_backward) const {
    std::vector<float> dlogits = losses;
    if (!accumulate) dlogits.assign(losses.size(), std::numeric_limits<float>::quiet_NaN());
    const std::int64_t top_k = config.top_k();
    run({.logits = {logits.data(), {num_tokens, config.num_experts}},
         .expert = {expert.data(), {num_tokens, top_k}},
         .dweight = {dweight.data(), {num_tokens, top_k}},
         .config = config,
         .dlogits = {dlogits.data(), {num_tokens, config.num_experts}},
         .accumulate = accumulate});
    return dlogits;
  }

  void expect_reference(bool accumulate, const RunRoute& run = route_backward) const {
    const std::vector<float> dlogits = back(accumulate, run);
    const std::size_t num_experts = at(config.num_experts);
    const std::size_t top_k = at(config.top_k());
    for (std::size_t t = 0; t < at(num_tokens); ++t) {
      std::vector<Bounded> exact_logits;
      std::vector<Bounded> exact_dweight;
      for (std::size_t e = 0; e < num_experts; ++e) {
        exact_logits.push_back({double{logits[t * num_experts + e]}, 0});
      }
      for (std::size_t k = 0; k < top_k; ++k) {
        exact_dweight.push_back({double{dweight[t * top_k + k]}, 0});
      }
      std::span<const float> start;
      if (accumulate) start = std::span(losses).subspan(t * num_experts, num_experts);
      const auto want = reference::route_gradient(
          config, exact_logits, std::span(expert).subspan(t * top_k, top_k), exact_dweight, start);
      for (std::size_t e = 0; e < num_experts; ++e) {
        const float computed = dlogits[t * num_experts + e];
        ASSERT_TRUE(reference::admits(want[e], DType::kF32, double{computed}))
            << "token " << t << " expert " << e << " is " << computed << ", want " << want[e].value
            << " +- " << want[e].error;
      }
    }
  }
};

/// tokens [T, H], gate [E, H] and dlogits [T, E] with what comes of them.
struct Products {
  std::int64_t num_tokens, hidden, num_experts;
  DType token_type, gate_type;
  std::vector<std::byte> tokens{}, gate{};
  std::vector<float> dlogits{};

  struct Result {
    std::vector<float> dtokens, dbias;
    std::vector<std::byte> dgate;
    bool operator==(const Result&) const = default;
  };

  Products(std::int64_t t, std::int64_t h, std::int64_t e, DType of_tokens, DType of_gate)
      : num_tokens(t), hidden(h), num_experts(e), token_type(of_tokens), gate_type(of_gate) {
    std::mt19937 random(11);
    tokens = stored_as(of_tokens, random_floats(t * h, random));
    gate = stored_as(of_gate, random_floats(e * h, random));
    dlogits = random_floats(t * e, random);
    for (std::size_t i = 0; i < dlogits.size(); i += 3) dlogits[i] = 0.0F;
  }

  [[nodiscard]] Result back(bool accumulate, const RunProducts& run = router_gemm_backward) const {
    const float start = accumulate ? 1.5F : std::numeric_limits<float>::quiet_NaN();
    Result result{
        .dtokens = std::vector<float>(at(num_tokens * hidden), -7.0F),
        .dbias = std::vector<float>(at(num_experts), start),
        .dgate = stored_as(gate_type, std::vector<float>(at(num_experts * hidden), start))};
    run({.tokens = {tokens.data(), token_type, num_tokens, hidden},
         .gate = {gate.data(), gate_type, num_experts, hidden},
         .dlogits = {dlogits.data(), {num_tokens, num_experts}},
         .dtokens = {result.dtokens.data(), {num_tokens, hidden}},
         .dgate = {result.dgate.data(), gate_type, num_experts, hidden},
         .dbias = {result.dbias.data(), {num_experts}},
         .accumulate = accumulate});
    return result;
  }

  void expect_reference(bool accumulate, const RunProducts& run = router_gemm_backward) const {
    const Result result = back(accumulate, run);
    const std::vector<float> x = loaded_as_floats(token_type, tokens);
    const std::vector<float> w = loaded_as_floats(gate_type, gate);
    const std::vector<float> dgate = loaded_as_floats(gate_type, result.dgate);
    std::vector<BoundedSum> of_tokens(x.size()), of_gate(w.size()), of_bias(at(num_experts));
    for (std::size_t t = 0; t < at(num_tokens); ++t) {
      for (std::size_t e = 0; e < at(num_experts); ++e) {
        const Bounded d{double{dlogits[t * at(num_experts) + e]}, 0};
        of_bias[e].add(d);
        for (std::size_t h = 0; h < at(hidden); ++h) {
          const std::size_t token = t * at(hidden) + h;
          const std::size_t weight = e * at(hidden) + h;
          of_tokens[token].add(d, {double{w[weight]}, 0});
          of_gate[weight].add(d, {double{x[token]}, 0});
        }
      }
    }
    const auto expect = [&](const char* name, const std::vector<BoundedSum>& sums, DType dtype,
                            const std::vector<float>& values, double start) {
      for (std::size_t i = 0; i < sums.size(); ++i) {
        const Bounded want = add(sums[i].total(), {start, 0});
        ASSERT_TRUE(reference::admits(want, dtype, double{values[i]}))
            << name << " " << i << " is " << values[i] << ", want " << want.value << " +- "
            << want.error;
      }
    };
    const double start = accumulate ? 1.5 : 0;
    expect("dtokens", of_tokens, DType::kF32, result.dtokens, 0);
    expect("dgate", of_gate, gate_type, dgate, start);
    expect("dbias", of_bias, DType::kF32, result.dbias, start);
  }
};

}  // namespace switchyard::test
