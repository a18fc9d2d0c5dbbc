// The stages of a layer backwards, on one CPU: experts with the weighted sum behind them, the
// router, the shared experts, and the sum of what all three say of the tokens. What each stage
// computes is said in switchyard/backward.hpp.
#include "layer/cpu/backward.hpp"

#include <algorithm>

#include "core/row_ops.hpp"
#include "layer/choice_gradients.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
void LayerBackward::run(const LayerBackwardCall& call) {
  const BackwardArgs& args = *call.args;
  const SavedForward::State& saved = *call.saved;
  const std::int64_t num_tokens = saved.num_tokens;
  const std::int64_t hidden = saved.tokens.cols;
  const RawMatrix dout = dout_.matrix(saved.tokens.dtype, num_tokens, hidden);
  parallel_for(call.execution.pool, num_tokens, [&](std::int64_t t, int) {
    row_ops::convert(args.dout.dtype, args.dout.row(t), dout.dtype, dout.row(t), hidden);
  });
  const bool to_tokens = args.dtokens.data != nullptr;
  const bool to_router = saved.routed && (to_tokens || args.dgate.data != nullptr ||
                                          args.drouter_bias.data != nullptr);
  run_experts(call, dout, to_router);
  Matrix<float> rest{};
  if (to_router) {
    if (to_tokens) rest = router_.matrix(num_tokens, hidden);
    run_router(call, rest);
  }
  if (call.shared != nullptr) {
    const Matrix<float> part = to_tokens ? shared_.matrix(num_tokens, hidden) : Matrix<float>{};
    call.shared->backward({.tokens = saved.tokens,
                           .dout = dout,
                           .preactivation = saved.shared_preactivation,
                           .gradients = args.shared,
                           .dgate = args.dshared_gate,
                           .dtokens = part,
                           .accumulate = args.accumulate,
                           .execution = call.execution});
    if (rest.data == nullptr) {
      rest = part;
    } else {
      parallel_for(call.execution.pool, num_tokens,
                   [&](std::int64_t t, int) { row_ops::add(part.row(t), rest.row(t), hidden); });
    }
  }
  if (to_tokens) add_up(call, rest);
}

void LayerBackward::run_experts(const LayerBackwardCall& call, ConstRawMatrix dout,
                                bool to_router) {
  const BackwardArgs& args = *call.args;
  const std::int64_t rows = call.plan.expert_begin[call.plan.num_experts];
  const bool to_weights = to_router || args.dweight.data != nullptr;
  experts_backward(
      {.x = call.x,
       .dout = dout,
       .preactivation = call.saved->preactivation,
       .plan = call.plan,
       .weights = call.experts,
       .drow_weight = to_weights ? row_weight_.vector(rows) : Vector<float>{},
       .dx_rows = args.dtokens.data != nullptr ? dx_rows_.matrix(rows, dout.cols) : Matrix<float>{},
       .gradients = args.experts,
       .accumulate = args.accumulate,
       .execution = call.execution});
  if (!to_weights) return;
  give_choice_gradients({.plan = call.plan,
                         .expert = call.saved->expert,
                         .kept = call.saved->kept,
                         .drow_weight = row_weight_.vector(rows),
                         .dweight = weights_of_choice(call)});
}

Matrix<float> LayerBackward::weights_of_choice(const LayerBackwardCall& call) {
  if (call.args->dweight.data != nullptr) return call.args->dweight;
  return dweight_.matrix(call.saved->expert.shape[0], call.saved->expert.shape[1]);
}

void LayerBackward::run_router(const LayerBackwardCall& call, Matrix<float> dtokens) {
  const BackwardArgs& args = *call.args;
  const SavedForward::State& saved = *call.saved;
  const auto [num_tokens, num_experts] = saved.logits.shape;
  const auto products =
      static_cast<double>(num_tokens * num_experts) * static_cast<double>(saved.tokens.cols);
  const double flops =
      2 * products * ((dtokens.data != nullptr ? 1 : 0) + (args.dgate.data != nullptr ? 1 : 0));
  const ScopedStage stage(call.execution, "router_backward",
                          {.bytes = static_cast<double>(2 * saved.tokens.bytes()),
                           .flops = flops,
                           .flops_executed = flops});
  const Matrix<float> dlogits = dlogits_.matrix(num_tokens, num_experts);
  if (args.dlogits.data != nullptr) std::copy_n(args.dlogits.data, dlogits.size(), dlogits.data);
  route_backward({.logits = saved.logits,
                  .expert = saved.expert,
                  .dweight = weights_of_choice(call),
                  .config = call.router->config(),
                  .dlogits = dlogits,
                  .accumulate = args.dlogits.data != nullptr,
                  .execution = call.execution});
  router_gemm_backward({.tokens = saved.tokens,
                        .gate = call.router->gate(saved.tokens.cols),
                        .dlogits = dlogits,
                        .dtokens = dtokens,
                        .dgate = args.dgate,
                        .dbias = args.drouter_bias,
                        .accumulate = args.accumulate,
                        .execution = call.execution});
}

/// dtokens = the rows' parts by the forward's order of sums, then `rest`, and one rounding.
void LayerBackward::add_up(const LayerBackwardCall& call, Matrix<const float> rest) {
  const RawMatrix& out = call.args->dtokens;
  const std::int64_t rows = call.plan.expert_begin[call.plan.num_experts];
  const Matrix<float> parts = dx_rows_.matrix(rows, out.cols);
  const Vector<float> ones = ones_.vector(rows);
  std::fill_n(ones.data, rows, 1.0F);
  PlanView plan = call.plan;
  plan.row_weight = ones;
  const bool alone = rest.data == nullptr;
  const RawMatrix sums = alone ? out : sums_.matrix(DType::kF32, out.rows, out.cols);
  const ScopedStage stage(call.execution, "combine",
                          {.bytes = static_cast<double>(4 * parts.size() + out.bytes())});
  combine({.rows = {reinterpret_cast<const std::byte*>(parts.data), DType::kF32, rows, out.cols},
           .plan = plan,
           .first_expert = call.experts->first_expert(),
           .reduced = {.sums = sums, .subtree = call.subtree},
           .execution = call.execution});
  if (alone) return;
  finish({.partials = sums, .shared = rest, .out = out, .execution = call.execution});
}

}  // namespace switchyard
