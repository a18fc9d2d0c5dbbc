#include "layer/cpu/shared_experts.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/half.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {

SharedExperts::SharedExperts(std::unique_ptr<ExpertWeights> weights, Parameter gate)
    : weights_(std::move(weights)), gate_(std::move(gate)) {}

Matrix<const float> SharedExperts::run(ConstRawMatrix tokens, const Execution& execution) {
  const std::int64_t num_tokens = tokens.rows;
  const ExpertConfig& config = weights_->config();
  const double flops = (config.gated ? 6.0 : 4.0) *
                       static_cast<double>(num_tokens * config.hidden) *
                       static_cast<double>(config.inner);
  const ScopedStage stage(
      execution, "shared",
      {.bytes = static_cast<double>(tokens.bytes()) + weights_->bytes_per_expert(),
       .flops = flops,
       .flops_executed = flops});
  Execution quiet = execution;  // its stages are this one's
  quiet.recorder = nullptr;
  const Matrix<std::int32_t> expert = expert_.matrix(num_tokens, 1);
  std::fill_n(expert.data, num_tokens, 0);
  const Matrix<float> weight = weight_.matrix(num_tokens, 1);
  parallel_for(quiet.pool, num_tokens, [&](std::int64_t t, int) {
    weight.data[t] = weight_of(tokens.row(t), tokens.dtype);
  });
  const PlanView view = plan_.reserve(num_tokens, 1, 1, num_tokens);
  plan({.assignments = DenseAssignments{.expert = expert, .weight = weight},
        .plan = view,
        .execution = quiet});
  const RawMatrix sums = sums_.matrix(DType::kF32, num_tokens, tokens.cols);
  const Subtree one{.order = {.num_experts = 1, .groups = 1}, .num_groups = 1};
  runner_.run({.x = tokens,
               .plan = view,
               .weights = weights_.get(),
               .reduced = {.sums = sums, .subtree = one},
               .execution = quiet},
              quiet);
  return {reinterpret_cast<const float*>(sums.data), {num_tokens, tokens.cols}};
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
