// One dense expert for all tokens: the plan that says so, its rows, and their sums.
#include "layer/gpu/shared_experts.hpp"

#include <utility>

#include "core/gpu/cuda_memory.hpp"
#include "layer/gpu/kernels.hpp"
#include "layer/gpu/router.hpp"
#include "switchyard/device.hpp"

namespace switchyard {

CudaSharedExperts::CudaSharedExperts(std::unique_ptr<ExpertWeights> weights,
                                     const std::vector<float>& gate)
    : weights_(std::move(weights)) {
  upload(gate, gate_);
}

void CudaSharedExperts::reserve(std::int64_t num_tokens) {
  const ExpertConfig& config = weights_->config();
  (void)plan_.reserve(num_tokens, 1, 1, num_tokens);
  workspace_.reserve(experts_workspace_bytes(num_tokens, config.inner, weights_->dtype()));
  (void)rows_.matrix(weights_->dtype(), num_tokens, config.hidden);
  (void)sums_.matrix<float>(num_tokens, config.hidden);
}

Matrix<const float> CudaSharedExperts::run(ConstRawMatrix tokens, const Execution& execution) {
  const ExpertConfig& config = weights_->config();
  const std::int64_t num_tokens = tokens.rows;
  const double flops =
      (config.gated ? 6.0 : 4.0) * static_cast<double>(num_tokens * tokens.cols * config.inner);
  const ScopedStage stage(execution, "shared", {.flops = flops, .flops_executed = flops});
  Execution quiet = with_workspace(execution, workspace_);
  quiet.recorder = nullptr;
  const PlanView view = plan_.reserve(num_tokens, 1, 1, num_tokens);
  plan_one_expert(tokens, uploaded(gate_).data, view, static_cast<cudaStream_t>(execution.stream));
  const RawMatrix rows = rows_.matrix(weights_->dtype(), num_tokens, tokens.cols);
  experts({.x = tokens,
           .x_is_packed = true,
           .plan = view,
           .weights = weights_.get(),
           .rows = rows,
           .execution = quiet});
  const RawMatrix sums = sums_.matrix(DType::kF32, num_tokens, tokens.cols);
  combine({.rows = rows,
           .plan = view,
           .reduced = {.sums = sums,
                       .subtree = {.order = {.num_experts = 1, .groups = 1}, .num_groups = 1}},
           .execution = quiet});
  return {reinterpret_cast<const float*>(sums.data), {num_tokens, tokens.cols}};
}

}  // namespace switchyard
