#include "layer/cpu/shared_experts.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/half.hpp"
#include "core/row_ops.hpp"
#include "experts/raw_matrix.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {

SharedExperts::SharedExperts(std::unique_ptr<ExpertWeights> weights, Parameter gate)
    : weights_(std::move(weights)), gate_(std::move(gate)) {}

Matrix<const float> SharedExperts::run(ConstRawMatrix tokens, RawMatrix preactivation,
                                       const Execution& execution) {
  const std::int64_t num_tokens = tokens.rows;
  const ScopedStage stage(execution, "shared", work(tokens, 1));
  Execution quiet = execution;  // its stages are this one's
  quiet.recorder = nullptr;
  const PlanView view = make_plan(tokens, quiet);
  const RawMatrix sums = sums_.matrix(DType::kF32, num_tokens, tokens.cols);
  const Subtree one{.order = {.num_experts = 1, .groups = 1}, .num_groups = 1};
  runner_.run({.x = tokens,
               .plan = view,
               .weights = weights_.get(),
               .reduced = {.sums = sums, .subtree = one},
               .preactivation = preactivation,
               .execution = quiet},
              quiet);
  return {reinterpret_cast<const float*>(sums.data), {num_tokens, tokens.cols}};
}

void SharedExperts::backward(const SharedBackwardArgs& args) {
  const std::int64_t num_tokens = args.tokens.rows;
  const std::int64_t hidden = args.tokens.cols;
  const ScopedStage stage(args.execution, "shared_backward", work(args.tokens, 2));
  Execution quiet = args.execution;
  quiet.recorder = nullptr;
  const PlanView view = make_plan(args.tokens, quiet);
  const std::span<const float> gate = gate_.floats();
  const bool to_gate =
      !gate.empty() && (args.dgate.data != nullptr || args.dtokens.data != nullptr);
  // One expert that all tokens meet: row t is token t's.
  const Vector<float> dweight = dweight_.vector(num_tokens);
  experts_backward({.x = args.tokens,
                    .dout = args.dout,
                    .preactivation = args.preactivation,
                    .plan = view,
                    .weights = weights_.get(),
                    .drow_weight = to_gate ? dweight : Vector<float>{},
                    .dx_rows = raw(args.dtokens),
                    .gradients = args.gradients,
                    .accumulate = args.accumulate,
                    .execution = quiet});
  if (!to_gate) return;
  std::vector<float> dgate(gate.size());
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const float factor = view.row_weight[t];
    const float dlogit = dweight[t] * factor * (1.0F - factor);
    row_ops::accumulate(args.tokens.dtype, dlogit, args.tokens.row(t), dgate.data(), hidden);
    if (args.dtokens.data == nullptr) continue;
    row_ops::accumulate(DType::kF32, dlogit, gate.data(), args.dtokens.row(t), hidden);
  }
  if (args.dgate.data == nullptr) return;
  row_ops::write_gradient(dgate.data(), DType::kF32, args.dgate.data, hidden, args.accumulate);
}

/// One expert for all, with each token's weight.
PlanView SharedExperts::make_plan(ConstRawMatrix tokens, const Execution& execution) {
  const std::int64_t num_tokens = tokens.rows;
  const Matrix<std::int32_t> expert = expert_.matrix(num_tokens, 1);
  std::fill_n(expert.data, num_tokens, 0);
  const Matrix<float> weight = weight_.matrix(num_tokens, 1);
  parallel_for(execution.pool, num_tokens, [&](std::int64_t t, int) {
    weight.data[t] = weight_of(tokens.row(t), tokens.dtype);
  });
  const PlanView view = plan_.reserve(num_tokens, 1, 1, num_tokens);
  plan({.assignments = DenseAssignments{.expert = expert, .weight = weight},
        .plan = view,
        .execution = execution});
  return view;
}

/// Of `passes` times the forward's products.
StageWork SharedExperts::work(ConstRawMatrix tokens, double passes) const {
  const ExpertConfig& config = weights_->config();
  const double flops = passes * (config.gated ? 6.0 : 4.0) *
                       static_cast<double>(tokens.rows * config.hidden) *
                       static_cast<double>(config.inner);
  return {.bytes = static_cast<double>(tokens.bytes()) + weights_->bytes_per_expert(),
          .flops = flops,
          .flops_executed = flops};
}

// 1, or sigmoid(x . gate): fp32, ascending h.
float SharedExperts::weight_of(const std::byte* token, DType dtype) const {
  if (gate_.empty()) return 1.0F;
  const Vector<const float> gate = gate_.vector();
  float dot = 0.0F;
  for (std::int64_t h = 0; h < gate.size(); ++h) {
    dot = std::fma(load_float(token, dtype, h), gate.data[h], dot);
  }
  return 1.0F / (1.0F + std::exp(-dot));
}

}  // namespace switchyard
