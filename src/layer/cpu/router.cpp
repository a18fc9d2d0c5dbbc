// The router's stages in order, on a rank's own tokens and before anything moves. Bound by the
// router GEMM; what each stage computes is said in its own header.
#include "layer/cpu/router.hpp"

#include <algorithm>

#include "core/row_ops.hpp"
#include "experts/raw_matrix.hpp"
#include "layer/network_work.hpp"
#include "layer/routing_stats.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {

CpuRouter::CpuRouter(const LayerModel& model, const LayerOptions& options)
    : config_(model.config.router),
      gate_(model.gate),
      network_(config_.network, model.router_network),
      noise_gate_(model.noise_gate),
      gating_residual_(model.gating_residual),
      bias_(model.router_bias),
      selection_bias_(model.selection_bias),
      capacity_factor_(options.capacity_factor),
      drop_policy_(options.drop_policy) {}

Assignments CpuRouter::run(const ForwardArgs& args, ConstRawMatrix tokens,
                           const Execution& execution) {
  own_ = {};
  Assignments work{.x = tokens, .expert = args.expert, .weight = args.weight};
  Vector<float> top_score{};
  if (args.expert.data == nullptr) {
    Matrix<float> logits{};
    if (config_.has_logits()) {
      logits = logits_.matrix(tokens.rows, config_.num_logits());
      compute_logits(seen(tokens, args.request, execution), logits, execution);
      if (config_.gating_residual && tokens.rows > 0) {
        add_residual(args.request.previous_logits, logits, execution);
      }
      if (args.request.training && config_.noise.is_on_logits()) {
        Matrix<const float> of_noise{};
        if (!noise_gate_.empty()) of_noise = noise_logits(tokens, execution);
        add_noise({.logits = logits,
                   .noise_logits = of_noise,
                   .noise = config_.noise,
                   .request = args.request,
                   .execution = execution});
      }
    }
    if (args.request.logits.data != nullptr) {
      std::copy_n(logits.data, logits.size(), args.request.logits.data);
    }
    top_score = args.request.top_score;
    // Of other rules bpr goes by the largest weight.
    if (top_score.data == nullptr && capacity_factor_ && drop_policy_ == DropPolicy::kBpr &&
        config_.is_top_k()) {
      top_score = score_.vector(tokens.rows);
    }
    RouteRequest request = args.request;
    request.top_score = top_score;
    request.record = nullptr;
    const Routing routing = select(logits, tokens.rows, request, execution);
    work.expert = routing.expert;
    work.weight = routing.weight;
  }
  RoutingRecord* const record = args.request.record;
  // Without a limit this only counts, for those who ask.
  if (capacity_factor_ || record != nullptr) work.kept = limit(work, top_score, execution);
  if (record != nullptr) fill(*record, work);
  if (args.expert.data == nullptr) own_ = work;
  return work;
}

metrics::Routing CpuRouter::stats(int num_ranks) const {
  require_own_routing(own_.expert);
  const std::int64_t num_tokens = own_.expert.shape[0];
  return routing_stats(
      {.num_experts = config_.num_experts,
       .assignments = DenseAssignments{.expert = own_.expert, .weight = own_.weight},
       .kept = capacity_factor_ ? flat(own_.kept) : Vector<const std::uint8_t>{},
       .logits = config_.has_logits() ? logits(num_tokens) : Matrix<const float>{},
       .score = config_.score()},
      num_ranks);
}

void CpuRouter::compute_logits(ConstRawMatrix tokens, Matrix<float> logits,
                               const Execution& execution) {
  ConstRawMatrix features = tokens;
  ConstRawMatrix rows = gate(tokens.cols);
  if (!config_.network.is_linear()) {
    const ScopedStage stage(execution, "router_network",
                            network_work(config_.network, tokens.rows, tokens.cols));
    features = network_.features(tokens, execution);
    rows = network_.scaled(rows);
  }
  multiply(features, rows, bias(bias_, config_.num_logits()), logits, execution);
}

void CpuRouter::add_residual(Matrix<const float> previous, Matrix<float> logits,
                             const Execution& execution) {
  const std::int64_t columns = logits.shape[1];
  const Matrix<float> part = residual_.matrix(logits.shape[0], columns);
  multiply(raw(previous), gating_residual_.matrix(columns, columns), {}, part, execution);
  parallel_for(execution.pool, logits.shape[0],
               [&](std::int64_t t, int) { row_ops::add(part.row(t), logits.row(t), columns); });
}

void CpuRouter::residual_backward(Matrix<const float> previous, Matrix<const float> dlogits,
                                  Matrix<float> dprevious, Vector<float> dresidual, bool accumulate,
                                  const Execution& execution) const {
  const std::int64_t columns = dlogits.shape[1];
  router_gemm_backward({.tokens = raw(previous),
                        .gate = gating_residual_.matrix(columns, columns),
                        .dlogits = dlogits,
                        .dtokens = dprevious,
                        .dgate = dresidual.data == nullptr
                                     ? RawMatrix{}
                                     : raw(Matrix<float>{dresidual.data, {columns, columns}}),
                        .accumulate = accumulate,
                        .execution = execution});
}

Matrix<const float> CpuRouter::noise_logits(ConstRawMatrix tokens, const Execution& execution) {
  const Matrix<float> logits = noise_logits_.matrix(tokens.rows, config_.num_logits());
  multiply(tokens, noise_gate(tokens.cols), {}, logits, execution);
  return logits;
}

void CpuRouter::multiply(ConstRawMatrix tokens, ConstRawMatrix gate, Vector<const float> bias,
                         Matrix<float> logits, const Execution& execution) const {
  const auto size = static_cast<double>(logits.size());
  const double flops = 2 * size * static_cast<double>(tokens.cols);
  const ScopedStage stage(execution, "router_gemm",
                          {.bytes = static_cast<double>(tokens.bytes() + gate.bytes()) + 4 * size,
                           .flops = flops,
                           .flops_executed = flops});
  router_gemm(
      {.tokens = tokens, .gate = gate, .bias = bias, .logits = logits, .execution = execution});
}

ConstRawMatrix CpuRouter::seen(ConstRawMatrix tokens, const RouteRequest& request,
                               const Execution& execution) {
  if (!draws_noise(request, RouterNoise::Kind::kInputJitter)) return tokens;
  const Matrix<float> jittered = jittered_.matrix(tokens.rows, tokens.cols);
  const ScopedStage stage(execution, "noise",
                          {.bytes = static_cast<double>(tokens.bytes() + 4 * jittered.size())});
  add_noise({.tokens = tokens,
             .jittered = jittered,
             .noise = config_.noise,
             .request = request,
             .execution = execution});
  return {reinterpret_cast<const std::byte*>(jittered.data), DType::kF32, tokens.rows, tokens.cols};
}

Routing CpuRouter::select(Matrix<const float> logits, std::int64_t num_tokens,
                          const RouteRequest& request, const Execution& execution) {
  const Routing routing{.expert = expert_.matrix(num_tokens, config_.top_k()),
                        .weight = weight_.matrix(num_tokens, config_.top_k())};
  const ScopedStage stage(
      execution, "select",
      {.bytes = static_cast<double>(4 * logits.size() + 8 * routing.expert.size())});
  route({.logits = logits,
         .selection_bias = bias(selection_bias_, config_.num_experts),
         .config = config_,
         .routing = routing,
         .room = drop_policy_ == DropPolicy::kReroute ? capacity(num_tokens).computing : 0,
         .request = request,
         .execution = execution});
  return routing;
}

Matrix<const std::uint8_t> CpuRouter::limit(const Assignments& work, Vector<const float> top_score,
                                            const Execution& execution) {
  const auto [num_tokens, top_k] = work.expert.shape;
  const Matrix<std::uint8_t> kept = kept_.matrix(num_tokens, top_k);
  const ScopedStage stage(execution, "plan", {.bytes = 9 * static_cast<double>(kept.size())});
  const RouterCapacity slots = capacity(num_tokens);
  apply_capacity(
      {.assignments = DenseAssignments{.expert = work.expert, .weight = work.weight},
       .top_score = top_score,
       .num_experts = config_.num_experts,
       .capacity = slots.computing,
       .zero_computation = config_.zero_computation.total(),
       .zero_computation_capacity = slots.zero_computation,
       // Behind a router that has rerouted, what is too much comes last.
       .policy = drop_policy_ == DropPolicy::kReroute ? DropPolicy::kToken : drop_policy_,
       .kept = flat(kept),
       .counts = counts_.vector(config_.num_experts),
       .counts_kept = counts_kept_.vector(config_.num_experts),
       .execution = execution});
  return kept;
}

void CpuRouter::fill(RoutingRecord& record, const Assignments& work) const {
  const auto copy = [](auto& to, const auto* from, std::int64_t size) {
    to.assign(from, from + size);
  };
  copy(record.expert, work.expert.data, work.expert.size());
  copy(record.weight, work.weight.data, work.expert.size());
  copy(record.kept, work.kept.data, work.expert.size());
  copy(record.counts, counts_.values().data(), config_.num_experts);
  copy(record.counts_kept, counts_kept_.values().data(), config_.num_experts);
}

}  // namespace switchyard
