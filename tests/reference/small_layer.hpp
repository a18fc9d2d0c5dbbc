#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "reference/backward.hpp"
#include "reference/capacity.hpp"
#include "reference/network.hpp"
#include "testkit/random.hpp"
#include "verify/plain_source.hpp"

namespace switchyard::reference {

/// An index of a vector.
inline std::size_t index_at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// What a layer of the test is like.
struct LayerShape {
  Score score = Score::kSoftmax;
  bool renormalize = true;
  float scale = 1.0F;
  std::int32_t num_experts = 4;
  std::int32_t top_k = 2;
  Activation activation = Activation::kSilu;
  bool gated = true;
  bool bias = false;
  bool router_bias = false;
  bool selection_bias = false;
  bool shared = false;
  bool shared_gated = false;
  bool given = false;
  ZeroComputationExperts beside{};  ///< num_experts.
  bool gating_residual = false;
  double capacity_factor = 0;
  DropPolicy policy = DropPolicy::kToken;
  std::uint64_t seed = 1;
};

/// A layer with a loss, and the gradients that the reference gives it. Its numbers are multiples of
/// 2^-10: each can be moved by 2^-17 exactly.
class SmallLayer {
 public:
  explicit SmallLayer(const LayerShape& shape) : shape_(shape), random_(shape.seed) {
    LayerConfig& config = model.config;
    config.router.num_experts = shape.num_experts + shape.beside.total();
    config.router.zero_computation = shape.beside;
    config.router.gating_residual = shape.gating_residual;
    config.router.as_top_k() = {.top_k = shape.top_k,
                                .score = shape.score,
                                .renormalize = shape.renormalize,
                                .scale = shape.scale};
    config.experts = {.num_experts = shape.num_experts,
                      .hidden = 5,
                      .inner = 3,
                      .gated = shape.gated,
                      .activation = shape.activation,
                      .limit = 0.75F,
                      .bias = shape.bias};
    experts = make_source(config.experts);
    model.experts = experts;
    if (shape.shared) {
      config.shared = config.experts;
      config.shared.num_experts = 1;
      config.shared.inner = 4;
      config.shared_gated = shape.shared_gated;
      shared = make_source(config.shared);
      model.shared = shared;
      if (shape.shared_gated) {
        shared_gate = numbers(hidden());
        model.shared_gate = {shared_gate.data(), DType::kF32, hidden(), Backend::kCpu};
      }
    }
    gate = numbers(num_experts() * hidden());
    if (shape.router_bias) router_bias = numbers(num_experts());
    if (shape.score == Score::kSparseMixer) {  // so that some logits are near each other
      for (float& bias : router_bias) bias += 32.0F;
    }
    if (shape.selection_bias) selection_bias = numbers(num_experts());
    constants = numbers(3 * hidden() * shape.beside.constant);
    model.constant_experts = {constants.data(), DType::kF32, std::ssize(constants), Backend::kCpu};
    if (shape.gating_residual) {
      residual = numbers(num_experts() * num_experts());
      previous_logits = numbers(kTokens * num_experts());
    }
    const std::vector<float> x = numbers(kTokens * hidden());
    tokens.assign(x.begin(), x.end());
    const std::vector<float> g = numbers(kTokens * hidden());
    dout.assign(g.begin(), g.end());
    dlogits = numbers(kTokens * num_experts());
    choose();
  }

  static constexpr std::int64_t kTokens = 4;
  [[nodiscard]] std::int64_t hidden() const { return model.config.experts.hidden; }
  [[nodiscard]] std::int64_t num_experts() const { return model.config.router.num_experts; }

  [[nodiscard]] RouterWeights router() const { return {gate, router_bias, selection_bias}; }
  [[nodiscard]] std::vector<Bounded> logits() const {
    std::vector<Bounded> made =
        router_logits(tokens, hidden(), model.config.router.num_experts, router());
    add_residual(made, residual, previous_logits);
    return made;
  }

  /// sum of dout * out + sum of dlogits * logits, in double.
  [[nodiscard]] double loss() const {
    const std::vector<Bounded> all_logits = logits();
    double sum = 0;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const auto x = std::span(tokens).subspan(index_at(t * hidden()), index_at(hidden()));
      const auto of_token =
          std::span(all_logits).subspan(index_at(t * num_experts()), index_at(num_experts()));
      const auto chosen =
          std::span(expert).subspan(index_at(t * shape_.top_k), index_at(shape_.top_k));
      std::vector<double> weights(index_at(shape_.top_k));
      if (!shape_.given) {
        const std::vector<Bounded> made = chosen_weights(model.config.router, of_token, chosen);
        for (std::size_t k = 0; k < made.size(); ++k) weights[k] = made[k].value;
        for (std::size_t e = 0; e < of_token.size(); ++e) {
          sum += of_token[e].value * double{dlogits[index_at(t * num_experts()) + e]};
        }
      }
      for (std::size_t k = 0; k < chosen.size(); ++k) {
        const std::size_t i = index_at(t * shape_.top_k) + k;
        if (shape_.given) weights[k] = weight[i];
        if (chosen[k] < 0 || kept[i] == 0) continue;
        if (chosen[k] >= shape_.num_experts) {
          sum += weights[k] * gained(t, given_by(chosen[k], x));
          continue;
        }
        const ExpertMatrices matrices = read_expert(model.config.experts, *experts, chosen[k], {});
        sum += weights[k] * gained(t, expert_row(model.config.experts, matrices, x, {}));
      }
      if (!shape_.shared) continue;
      const ExpertMatrices matrices = read_expert(model.config.shared, *shared, 0, {});
      sum += shared_factor(model, x).value *
             gained(t, expert_row(model.config.shared, matrices, x, {}));
    }
    return sum;
  }

  [[nodiscard]] LayerGradient gradient(const LayerRun& run = {}) const {
    const std::vector<Bounded> all_logits = logits();
    return layer_gradient(
        model, run,
        {.tokens = tokens,
         .assignments = {.expert = expert, .weight = weight, .kept = kept, .top_k = shape_.top_k},
         .routed = !shape_.given,
         .router = router(),
         .logits = all_logits,
         .gating_residual = residual,
         .previous_logits = previous_logits,
         .dout = dout,
         .dlogits = dlogits});
  }

  LayerModel model;
  std::shared_ptr<verify::PlainSource> experts;
  std::shared_ptr<verify::PlainSource> shared;
  std::vector<float> gate;
  std::vector<float> shared_gate;
  std::vector<float> router_bias;
  std::vector<float> selection_bias;
  std::vector<float> constants;
  std::vector<float> residual;
  std::vector<float> previous_logits;
  std::vector<double> tokens;
  std::vector<double> dout;
  std::vector<float> dlogits;
  std::vector<std::int32_t> expert;
  std::vector<float> weight;
  std::vector<std::uint8_t> kept;

 private:
  std::vector<float> numbers(std::int64_t count) {
    std::vector<float> values(index_at(count));
    for (float& value : values) value = static_cast<float>(random_.between(-1400, 1400)) * 0x1p-10F;
    return values;
  }

  std::shared_ptr<verify::PlainSource> make_source(const ExpertConfig& config) {
    auto source = std::make_shared<verify::PlainSource>(config, DType::kF32);
    for (auto* values : {&source->gate, &source->up, &source->down, &source->gate_bias,
                         &source->up_bias, &source->down_bias}) {
      *values = numbers(std::ssize(*values));
    }
    return source;
  }

  /// A zero-computation expert's output, by its definition.
  [[nodiscard]] std::vector<Bounded> given_by(std::int32_t id, std::span<const double> x) const {
    std::vector<Bounded> y(x.size());
    const std::int32_t number = id - shape_.num_experts;
    if (number >= shape_.beside.constant + shape_.beside.copy) return y;
    double own = 1;  // what the token counts
    std::span<const float> v;
    if (number < shape_.beside.constant) {
      const auto row = [&](int part) {
        return std::span(constants).subspan(index_at((3 * number + part) * hidden()), x.size());
      };
      double logits[2] = {};
      for (int i = 0; i < 2; ++i) {
        for (std::size_t h = 0; h < x.size(); ++h) logits[i] += double{row(i)[h]} * x[h];
      }
      own = std::exp(logits[0]) / (std::exp(logits[0]) + std::exp(logits[1]));
      v = row(2);
    }
    for (std::size_t h = 0; h < x.size(); ++h) {
      y[h].value = own * x[h] + (v.empty() ? 0 : (1 - own) * double{v[h]});
    }
    return y;
  }

  void choose() {
    const std::vector<Bounded> all_logits = logits();
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const auto of_token =
          std::span(all_logits).subspan(index_at(t * num_experts()), index_at(num_experts()));
      const auto chosen = reference::choose(
          model.config.router, token_scores(model.config.router, of_token, selection_bias));
      expert.insert(expert.end(), chosen.begin(), chosen.end());
      for (const Bounded w : chosen_weights(model.config.router, of_token, chosen)) {
        weight.push_back(static_cast<float>(w.value));
      }
    }
    if (shape_.given) {  // An expert twice for a token, an unused place, one expert with none.
      weight = numbers(std::ssize(weight));
      expert[1] = expert[0];
      expert[2] = -1;
      std::replace(expert.begin(), expert.end(), 0, 1);
    }
    kept = kept_mask(
        {.expert = expert,
         .weight = weight,
         .top_k = shape_.top_k,
         .capacity = shape_.capacity_factor > 0
                         ? capacity(shape_.capacity_factor, kTokens, shape_.top_k, num_experts())
                         : 0,
         .policy = shape_.policy});
  }

  [[nodiscard]] double gained(std::int64_t t, const std::vector<Bounded>& row) const {
    double sum = 0;
    for (std::size_t h = 0; h < row.size(); ++h)
      sum += dout[index_at(t * hidden()) + h] * row[h].value;
    return sum;
  }

  LayerShape shape_;
  Random random_;
};

}  // namespace switchyard::reference
