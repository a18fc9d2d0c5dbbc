// The stages of a layer backwards on one GPU, enqueued one after the other; what each computes is
// said in switchyard/backward.hpp. Bound by what the stages are bound by: nothing waits.
#include "layer/gpu/backward/backward.hpp"

#include <algorithm>

#include "core/gpu/cuda_memory.hpp"
#include "core/gpu/device_wide.hpp"
#include "layer/gpu/backward/expert_tokens.hpp"
#include "layer/gpu/kernels.hpp"
#include "layer/saved_losses.hpp"
#include "switchyard/device.hpp"

namespace switchyard {

namespace {

/// Behind the experts nobody needs the pre-activations' gradients, which lie in what is saved: the
/// router's part of dtokens takes their place. Over ranks it is made beside them.
bool has_place_for_router_part(Recompute recompute, const CudaStages& stages, bool over_ranks) {
  return !over_ranks && recompute == Recompute::kNone &&
         stages.experts().preactivation_has(4 * stages.hidden());
}

}  // namespace

void CudaLayerBackward::reserve(std::int64_t num_tokens, Recompute recompute, CudaStages& stages,
                                const CudaGradientExchange* ranks) {
  if (is_reserved(num_tokens, recompute)) return;
  const RouterConfig& router = stages.router().config();
  const std::int64_t hidden = stages.hidden();
  const std::int64_t rows = stages.experts().layout_rows(num_tokens);
  const std::int64_t logits = router.num_logits();
  DeviceBuffer& workspace = workspace_of(recompute, stages);
  workspace.reserve(
      stages.experts().backward_workspace_bytes(num_tokens, recompute == Recompute::kNone));
  // Over ranks the rest runs between the experts' products.
  (ranks == nullptr ? workspace : rest_workspace_)
      .reserve(std::max(stages.has_shared() ? stages.shared().backward_workspace_bytes(num_tokens)
                                            : std::int64_t{0},
                        stages.router().backward_workspace_bytes(num_tokens)));
  stages.router().reserve_backward(num_tokens);
  if (ranks != nullptr && ranks->place_of_sums().data == nullptr) {
    (void)row_sums_.matrix<float>(stages.experts().most_received(num_tokens), hidden);
  }
  (void)row_weight_.vector<float>(rows);
  fill_ones(ones_.vector<float>(rows), nullptr);
  SWITCHYARD_CUDA(wait_for_device());
  (void)dweight_.matrix<float>(num_tokens, router.top_k());
  (void)dlogits_.matrix<float>(num_tokens, logits);
  if (router.noise.kind == RouterNoise::Kind::kLearned) {
    (void)noise_dlogits_.matrix<float>(num_tokens, logits);
    (void)noise_.matrix<float>(num_tokens, hidden);
  }
  if (!has_place_for_router_part(recompute, stages, ranks != nullptr)) {
    (void)router_.matrix<float>(num_tokens, hidden);
  }
  if (ranks != nullptr) (void)loss_counts_.vector<std::int64_t>(router.num_experts);
  if (stages.weight_on_input()) (void)weighted_.matrix<float>(num_tokens, hidden);
  if (stages.zero_computation().any()) {
    (void)zero_computation_.matrix<float>(num_tokens, hidden);
    stages.zero_computation().reserve_backward(num_tokens);
  }
  if (stages.has_shared()) {
    (void)shared_.matrix<float>(num_tokens, hidden);
    (void)shared_dlogit_.vector<float>(num_tokens);
    stages.shared().reserve_backward(num_tokens);
  }
  reserved_tokens_[index_of(recompute)] = num_tokens;
}

void CudaLayerBackward::run(const BackwardArgs& args, const SavedForward::State& saved,
                            const TokensForExperts& input, const LossConfig& losses,
                            CudaStages& stages, CudaGradientExchange* ranks) {
  const bool to_router =
      saved.routed &&
      (args.dtokens.data != nullptr || args.dgate.data != nullptr ||
       args.dnoise_gate.data != nullptr || args.drouter_bias.data != nullptr ||
       args.drouter_network.data != nullptr || args.dgating_residual.data != nullptr ||
       args.dprevious_logits.data != nullptr);
  Call call{.args = args,
            .saved = saved,
            .stages = stages,
            .losses = losses,
            .ranks = ranks,
            .to_router = to_router,
            .to_choice = to_router || args.dweight.data != nullptr,
            .dout = to_compute(args, stages),
            .here = ranks == nullptr ? args : ranks->parts_of(args)};
  if (ranks == nullptr) {
    const Rows rows = own_rows(call, input);
    run_experts(call, rows);
    if (rows.drow_weight.data != nullptr) give_to_choices(call, rows);
    Matrix<float> weighted{};
    if (stages.weight_on_input() && rows.dx.data != nullptr) weighted = run_weighted(call);
    run_zero_computation(call);
    const TokenGradientParts parts = run_router_and_shared(call);
    if (args.dtokens.data != nullptr) add_up(call, parts, weighted);
    return;
  }
  add_up_counts(call);
  run_over_ranks(call, input);
}

/// What is on its way home meanwhile costs nothing: gradients of the experts' weights come last.
void CudaLayerBackward::run_over_ranks(const Call& call, const TokensForExperts& input) {
  CudaStages& stages = call.stages;
  CudaGradientExchange& ranks = *call.ranks;
  const Rows rows = arrived_rows(call, input);
  const bool has_experts = stages.experts().num_local() > 0;
  const bool on_input = stages.weight_on_input();
  const std::function<void()> go_home = [&] {
    if (has_experts && !on_input) give_to_choices(call, rows);
    ranks.bring_weights_home(
        input.routing, call.saved,
        call.to_choice && !on_input ? weights_of_choice(call) : Matrix<float>{},
        stages.execution());
    // Of a weight on the input the router waits for the gradient of the input.
    TokenGradientParts parts;
    if (!on_input) {
      run_zero_computation(call);
      parts = run_router_and_shared(call);
    }
    const RawMatrix sums = sums_of_rows(call);
    if (has_experts) {
      const ScopedStage stage(stages.execution(), "combine",
                              {.bytes = 2 * static_cast<double>(sums.bytes())});
      sum_rows(call, sums, {});
    }
    if (!on_input) return bring_home(call, sums, parts);
    const Matrix<float> weighted = run_weighted_over_ranks(call, sums);
    run_zero_computation(call);
    parts = run_router_and_shared(call);
    if (call.args.dtokens.data != nullptr) add_up(call, parts, weighted);
  };
  if (has_experts) {
    run_experts(call, rows, &go_home);
  } else {
    go_home();
  }
  ranks.wait_for_home(stages.execution());
  ranks.add_up_parts(call.args.accumulate, stages.execution());
}

TokenGradientParts CudaLayerBackward::run_router_and_shared(const Call& call) {
  const BackwardArgs& args = call.here;
  const SavedForward::State& saved = call.saved;
  CudaStages& stages = call.stages;
  const bool to_tokens = args.dtokens.data != nullptr;
  const Matrix<float> none{};
  TokenGradientParts parts;
  if (call.to_router) {
    const Matrix<float> part = to_tokens ? place_of_router_part(call) : none;
    run_router(call, part);
    parts.router = part;
  }
  if (!stages.has_shared()) return parts;
  const Matrix<float> part =
      to_tokens ? shared_.matrix<float>(saved.num_tokens, stages.hidden()) : none;
  const bool gated = stages.shared().gate().data != nullptr;
  const bool to_gate = gated && (to_tokens || args.dshared_gate.data != nullptr);
  const Vector<float> dlogit =
      to_gate ? shared_dlogit_.vector<float>(saved.num_tokens) : Vector<float>{};
  stages.shared().backward(
      {.tokens = saved.tokens,
       .dout = call.dout,
       .preactivation = saved.shared_preactivation,
       .gradients = args.shared,
       .dgate = args.dshared_gate,
       .dlogit = dlogit,
       .dtokens = part,
       .accumulate = args.accumulate,
       .execution = with_workspace(stages.execution(), workspace_of_rest(call))});
  parts.shared = part;
  parts.dlogit = dlogit;
  parts.gate = stages.shared().gate();
  return parts;
}

Matrix<float> CudaLayerBackward::place_of_router_part(const Call& call) {
  const std::int64_t num_tokens = call.saved.num_tokens;
  const std::int64_t hidden = call.stages.hidden();
  if (has_place_for_router_part(call.saved.recompute, call.stages, call.ranks != nullptr)) {
    return {reinterpret_cast<float*>(call.saved.preactivation.data), {num_tokens, hidden}};
  }
  return router_.matrix<float>(num_tokens, hidden);
}

ConstRawMatrix CudaLayerBackward::to_compute(const BackwardArgs& args, CudaStages& stages) {
  if (args.dout.dtype == stages.compute()) return args.dout;
  // A forward that saves keeps its tokens elsewhere.
  const RawMatrix out = stages.converted(args.dout.rows, args.dout.cols);
  const ScopedStage stage(stages.execution(), "pack",
                          {.bytes = static_cast<double>(args.dout.bytes() + out.bytes())});
  convert(args.dout, out, stages.stream());
  return out;
}

/// Of one rank: its tokens.
CudaLayerBackward::Rows CudaLayerBackward::own_rows(const Call& call,
                                                    const TokensForExperts& input) {
  const SavedForward::State& saved = call.saved;
  const std::int64_t rows = call.stages.experts().layout_rows(saved.num_tokens);
  const bool on_input = call.stages.weight_on_input();
  Rows own{.x = input.x,
           .dout = call.dout,
           .work = {.expert = input.routing.expert,
                    .weight = input.routing.weight,
                    .kept = saved.kept,
                    .total_experts = call.stages.router().config().num_experts}};
  if (call.to_choice && !on_input) {
    own.drow_weight = row_weight_.vector<float>(rows);
    own.dweight = weights_of_choice(call);
  }
  // Of a weight on the input the gradient follows from that of the input.
  if (call.args.dtokens.data != nullptr || (call.to_choice && on_input)) {
    own.dx = call.stages.experts().lend_rows(saved.num_tokens);
  }
  return own;
}

/// Over ranks: those of the tokens that came for this rank's experts. Whether their ranks want
/// gradients of tokens and weights only they know, so all are made.
CudaLayerBackward::Rows CudaLayerBackward::arrived_rows(const Call& call,
                                                        const TokensForExperts& input) {
  const DeviceReceived received =
      call.ranks->send(call.dout, input.routing, call.saved, call.stages.execution());
  const std::int64_t rows = call.stages.experts().layout_rows(call.saved.num_tokens);
  return {.x = input.x,
          .dout = received.x,
          .work = {.expert = received.expert, .weight = received.weight},
          .drow_weight = row_weight_.vector<float>(rows),
          .dx = call.stages.experts().lend_rows(call.saved.num_tokens),
          .dweight = call.ranks->place_of_weights()};
}

void CudaLayerBackward::run_experts(const Call& call, const Rows& rows,
                                    const std::function<void()>* then) {
  CudaExperts& experts = call.stages.experts();
  Execution unchecked = call.stages.execution();
  unchecked.status = nullptr;  // the forward has counted what is wrong with the routing
  experts.make_plan(rows.work, call.saved.num_tokens, unchecked);
  experts_backward({.x = rows.x,
                    .dout = rows.dout,
                    .preactivation = call.saved.preactivation,
                    .plan = experts.plan(),
                    .weights = &experts.weights(),
                    .drow_weight = rows.drow_weight,
                    .dx_rows = rows.dx,
                    .dpreactivation = call.saved.preactivation,
                    .weighted_activation = experts.lend_inner(call.saved.num_tokens),
                    .gradients = call.args.experts,
                    .accumulate = call.args.accumulate,
                    .rows_enqueued = then,
                    .execution = with_workspace(call.stages.execution(),
                                                workspace_of(call.saved.recompute, call.stages))});
}

void CudaLayerBackward::give_to_choices(const Call& call, const Rows& rows) {
  give_choice_gradients_on_gpu({.plan = call.stages.experts().plan(),
                                .expert = rows.work.expert,
                                .kept = rows.work.kept,
                                .drow_weight = rows.drow_weight,
                                .dweight = rows.dweight,
                                .num_experts = call.stages.router().config().num_experts},
                               call.stages.stream());
}

Matrix<float> CudaLayerBackward::weights_of_choice(const Call& call) {
  if (call.args.dweight.data != nullptr) return call.args.dweight;
  return dweight_.matrix<float>(call.saved.expert.shape[0], call.saved.expert.shape[1]);
}

void CudaLayerBackward::run_router(const Call& call, Matrix<float> dtokens) {
  const BackwardArgs& args = call.here;
  CudaRouter& router = call.stages.router();
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
  Execution execution = with_workspace(call.stages.execution(), workspace_of_rest(call));
  execution.status = nullptr;
  route_backward({.logits = call.saved.logits,
                  .expert = call.saved.expert,
                  .dweight = weights_of_choice(call),
                  .config = router.config(),
                  .losses = prices_of_losses(args, call.losses, execution, call.saved),
                  .request = call.saved.request,
                  .dlogits = dlogits,
                  .accumulate = losses,
                  .execution = execution});
  Execution unreported = execution;
  unreported.recorder = nullptr;  // a stage has begun
  Execution forward = unreported;
  forward.workspace = call.stages.execution().workspace;
  forward.workspace_bytes = call.stages.execution().workspace_bytes;
  router.logits_backward({.tokens = router.seen(call.saved.tokens, call.saved.request, unreported),
                          .dlogits = dlogits,
                          .dtokens = dtokens,
                          .dgate = args.dgate,
                          .dbias = args.drouter_bias,
                          .accumulate = args.accumulate,
                          .execution = execution},
                         args.drouter_network, forward);
  if (args.dprevious_logits.data != nullptr || args.dgating_residual.data != nullptr) {
    router.residual_backward(call.saved.previous_logits, dlogits, args.dprevious_logits,
                             args.dgating_residual, args.accumulate, execution);
  }
  if (dtokens.data != nullptr &&
      router.draws_noise(call.saved.request, RouterNoise::Kind::kInputJitter)) {
    add_noise({.jittered = dtokens,
               .noise = router.config().noise,
               .request = call.saved.request,
               .execution = execution});
  }
  if (router.config().noise.kind == RouterNoise::Kind::kLearned) {
    run_noise(call, dlogits, dtokens, unreported);
  }
}

void CudaLayerBackward::run_noise(const Call& call, Matrix<const float> dlogits,
                                  Matrix<float> dtokens, const Execution& execution) {
  const SavedForward::State& saved = call.saved;
  CudaRouter& router = call.stages.router();
  const auto [num_tokens, num_logits] = dlogits.shape;
  // A call that did not train has drawn nothing: dnoise is zero, whatever the logits of noise are.
  Matrix<const float> of_noise{};
  if (saved.request.training) {
    Execution forward = execution;
    forward.workspace = call.stages.execution().workspace;
    forward.workspace_bytes = call.stages.execution().workspace_bytes;
    of_noise = router.noise_logits(saved.tokens, forward);
  }
  const Matrix<float> dnoise = noise_dlogits_.matrix<float>(num_tokens, num_logits);
  noise_backward({.noise_logits = of_noise,
                  .dlogits = dlogits,
                  .noise = router.config().noise,
                  .request = saved.request,
                  .dnoise_logits = dnoise,
                  .execution = execution});
  const std::int64_t hidden = call.stages.hidden();
  Matrix<float> part{};
  if (dtokens.data != nullptr) part = noise_.matrix<float>(num_tokens, hidden);
  router_gemm_backward({.tokens = saved.tokens,
                        .gate = router.noise_gate(),
                        .dlogits = dnoise,
                        .dtokens = part,
                        .dgate = call.here.dnoise_gate,
                        .accumulate = call.here.accumulate,
                        .execution = execution});
  if (part.data == nullptr) return;
  add_token_gradients({.router = part, .shared = dtokens},
                      {reinterpret_cast<std::byte*>(dtokens.data), DType::kF32, num_tokens, hidden},
                      call.stages.stream());
}

/// [N max, H], where the tokens' ranks read them if they can.
RawMatrix CudaLayerBackward::sums_of_rows(const Call& call) {
  const RawMatrix read_there = call.ranks->place_of_sums();
  if (read_there.data != nullptr) return read_there;
  return row_sums_.matrix(DType::kF32, call.stages.experts().most_received(call.saved.num_tokens),
                          call.stages.hidden());
}

/// The same over ranks; what is not of the experts is added at home.
void CudaLayerBackward::bring_home(const Call& call, ConstRawMatrix sums,
                                   const TokenGradientParts& parts) {
  const std::int64_t num_tokens = call.saved.num_tokens;
  const std::int64_t hidden = call.stages.hidden();
  const Matrix<const float> rest = rest_of(call, parts);
  // Where nobody asks here, others do all the same: then they go where nothing is kept.
  const RawMatrix out = call.args.dtokens.data != nullptr
                            ? call.args.dtokens
                            : router_.matrix(DType::kF32, num_tokens, hidden);
  // Who wants the times of stages gets them one by one.
  call.ranks->bring_home(sums, rest, out, !call.stages.recorded(), call.stages.execution());
}

}  // namespace switchyard
