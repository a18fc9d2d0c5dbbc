#include "reference/around/zero_computation.hpp"
#include "reference/backward.hpp"
#include "reference/network.hpp"

// A layer's gradients: expert by expert, then the router, then the shared experts.

namespace switchyard::reference {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

void append(std::vector<Bounded>& to, const std::vector<Bounded>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

void append(ExpertGradient& to, const ExpertGradient& from) {
  append(to.w13, from.w13);
  append(to.w2, from.w2);
  append(to.b13, from.b13);
  append(to.b2, from.b2);
}

class LayerBackward {
 public:
  LayerBackward(const LayerModel& model, const LayerRun& run, const BackwardInput& input)
      : model_(model),
        run_(run),
        input_(input),
        hidden_(at(model.config.experts.hidden)),
        num_tokens_(input.tokens.size() / hidden_),
        dtokens_(input.tokens.size()) {}

  LayerGradient all() {
    experts();
    if (input_.routed) router();
    if (model_.shared != nullptr) shared();
    gradient_.tokens = totals(dtokens_);
    return std::move(gradient_);
  }

 private:
  [[nodiscard]] std::span<const double> row(std::span<const double> values, std::size_t t) const {
    return values.subspan(t * hidden_, hidden_);
  }

  void add_to_token(std::size_t t, const std::vector<Bounded>& dx) {
    for (std::size_t h = 0; h < hidden_; ++h) dtokens_[t * hidden_ + h].add(dx[h]);
  }

  /// A row's part of dx as it waits for the sum.
  [[nodiscard]] std::vector<Bounded> rounded(std::vector<Bounded> dx) const {
    for (Bounded& value : dx) value = convert(run_.precision.compute, value);
    return dx;
  }

  void experts() {
    const ExpertConfig& config = model_.config.experts;
    const Assignments& given = input_.assignments;
    const bool on_input = model_.config.weight_on_input;
    const std::vector<double> tokens = expert_tokens(model_, run_, input_.tokens, given.weight);
    gradient_.weight.resize(given.expert.size());
    for (std::int32_t e = 0; e < config.num_experts; ++e) {
      const ExpertMatrices matrices = read_expert(config, *model_.experts, e, run_.precision);
      ExpertBackward expert(config, matrices, run_.precision);
      for (std::size_t i = 0; i < given.expert.size(); ++i) {
        if (given.expert[i] != e || (!given.kept.empty() && given.kept[i] == 0)) continue;
        const std::size_t t = i / at(given.top_k);
        const Bounded weight{double{given.weight[i]}, 0};
        const auto back =
            expert.add(row(tokens, t), row(input_.dout, t), on_input ? Bounded{1, 0} : weight);
        gradient_.weight[i] = back.weight;
        std::vector<Bounded> dx = run_.round_rows ? rounded(back.dx) : back.dx;
        if (on_input) {
          gradient_.weight[i] = product(dx, row(input_.tokens, t));
          for (Bounded& value : dx) value = multiply(value, weight);
        }
        add_to_token(t, dx);
      }
      append(gradient_.experts, expert.gradient());
    }
    gradient_.constant_experts = zero_computation_gradient(model_, input_.tokens, given,
                                                           input_.dout, gradient_.weight, dtokens_);
  }

  [[nodiscard]] static Bounded product(const std::vector<Bounded>& a, std::span<const double> b) {
    BoundedSum sum;
    for (std::size_t h = 0; h < a.size(); ++h) sum.add(a[h], {b[h], 0});
    return sum.total();
  }

  void router() {
    const RouterConfig& config = model_.config.router;
    const std::size_t num_experts = at(config.num_logits());
    const std::size_t top_k = at(input_.assignments.top_k);
    const bool is_linear = config.network.is_linear();
    std::vector<BoundedSum> dgate(is_linear ? num_experts * hidden_ : 0);
    std::vector<BoundedSum> dbias(num_experts);
    std::vector<BoundedSum> dnoise_gate(input_.noise_gate.size());
    for (std::size_t t = 0; t < num_tokens_; ++t) {
      std::span<const float> losses;
      if (!input_.dlogits.empty()) losses = input_.dlogits.subspan(t * num_experts, num_experts);
      const std::vector<Bounded> dlogits =
          route_gradient(config, input_.logits.subspan(t * num_experts, num_experts),
                         input_.assignments.expert.subspan(t * top_k, top_k),
                         std::span(gradient_.weight).subspan(t * top_k, top_k), losses);
      for (std::size_t e = 0; e < num_experts; ++e) {
        dbias[e].add(dlogits[e]);
        for (std::size_t h = 0; is_linear && h < hidden_; ++h) {
          const double weight = input_.router.gate[e * hidden_ + h];
          dgate[e * hidden_ + h].add(dlogits[e], {input_.tokens[t * hidden_ + h], 0});
          dtokens_[t * hidden_ + h].add(dlogits[e], {weight, 0});
        }
        if (!dnoise_gate.empty()) {
          noise(t, e, multiply(dlogits[e], input_.noise_slopes[t * num_experts + e]), dnoise_gate);
        }
      }
      append(gradient_.logits, dlogits);
    }
    gradient_.gate = totals(dgate);
    gradient_.router_bias = totals(dbias);
    gradient_.noise_gate = totals(dnoise_gate);
    if (!input_.gating_residual.empty()) residual(num_experts);
    if (is_linear) return;
    NetworkGradient network = network_gradient(config, input_.tokens, model_.config.experts.hidden,
                                               input_.router, gradient_.logits);
    for (std::size_t i = 0; i < dtokens_.size(); ++i) dtokens_[i].add(network.tokens[i]);
    gradient_.gate = std::move(network.gate);
    gradient_.network = std::move(network.parameters);
  }

  /// Through what the logits of the layer before were multiplied by.
  void residual(std::size_t columns) {
    std::vector<BoundedSum> dresidual(columns * columns);
    std::vector<BoundedSum> dprevious(num_tokens_ * columns);
    for (std::size_t t = 0; t < num_tokens_; ++t) {
      for (std::size_t e = 0; e < columns; ++e) {
        const Bounded dlogit = gradient_.logits[t * columns + e];
        for (std::size_t j = 0; j < columns; ++j) {
          const double before = input_.previous_logits[t * columns + j];
          const double weight = input_.gating_residual[e * columns + j];
          dresidual[e * columns + j].add(dlogit, {before, 0});
          dprevious[t * columns + j].add(dlogit, {weight, 0});
        }
      }
    }
    gradient_.gating_residual = totals(dresidual);
    gradient_.previous_logits = totals(dprevious);
  }

  /// Through the logit of one expert's noise.
  void noise(std::size_t t, std::size_t e, Bounded dnoise, std::vector<BoundedSum>& dnoise_gate) {
    for (std::size_t h = 0; h < hidden_; ++h) {
      dnoise_gate[e * hidden_ + h].add(dnoise, {input_.tokens[t * hidden_ + h], 0});
      dtokens_[t * hidden_ + h].add(dnoise, {double{input_.noise_gate[e * hidden_ + h]}, 0});
    }
  }

  /// Rows of one expert whose weight is the factor of its gate.
  void shared() {
    const ExpertConfig& config = model_.config.shared;
    const ExpertMatrices matrices = read_expert(config, *model_.shared, 0, run_.precision);
    ExpertBackward expert(config, matrices, run_.precision);
    const std::vector<double> gate = shared_gate(model_);
    std::vector<BoundedSum> dgate(gate.size());
    for (std::size_t t = 0; t < num_tokens_; ++t) {
      const auto x = row(input_.tokens, t);
      const Bounded factor = shared_factor(model_, x);
      const auto back = expert.add(x, row(input_.dout, t), factor);
      add_to_token(t, back.dx);
      if (gate.empty()) continue;
      const Bounded rest = add({1.0, 0}, {-factor.value, factor.error});
      const Bounded dlogit = multiply(multiply(factor, rest), back.weight);
      for (std::size_t h = 0; h < hidden_; ++h) {
        dgate[h].add(dlogit, {x[h], 0});
        dtokens_[t * hidden_ + h].add(dlogit, {gate[h], 0});
      }
    }
    gradient_.shared = expert.gradient();
    gradient_.shared_gate = totals(dgate);
  }

  const LayerModel& model_;
  const LayerRun& run_;
  const BackwardInput& input_;
  std::size_t hidden_;
  std::size_t num_tokens_;
  std::vector<BoundedSum> dtokens_;
  LayerGradient gradient_;
};

}  // namespace

LayerGradient layer_gradient(const LayerModel& model, const LayerRun& run,
                             const BackwardInput& input) {
  return LayerBackward(model, run, input).all();
}

}  // namespace switchyard::reference
