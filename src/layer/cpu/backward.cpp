// The stages of a layer backwards, on one CPU: experts with the weighted sum behind them, the
// router, the shared experts, and the sum of what all three say of the tokens. What each stage
// computes is said in switchyard/backward.hpp.
#include "layer/cpu/backward.hpp"

#include <algorithm>

#include "comm/split_count.hpp"
#include "core/row_ops.hpp"
#include "experts/raw_matrix.hpp"
#include "layer/choice_gradients.hpp"
#include "layer/saved_losses.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {

namespace {

/// Beside the bits of ReplicatedGradients::wanted(): ranks agree on what they sum up.
constexpr std::uint64_t kCounts = std::uint64_t{1} << 63;

/// Whether losses go by the counts of all ranks, and nobody else has summed them.
bool sums_counts(const LayerBackwardCall& call) {
  return call.ranks != nullptr && call.losses->scope == LossScope::kGlobal &&
         call.saved->losses.values.data != nullptr && call.args->loss_counts.data == nullptr;
}

/// Adds what is there of `part` to `rest`, or is all of it.
void add_part(Matrix<float> part, Matrix<float>& rest, const Execution& execution) {
  if (part.data == nullptr) return;
  if (rest.data == nullptr) {
    rest = part;
    return;
  }
  parallel_for(execution.pool, rest.shape[0],
               [&](std::int64_t t, int) { row_ops::add(part.row(t), rest.row(t), rest.shape[1]); });
}

}  // namespace

void LayerBackward::run(const LayerBackwardCall& call) {
  const BackwardArgs& args = *call.args;
  const SavedForward::State& saved = *call.saved;
  const std::int64_t num_tokens = saved.num_tokens;
  const std::int64_t hidden = saved.tokens.cols;
  here_ = call.ranks == nullptr ? args : replicated_.parts_of(args);
  const RawMatrix dout = dout_.matrix(saved.tokens.dtype, num_tokens, hidden);
  parallel_for(call.execution.pool, num_tokens, [&](std::int64_t t, int) {
    row_ops::convert(args.dout.dtype, args.dout.row(t), dout.dtype, dout.row(t), hidden);
  });
  const Wanted here = wanted_of(call);
  Wanted wanted = here;
  const ConstRawMatrix arrived = call.ranks == nullptr ? dout : send(call, dout, wanted);
  run_experts(call, arrived, wanted);
  GradientsAtHome home{};
  if (call.ranks != nullptr) home = bring_home(call, wanted, here);
  if (sums_counts(call)) sum_counts(call);
  // Before the router, which starts from the gradients of the weights.
  const Matrix<float> weighted = run_weighted(call, home, here);
  const Matrix<float> zero_computation = run_zero_computation(call, dout, here);
  Matrix<float> rest{};
  if (here.router) {
    if (here.tokens) rest = router_.matrix(num_tokens, hidden);
    run_router(call, rest);
  }
  if (call.shared != nullptr) add_part(run_shared(call, dout), rest, call.execution);
  add_part(zero_computation, rest, call.execution);
  if (here.tokens && weighted.data != nullptr) {
    finish({.partials = raw(weighted),
            .shared = rest,
            .out = args.dtokens,
            .execution = call.execution});
  } else if (here.tokens) {
    add_up(call, home, rest, args.dtokens);
  }
  if (call.ranks != nullptr) replicated_.add_up(*call.ranks, args.accumulate, call.execution);
}

LayerBackward::Wanted LayerBackward::wanted_of(const LayerBackwardCall& call) {
  const BackwardArgs& args = *call.args;
  const bool tokens = args.dtokens.data != nullptr;
  const bool router =
      call.saved->routed &&
      (tokens || args.dgate.data != nullptr || args.dnoise_gate.data != nullptr ||
       args.drouter_bias.data != nullptr || args.drouter_network.data != nullptr ||
       args.dgating_residual.data != nullptr || args.dprevious_logits.data != nullptr);
  const bool choice = router || args.dweight.data != nullptr;
  // Of a weight on the input the gradient follows from that of the input.
  return {.tokens = tokens,
          .router = router,
          .choice = choice,
          .rows = tokens || (choice && call.weight_on_input),
          .weights = choice && !call.weight_on_input};
}

/// dout of the tokens whose rows this rank's experts had; what is wanted of rows, by any rank.
ConstRawMatrix LayerBackward::send(const LayerBackwardCall& call, ConstRawMatrix dout,
                                   Wanted& wanted) {
  const SavedForward::State& saved = *call.saved;
  ScopedStage stage(call.execution, "exchange", {});
  const ArrivedGradients arrived =
      call.ranks->send(dout,
                       {.expert = call.sent.expert,
                        .kept = saved.kept,
                        .sent = saved.received.sent,
                        .forward = saved.received.forward,
                        .dtokens = wanted.rows,
                        .dweight = wanted.weights,
                        .summed = replicated_.wanted() | (sums_counts(call) ? kCounts : 0)},
                       call.execution);
  stage.set_work({.bytes = static_cast<double>(dout.bytes() + arrived.dout.bytes())});
  wanted.rows = arrived.dtokens;
  wanted.weights = arrived.dweight;
  return arrived.dout;
}

/// In floats, which are exact for these: half of the bits of each count at a time.
void LayerBackward::sum_counts(const LayerBackwardCall& call) {
  const RoutingSums& sums = call.saved->losses.sums;
  const Matrix<std::int64_t>& own =
      call.losses->share == BalanceShare::kFirstChoice ? sums.first_choices : sums.counts;
  const std::int64_t num_experts = own.size();
  std::vector<float> parts;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const SplitCount split = split_count(own.data[e]);
    parts.insert(parts.end(), {split.low, split.rest});
  }
  const ScopedStage stage(call.execution, "exchange",
                          {.bytes = 16 * static_cast<double>(parts.size())});
  call.ranks->sum_over_ranks(parts.data(), std::ssize(parts));
  counts_.clear();
  for (std::size_t i = 0; i < parts.size(); i += 2) {
    counts_.push_back(joined_count(parts[i], parts[i + 1]));
  }
  here_.loss_counts = {counts_.data(), {num_experts}};
}

void LayerBackward::run_experts(const LayerBackwardCall& call, ConstRawMatrix dout,
                                const Wanted& wanted) {
  const BackwardArgs& args = *call.args;
  const std::int64_t rows = call.plan.expert_begin[call.plan.num_experts];
  experts_backward({.x = call.x,
                    .dout = dout,
                    .preactivation = call.saved->preactivation,
                    .plan = call.plan,
                    .weights = call.experts,
                    .drow_weight = wanted.weights ? row_weight_.vector(rows) : Vector<float>{},
                    .dx_rows = wanted.rows ? raw(dx_rows_.matrix(rows, dout.cols)) : RawMatrix{},
                    .gradients = args.experts,
                    .accumulate = args.accumulate,
                    .execution = call.execution});
  if (!wanted.weights) return;
  const bool alone = call.ranks == nullptr;
  const auto [num_rows, top_k] = call.expert.shape;
  give_choice_gradients(
      {.plan = call.plan,
       .expert = call.expert,
       .kept = alone ? call.saved->kept : Matrix<std::uint8_t>{},
       .drow_weight = row_weight_.vector(rows),
       .dweight = alone ? weights_of_choice(call) : travelling_.matrix(num_rows, top_k)});
}

GradientsAtHome LayerBackward::bring_home(const LayerBackwardCall& call, const Wanted& wanted,
                                          const Wanted& here) {
  const auto [num_rows, top_k] = call.saved->received.expert.shape;
  Matrix<const float> dtokens{};
  if (wanted.rows) {
    const RawMatrix sums = sum_rows(call, sums_.matrix(DType::kF32, num_rows, call.x.cols));
    dtokens = {reinterpret_cast<const float*>(sums.data), {sums.rows, sums.cols}};
  }
  const Matrix<const float> dweight =
      wanted.weights ? travelling_.matrix(num_rows, top_k) : Matrix<float>{};
  const ScopedStage stage(call.execution, "exchange",
                          {.bytes = 8 * static_cast<double>(dtokens.size() + dweight.size())});
  return call.ranks->bring_home(
      dtokens, dweight, here.weights ? weights_of_choice(call) : Matrix<float>{}, call.execution);
}

Matrix<float> LayerBackward::weights_of_choice(const LayerBackwardCall& call) {
  if (call.args->dweight.data != nullptr) return call.args->dweight;
  return dweight_.matrix(call.saved->expert.shape[0], call.saved->expert.shape[1]);
}

void LayerBackward::run_router(const LayerBackwardCall& call, Matrix<float> dtokens) {
  const BackwardArgs& args = here_;
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
                  .losses = prices_of_losses(args, *call.losses, call.execution, saved),
                  .request = saved.request,
                  .dlogits = dlogits,
                  .accumulate = args.dlogits.data != nullptr,
                  .execution = call.execution});
  call.router->logits_backward(
      {.tokens = call.router->seen(saved.tokens, saved.request, call.execution),
       .dlogits = dlogits,
       .dtokens = dtokens,
       .dgate = args.dgate,
       .dbias = args.drouter_bias,
       .accumulate = args.accumulate,
       .execution = call.execution},
      args.drouter_network);
  if (args.dprevious_logits.data != nullptr || args.dgating_residual.data != nullptr) {
    call.router->residual_backward(saved.previous_logits, dlogits, args.dprevious_logits,
                                   args.dgating_residual, args.accumulate, call.execution);
  }
  if (dtokens.data != nullptr &&
      call.router->draws_noise(saved.request, RouterNoise::Kind::kInputJitter)) {
    add_noise({.jittered = dtokens,
               .noise = call.router->config().noise,
               .request = saved.request,
               .execution = call.execution});
  }
  if (call.router->config().noise.kind == RouterNoise::Kind::kLearned) {
    run_noise(call, dlogits, dtokens);
  }
}

/// What learned noise adds to `dtokens` [T, H], if that is wanted, and the gradient of its gate.
void LayerBackward::run_noise(const LayerBackwardCall& call, Matrix<const float> dlogits,
                              Matrix<float> dtokens) {
  const SavedForward::State& saved = *call.saved;
  const auto [num_tokens, num_experts] = dlogits.shape;
  const Matrix<float> dnoise = noise_dlogits_.matrix(num_tokens, num_experts);
  noise_backward({.noise_logits = call.router->noise_logits(saved.tokens, call.execution),
                  .dlogits = dlogits,
                  .noise = call.router->config().noise,
                  .request = saved.request,
                  .dnoise_logits = dnoise,
                  .execution = call.execution});
  Matrix<float> part{};
  if (dtokens.data != nullptr) part = noise_.matrix(num_tokens, saved.tokens.cols);
  router_gemm_backward({.tokens = saved.tokens,
                        .gate = call.router->noise_gate(saved.tokens.cols),
                        .dlogits = dnoise,
                        .dtokens = part,
                        .dgate = here_.dnoise_gate,
                        .accumulate = here_.accumulate,
                        .execution = call.execution});
  if (part.data == nullptr) return;
  parallel_for(call.execution.pool, num_tokens, [&](std::int64_t t, int) {
    row_ops::add(part.row(t), dtokens.row(t), saved.tokens.cols);
  });
}

/// Where weights are on the input of the experts: what these say of the tokens [T, H], if anything
/// of it is wanted, and the gradients of the weights.
Matrix<float> LayerBackward::run_weighted(const LayerBackwardCall& call,
                                          const GradientsAtHome& home, const Wanted& here) {
  if (!call.weight_on_input || !here.rows) return {};
  const Matrix<float> dx = weighted_.matrix(call.sent.x.rows, call.sent.x.cols);
  add_up(call, home, {}, raw(dx));
  weighted_backward(call.sent.x, call.sent.weight, dx,
                    here.choice ? weights_of_choice(call) : Matrix<float>{}, call.execution);
  return dx;
}

/// What zero-computation experts say of the tokens, if there are any and it is wanted, and the
/// gradients of their weights and of constants.
Matrix<float> LayerBackward::run_zero_computation(const LayerBackwardCall& call,
                                                  ConstRawMatrix dout, const Wanted& here) {
  if (call.zero_computation == nullptr) return {};
  const Matrix<float> part =
      here.tokens ? zero_computation_.matrix(dout.rows, dout.cols) : Matrix<float>{};
  call.zero_computation->backward(
      {.chosen = routing_of(*call.saved),
       .dout = dout,
       .dweight = here.choice ? weights_of_choice(call) : Matrix<float>{},
       .dtokens = part,
       .dconstant = here_.dconstant_experts,
       .accumulate = here_.accumulate},
      call.execution);
  return part;
}

/// What the shared experts say of the tokens, if that is wanted.
Matrix<float> LayerBackward::run_shared(const LayerBackwardCall& call, ConstRawMatrix dout) {
  const SavedForward::State& saved = *call.saved;
  const Matrix<float> part =
      here_.dtokens.data != nullptr ? shared_.matrix(saved.num_tokens, dout.cols) : Matrix<float>{};
  call.shared->backward({.tokens = saved.tokens,
                         .dout = dout,
                         .preactivation = saved.shared_preactivation,
                         .gradients = here_.shared,
                         .dgate = here_.dshared_gate,
                         .dtokens = part,
                         .accumulate = here_.accumulate,
                         .execution = call.execution});
  return part;
}

/// The rows' parts of dx by the forward's order of sums.
RawMatrix LayerBackward::sum_rows(const LayerBackwardCall& call, RawMatrix sums) {
  const std::int64_t rows = call.plan.expert_begin[call.plan.num_experts];
  const Matrix<float> parts = dx_rows_.matrix(rows, sums.cols);
  const Vector<float> ones = ones_.vector(rows);
  std::fill_n(ones.data, rows, 1.0F);
  PlanView plan = call.plan;
  plan.row_weight = ones;
  const ScopedStage stage(call.execution, "combine",
                          {.bytes = static_cast<double>(4 * parts.size() + sums.bytes())});
  combine({.rows = {reinterpret_cast<const std::byte*>(parts.data), DType::kF32, rows, sums.cols},
           .plan = plan,
           .first_expert = call.experts->first_expert(),
           .reduced = {.sums = sums, .subtree = call.subtree},
           .execution = call.execution});
  return sums;
}

/// out = the rows' parts, on their way home where there are ranks, then `rest`, and one rounding.
void LayerBackward::add_up(const LayerBackwardCall& call, const GradientsAtHome& home,
                           Matrix<const float> rest, RawMatrix out) {
  if (call.ranks != nullptr) {
    const ScopedStage stage(
        call.execution, "combine",
        {.bytes = static_cast<double>(4 * home.dtokens.size()) + static_cast<double>(out.bytes())});
    finish({.partials = {reinterpret_cast<const std::byte*>(home.dtokens.data), DType::kF32,
                         home.dtokens.shape[0], out.cols},
            .partial_row = home.partial_row,
            .shared = rest,
            .out = out,
            .execution = call.execution});
    return;
  }
  if (rest.data == nullptr) {
    sum_rows(call, out);
    return;
  }
  const RawMatrix sums = sum_rows(call, sums_.matrix(DType::kF32, out.rows, out.cols));
  finish({.partials = sums, .shared = rest, .out = out, .execution = call.execution});
}

}  // namespace switchyard
