// The stages of a layer backwards on one GPU, enqueued one after the other; what each computes is
// said in switchyard/backward.hpp. Bound by what the stages are bound by: nothing waits.
#include "layer/gpu/backward/backward.hpp"

#include <algorithm>

#include "core/gpu/cuda_memory.hpp"
#include "layer/gpu/kernels.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/device.hpp"

namespace switchyard {

void CudaLayerBackward::reserve(std::int64_t num_tokens, CudaStages& stages) {
  if (num_tokens <= reserved_tokens_) return;
  const RouterConfig& router = stages.router().config();
  const std::int64_t hidden = stages.hidden();
  const std::int64_t rows = stages.experts().layout_rows(num_tokens);
  const std::int64_t experts = router.num_experts;
  workspace_.reserve(std::max(
      {stages.experts().backward_workspace_bytes(num_tokens),
       stages.has_shared() ? stages.shared().backward_workspace_bytes(num_tokens) : std::int64_t{0},
       router_gemm_backward_workspace_bytes(num_tokens, experts, hidden)}));
  (void)dout_.matrix(stages.compute(), num_tokens, hidden);
  (void)sums_.matrix<float>(num_tokens, hidden);
  (void)row_weight_.vector<float>(rows);
  (void)dx_rows_.matrix<float>(rows, hidden);
  fill_ones(ones_.vector<float>(rows), nullptr);
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  (void)dweight_.matrix<float>(num_tokens, router.top_k());
  (void)dlogits_.matrix<float>(num_tokens, experts);
  (void)router_.matrix<float>(num_tokens, hidden);
  if (stages.has_shared()) {
    (void)shared_.matrix<float>(num_tokens, hidden);
    (void)shared_dlogit_.vector<float>(num_tokens);
  }
  reserved_tokens_ = num_tokens;
}

void CudaLayerBackward::run(const BackwardArgs& args, const SavedForward::State& saved,
                            ConstRawMatrix x, CudaStages& stages) {
  const Call call{args, saved, stages, to_compute(args, stages)};
  const bool to_tokens = args.dtokens.data != nullptr;
  const bool to_router = saved.routed && (to_tokens || args.dgate.data != nullptr ||
                                          args.drouter_bias.data != nullptr);
  const Matrix<float> none{};
  run_experts(call, x, to_router);
  TokenGradientParts parts;
  if (to_router) {
    const Matrix<float> part =
        to_tokens ? router_.matrix<float>(saved.num_tokens, stages.hidden()) : none;
    run_router(call, part);
    parts.router = part;
  }
  if (stages.has_shared()) {
    const Matrix<float> part =
        to_tokens ? shared_.matrix<float>(saved.num_tokens, stages.hidden()) : none;
    const bool gated = stages.shared().gate().data != nullptr;
    const bool to_gate = gated && (to_tokens || args.dshared_gate.data != nullptr);
    const Vector<float> dlogit =
        to_gate ? shared_dlogit_.vector<float>(saved.num_tokens) : Vector<float>{};
    stages.shared().backward({.tokens = saved.tokens,
                              .dout = call.dout,
                              .preactivation = saved.shared_preactivation,
                              .gradients = args.shared,
                              .dgate = args.dshared_gate,
                              .dlogit = dlogit,
                              .dtokens = part,
                              .accumulate = args.accumulate,
                              .execution = with_workspace(stages.execution(), workspace_)});
    parts.shared = part;
    parts.dlogit = dlogit;
    parts.gate = stages.shared().gate();
  }
  if (to_tokens) add_up(call, parts);
}

ConstRawMatrix CudaLayerBackward::to_compute(const BackwardArgs& args, CudaStages& stages) {
  if (args.dout.dtype == stages.compute()) return args.dout;
  const RawMatrix out = dout_.matrix(stages.compute(), args.dout.rows, args.dout.cols);
  const ScopedStage stage(stages.execution(), "pack",
                          {.bytes = static_cast<double>(args.dout.bytes() + out.bytes())});
  convert(args.dout, out, stages.stream());
  return out;
}

void CudaLayerBackward::run_experts(const Call& call, ConstRawMatrix x, bool to_router) {
  const BackwardArgs& args = call.args;
  CudaExperts& experts = call.stages.experts();
  const std::int64_t num_tokens = call.saved.num_tokens;
  Execution unchecked = call.stages.execution();
  unchecked.status = nullptr;  // the forward has counted what is wrong with the routing
  experts.make_plan({.expert = call.saved.expert,
                     .weight = call.saved.weight,
                     .kept = call.saved.kept,
                     .total_experts = call.stages.router().config().num_experts},
                    num_tokens, unchecked);
  const bool to_weights = to_router || args.dweight.data != nullptr;
  const std::int64_t rows = experts.plan().row_token.shape[0];
  const Vector<float> drow_weight = to_weights ? row_weight_.vector<float>(rows) : Vector<float>{};
  experts_backward({.x = x,
                    .dout = call.dout,
                    .preactivation = call.saved.preactivation,
                    .plan = experts.plan(),
                    .weights = &experts.weights(),
                    .drow_weight = drow_weight,
                    .dx_rows = args.dtokens.data != nullptr
                                   ? dx_rows_.matrix<float>(rows, call.stages.hidden())
                                   : Matrix<float>{},
                    .gradients = args.experts,
                    .accumulate = args.accumulate,
                    .execution = with_workspace(call.stages.execution(), workspace_)});
  if (!to_weights) return;
  give_choice_gradients_on_gpu({.plan = experts.plan(),
                                .expert = call.saved.expert,
                                .kept = call.saved.kept,
                                .drow_weight = drow_weight,
                                .dweight = weights_of_choice(call)},
                               call.stages.stream());
}

Matrix<float> CudaLayerBackward::weights_of_choice(const Call& call) {
  if (call.args.dweight.data != nullptr) return call.args.dweight;
  return dweight_.matrix<float>(call.saved.expert.shape[0], call.saved.expert.shape[1]);
}

void CudaLayerBackward::run_router(const Call& call, Matrix<float> dtokens) {
  const BackwardArgs& args = call.args;
  const CudaRouter& router = call.stages.router();
  const auto [num_tokens, num_experts] = call.saved.logits.shape;
  const auto products =
      static_cast<double>(num_tokens * num_experts) * static_cast<double>(call.stages.hidden());
  const double flops =
      2 * products * ((dtokens.data != nullptr ? 1 : 0) + (args.dgate.data != nullptr ? 1 : 0));
  const double bytes =
      static_cast<double>(args.dgate.data != nullptr ? call.saved.tokens.bytes() : 0) +
      4.0 * static_cast<double>(dtokens.size() + 2 * call.saved.logits.size());
  const ScopedStage stage(call.stages.execution(), "router_backward",
                          {.bytes = bytes, .flops = flops, .flops_executed = flops});
  const Matrix<float> dlogits = dlogits_.matrix<float>(num_tokens, num_experts);
  const bool losses = args.dlogits.data != nullptr;
  if (losses) {
    SWITCHYARD_CUDA(cudaMemcpyAsync(dlogits.data, args.dlogits.data,
                                    static_cast<std::size_t>(4 * dlogits.size()),
                                    cudaMemcpyDeviceToDevice, call.stages.stream()));
  }
  Execution execution = with_workspace(call.stages.execution(), workspace_);
  execution.status = nullptr;
  route_backward({.logits = call.saved.logits,
                  .expert = call.saved.expert,
                  .dweight = weights_of_choice(call),
                  .config = router.config(),
                  .dlogits = dlogits,
                  .accumulate = losses,
                  .execution = execution});
  router_gemm_backward({.tokens = call.saved.tokens,
                        .gate = router.gate(),
                        .dlogits = dlogits,
                        .dtokens = dtokens,
                        .dgate = args.dgate,
                        .dbias = args.drouter_bias,
                        .accumulate = args.accumulate,
                        .execution = execution});
}

/// dtokens = the rows' parts by the forward's order of sums, then the others', and one rounding.
void CudaLayerBackward::add_up(const Call& call, const TokenGradientParts& others) {
  const RawMatrix& out = call.args.dtokens;
  PlanView plan = call.stages.experts().plan();
  const std::int64_t rows = plan.row_token.shape[0];
  plan.row_weight = ones_.vector<float>(rows);
  const Matrix<float> dx_rows = dx_rows_.matrix<float>(rows, out.cols);
  const bool alone = others.router.data == nullptr && others.shared.data == nullptr;
  const RawMatrix sums = alone ? out : sums_.matrix(DType::kF32, out.rows, out.cols);
  const std::int64_t others_bytes = 4 * (others.router.size() + others.shared.size());
  const ScopedStage stage(
      call.stages.execution(), "combine",
      {.bytes = static_cast<double>(4 * dx_rows.size() + others_bytes + out.bytes())});
  combine({.rows = {reinterpret_cast<const std::byte*>(dx_rows.data), DType::kF32, rows, out.cols},
           .plan = plan,
           .reduced = {.sums = sums, .subtree = call.stages.experts().subtree()},
           .execution = call.stages.execution()});
  if (alone) return;
  TokenGradientParts parts = others;
  parts.experts = {reinterpret_cast<const float*>(sums.data), {out.rows, out.cols}};
  add_token_gradients(parts, out, call.stages.stream());
}

}  // namespace switchyard
