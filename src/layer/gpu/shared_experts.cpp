// One dense expert for all tokens: the plan that says so, its rows, and their sums.
#include "layer/gpu/shared_experts.hpp"

#include <algorithm>
#include <utility>

#include "core/gpu/cuda_memory.hpp"
#include "experts/raw_matrix.hpp"
#include "layer/gpu/backward/kernels.hpp"
#include "layer/gpu/kernels.hpp"
#include "layer/gpu/router/router.hpp"
#include "switchyard/device.hpp"

namespace switchyard {

CudaSharedExperts::CudaSharedExperts(std::unique_ptr<ExpertWeights> weights, const Parameter& gate,
                                     CudaScratch& scratch)
    : weights_(std::move(weights)), scratch_(scratch) {
  if (gate.where() == Backend::kCuda) {
    gate_ = gate.vector();
  } else {
    upload(gate.widened(), uploaded_gate_);
    gate_ = uploaded(uploaded_gate_);
  }
}

void CudaSharedExperts::reserve(std::int64_t num_tokens) {
  const std::int64_t hidden = weights_->config().hidden;
  (void)plan_.reserve(num_tokens, 1, 1, num_tokens);
  scratch_.shared_workspace.reserve(experts_workspace_bytes(num_tokens, *weights_));
  (void)scratch_.shared_rows.matrix(weights_->dtype(), num_tokens, hidden);
  (void)sums_.matrix<float>(num_tokens, hidden);
}

Matrix<const float> CudaSharedExperts::run(ConstRawMatrix tokens, RawMatrix preactivation,
                                           const Execution& execution) {
  const std::int64_t num_tokens = tokens.rows;
  const ScopedStage stage(execution, "shared", work(tokens, 1));
  Execution quiet = with_workspace(execution, scratch_.shared_workspace);
  quiet.recorder = nullptr;
  const PlanView view = plan_.reserve(num_tokens, 1, 1, num_tokens);
  plan_one_expert(tokens, gate_.data, view, static_cast<cudaStream_t>(execution.stream));
  const RawMatrix rows = scratch_.shared_rows.matrix(weights_->dtype(), num_tokens, tokens.cols);
  experts({.x = tokens,
           .x_is_packed = true,
           .plan = view,
           .weights = weights_.get(),
           .rows = rows,
           .preactivation = preactivation,
           .execution = quiet});
  const RawMatrix sums = sums_.matrix(DType::kF32, num_tokens, tokens.cols);
  combine({.rows = rows,
           .plan = view,
           .reduced = {.sums = sums,
                       .subtree = {.order = {.num_experts = 1, .groups = 1}, .num_groups = 1}},
           .execution = quiet});
  return {reinterpret_cast<const float*>(sums.data), {num_tokens, tokens.cols}};
}

void CudaSharedExperts::backward(const CudaSharedBackwardArgs& args) {
  const std::int64_t num_tokens = args.tokens.rows;
  const ScopedStage stage(args.execution, "shared_backward", work(args.tokens, 2));
  Execution quiet = args.execution;
  quiet.recorder = nullptr;
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  const PlanView view = plan_.reserve(num_tokens, 1, 1, num_tokens);
  plan_one_expert(args.tokens, gate_.data, view, stream);
  const bool to_gate = args.dlogit.data != nullptr;
  // One expert that all tokens meet: row t is token t's.
  const Vector<float> dweight = to_gate ? dweight_.vector<float>(num_tokens) : Vector<float>{};
  experts_backward({.x = args.tokens,
                    .dout = args.dout,
                    .preactivation = args.preactivation,
                    .plan = view,
                    .weights = weights_.get(),
                    .drow_weight = dweight,
                    .dx_rows = raw(args.dtokens),
                    .gradients = args.gradients,
                    .accumulate = args.accumulate,
                    .execution = quiet});
  if (!to_gate) return;
  through_sigmoid(view.row_weight, dweight, args.dlogit, stream);
  if (args.dgate.data == nullptr) return;
  const std::int64_t hidden = args.tokens.cols;
  router_gemm_backward(
      {.tokens = args.tokens,
       .gate = {reinterpret_cast<const std::byte*>(gate_.data), DType::kF32, 1, hidden},
       .dlogits = {args.dlogit.data, {num_tokens, 1}},
       .dgate = {reinterpret_cast<std::byte*>(args.dgate.data), DType::kF32, 1, hidden},
       .accumulate = args.accumulate,
       .execution = quiet});
}

std::int64_t CudaSharedExperts::backward_workspace_bytes(std::int64_t num_tokens) const {
  return std::max(
      experts_backward_workspace_bytes(weights_->config(), weights_->dtype(), 1, num_tokens),
      router_gemm_backward_workspace_bytes(num_tokens, 1, weights_->config().hidden));
}

std::int64_t CudaSharedExperts::preactivation_cols() const {
  return (weights_->config().gated ? 2 : 1) * weights_->config().inner;
}

/// Of `passes` times the forward's products.
StageWork CudaSharedExperts::work(ConstRawMatrix tokens, double passes) const {
  const ExpertConfig& config = weights_->config();
  const double flops = passes * (config.gated ? 6.0 : 4.0) *
                       static_cast<double>(tokens.rows * tokens.cols * config.inner);
  return {.flops = flops, .flops_executed = flops};
}

}  // namespace switchyard
