// C interface: the way back through experts on a given routing.
#include <vector>

#include "capi/capi_backward.hpp"
#include "capi/capi_experts.hpp"
#include "core/check.hpp"
#include "core/gpu/device_scope.hpp"
#include "core/id_check.hpp"
#include "core/row_ops.hpp"
#include "core/shape_check.hpp"
#include "layer/choice_gradients.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/combine.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

namespace {

/// The layer on a GPU that takes runs of so many experts a token. It is never asked to route.
MoeLayer& training_layer(sy_experts_t& experts, std::int64_t top_k) {
  const auto found = experts.training.find(top_k);
  if (found != experts.training.end()) return found->second;
  const ExpertConfig& config = experts.config;
  const ExpertsOnDevice& place = experts.on_device;
  LayerModel model;
  model.config.router = {.num_experts = config.num_experts,
                         .kind = TopKRouter{.top_k = static_cast<std::int32_t>(top_k)}};
  model.config.experts = config;
  model.gate = std::vector<float>(static_cast<std::size_t>(config.num_experts * config.hidden));
  model.experts = make_device_source(config, place.dtype, place.w13, place.w2, place.b13, place.b2);
  const LayerOptions options{.backend = Backend::kCuda};
  return experts.training.emplace(top_k, MoeLayer(model, options)).first->second;
}

void run_saved_on_gpu(sy_experts_t& experts, const sy_tensor* x, const sy_tensor* expert,
                      const sy_tensor* weight, const sy_tensor* y, sy_saved_t& into, void* stream) {
  const std::int64_t hidden = experts.config.hidden;
  const RawMatrix tokens = capi::raw_matrix("x", x, capi::kAny, hidden, Backend::kCuda);
  require(tokens.dtype == experts.dtype, "x is {}, but the weights are {}", to_string(tokens.dtype),
          to_string(experts.dtype));
  const auto ids =
      capi::matrix<std::int32_t>("expert", expert, tokens.rows, capi::kAny, Backend::kCuda);
  const std::int64_t top_k = ids.shape[1];
  const ForwardArgs args{
      .tokens = tokens,
      .out = capi::raw_matrix("y", y, tokens.rows, hidden, Backend::kCuda),
      .expert = ids,
      .weight = capi::matrix<float>("weight", weight, tokens.rows, top_k, Backend::kCuda),
      .stream = stream,
      .saved = &into.of_layer};
  into.of_experts.owner = experts.number;
  into.of_experts.top_k_on_gpu = top_k;
  training_layer(experts, top_k).forward(args);
}

void require_no_routers(const sy_gradients& gradients) {
  require(gradients.gate == nullptr && gradients.noise_gate == nullptr &&
              gradients.router_network == nullptr && gradients.router_bias == nullptr &&
              gradients.shared_w13 == nullptr && gradients.shared_w2 == nullptr &&
              gradients.shared_gate == nullptr && gradients.dlogits == nullptr,
          "gradients of a router or of shared experts are asked for: those are a layer's");
}

void run_backward_on_gpu(sy_experts_t& experts, sy_saved_t& saved, const sy_tensor* dy,
                         const sy_gradients& gradients, void* stream) {
  const std::int64_t hidden = experts.config.hidden;
  const std::int64_t top_k = saved.of_experts.top_k_on_gpu;
  constexpr Backend kGpu = Backend::kCuda;
  require_no_routers(gradients);
  BackwardArgs args{.saved = &saved.of_layer,
                    .dout = capi::raw_matrix("dy", dy, capi::kAny, hidden, kGpu),
                    .experts = capi::expert_gradients(experts.config, gradients, false, kGpu),
                    .accumulate = gradients.accumulate != 0,
                    .stream = stream};
  const std::int64_t num_tokens = args.dout.rows;
  args.dtokens = capi::optional_raw("gradients.tokens", gradients.tokens, num_tokens, hidden, kGpu);
  args.dweight =
      capi::optional_floats("gradients.weight", gradients.weight, num_tokens, top_k, kGpu);
  training_layer(experts, top_k).backward(args);
}

void run_saved(sy_experts_t& experts, const sy_tensor* x, const sy_tensor* expert,
               const sy_tensor* weight, const sy_tensor* y, sy_saved_t& into) {
  const ExpertConfig& config = experts.config;
  const RawMatrix tokens = capi::raw_matrix("x", x, capi::kAny, config.hidden, Backend::kCpu);
  const RawMatrix out = capi::raw_matrix("y", y, tokens.rows, config.hidden, Backend::kCpu);
  require_apart("y", out, "x", tokens);
  require(tokens.dtype == experts.dtype, "x is {}, but the weights are {}", to_string(tokens.dtype),
          to_string(experts.dtype));
  const auto ids =
      capi::matrix<std::int32_t>("expert", expert, tokens.rows, capi::kAny, Backend::kCpu);
  const std::int64_t top_k = ids.shape[1];
  require_ids("expert", {ids.data, ids.shape}, config.num_experts);
  const auto weights = capi::matrix<float>("weight", weight, tokens.rows, top_k, Backend::kCpu);

  capi::SavedExperts& saved = into.of_experts;
  saved.ready = false;
  const RawMatrix kept = saved.tokens_memory.matrix(tokens.dtype, tokens.rows, tokens.cols);
  std::copy_n(tokens.data, tokens.bytes(), kept.data);
  const Matrix<std::int32_t> kept_ids = saved.expert_memory.matrix(tokens.rows, top_k);
  std::copy_n(ids.data, ids.size(), kept_ids.data);
  const PlanView view = saved.plan.reserve(tokens.rows, top_k, config.num_experts,
                                           max_rows({}, tokens.rows, top_k, config.num_experts, 0));
  plan({.assignments = DenseAssignments{.expert = kept_ids, .weight = weights},
        .plan = view,
        .execution = experts.execution()});
  RawMatrix preactivation;
  if (into.of_layer.recompute() == Recompute::kNone) {
    preactivation =
        saved.preactivation_memory.matrix(experts.dtype, view.expert_begin[config.num_experts],
                                          (config.gated ? 2 : 1) * config.inner);
  }
  experts.runner.run(
      {.x = kept,
       .plan = view,
       .weights = experts.weights.get(),
       .reduced = {.sums = out, .subtree = {.order = {.num_experts = config.num_experts}}},
       .preactivation = preactivation,
       .execution = experts.execution()},
      experts.execution());
  saved.tokens = kept;
  saved.expert = kept_ids;
  saved.preactivation = preactivation;
  saved.owner = experts.number;
  saved.top_k_on_gpu = 0;
  saved.ready = true;
}

void run_backward(sy_experts_t& experts, capi::SavedExperts& saved, const sy_tensor* dy,
                  const sy_gradients& gradients) {
  const ExpertConfig& config = experts.config;
  const std::int64_t num_tokens = saved.tokens.rows, hidden = config.hidden;
  const Execution execution = experts.execution();
  const ConstRawMatrix dout = capi::raw_matrix("dy", dy, num_tokens, hidden, Backend::kCpu);
  const RawMatrix dx =
      capi::optional_raw("gradients.tokens", gradients.tokens, num_tokens, hidden, Backend::kCpu);
  const Matrix<float> dweight = capi::optional_floats(
      "gradients.weight", gradients.weight, num_tokens, saved.expert.shape[1], Backend::kCpu);
  const ExpertGradients of_experts =
      capi::expert_gradients(config, gradients, false, Backend::kCpu);
  require_no_routers(gradients);

  RawBuffer converted, rows_memory;
  const RawMatrix in_type = converted.matrix(experts.dtype, num_tokens, hidden);
  parallel_for(execution.pool, num_tokens, [&](std::int64_t t, int) {
    row_ops::convert(dout.dtype, dout.row(t), experts.dtype, in_type.row(t), hidden);
  });
  PlanView view = saved.plan.view();
  const std::int64_t rows = view.expert_begin[config.num_experts];
  std::vector<float> of_row(dweight.data == nullptr ? 0 : static_cast<std::size_t>(rows));
  RawMatrix dx_rows{};
  if (dx.data != nullptr) dx_rows = rows_memory.matrix(DType::kF32, rows, hidden);
  experts_backward(
      {.x = saved.tokens,
       .dout = in_type,
       .preactivation = saved.preactivation,
       .plan = view,
       .weights = experts.weights.get(),
       .drow_weight = of_row.empty() ? Vector<float>{} : Vector<float>{of_row.data(), {rows}},
       .dx_rows = dx_rows,
       .gradients = of_experts,
       .accumulate = gradients.accumulate != 0,
       .execution = execution});
  saved.ready = false;       // what is refused uses nothing up
  if (dx.data != nullptr) {  // the sum of a token's rows, whose weights are in them already
    std::vector<float> ones(static_cast<std::size_t>(view.row_weight.size()), 1.0F);
    view.row_weight = {ones.data(), view.row_weight.shape};
    combine({.rows = dx_rows,
             .plan = view,
             .reduced = {.sums = dx, .subtree = {.order = {.num_experts = config.num_experts}}},
             .execution = execution});
  }
  if (dweight.data == nullptr) return;
  give_choice_gradients({.plan = view,
                         .expert = saved.expert,
                         .drow_weight = {of_row.data(), {rows}},
                         .dweight = dweight});
}

/// What has a backward.
void require_numbers(const sy_experts_t& experts) {
  if (!experts.is_stored) return;
  if (experts.fused) {
    fail(ErrorCode::kUnsupported, "experts given as codes have no backward on a GPU");
  }
  const WeightFormat format = experts.weights->format();
  if (format == WeightFormat::kExact) return;
  fail(ErrorCode::kUnsupported, "experts kept as {} have no backward: want weights=exact",
       to_string(format));
}

}  // namespace

sy_status sy_experts_run_saved(sy_experts experts, const sy_tensor* x, const sy_tensor* expert,
                               const sy_tensor* weight, const sy_tensor* y, sy_saved saved,
                               void* stream) {
  return capi::guarded([&] {
    require(experts != nullptr && saved != nullptr, "experts or saved is NULL");
    const auto call = experts->calls.begin();
    const auto filling = saved->calls.begin();
    require_numbers(*experts);
    if (experts->fused) {
      const DeviceScope scope(experts->device);
      run_saved_on_gpu(*experts, x, expert, weight, y, *saved, stream);
      return;
    }
    run_saved(*experts, x, expert, weight, y, *saved);
  });
}

sy_status sy_experts_backward(sy_experts experts, sy_saved saved, const sy_tensor* dy,
                              const sy_gradients* gradients, void* stream) {
  return capi::guarded([&] {
    require(experts != nullptr && saved != nullptr, "experts or saved is NULL");
    const auto call = experts->calls.begin();
    const auto using_up = saved->calls.begin();
    capi::SavedExperts& kept = saved->of_experts;
    require(kept.owner != 0, "no run of these experts has filled what is saved");
    require(kept.owner == experts->number, "what is saved is of other experts");
    if (experts->fused) {
      const DeviceScope scope(experts->device);
      run_backward_on_gpu(*experts, *saved, dy, capi::taken("gradients", gradients), stream);
      return;
    }
    require(kept.ready, "what is saved was used by a backward already");
    run_backward(*experts, kept, dy, capi::taken("gradients", gradients));
  });
}
