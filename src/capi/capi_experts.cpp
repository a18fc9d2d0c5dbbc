// C interface: the fused experts call.
#include "capi/capi_experts.hpp"

#include <atomic>

#include "core/check.hpp"
#include "core/id_check.hpp"
#include "core/row_ops.hpp"
#include "core/shape_check.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

namespace {

std::atomic<std::uint64_t> objects_made = 0;

ExpertsOnDevice place_of(const sy_experts_t& experts, const sy_tensor* w13, const sy_tensor* w2,
                         const sy_tensor* b13, const sy_tensor* b2) {
  for (const sy_tensor* tensor : {w2, b13, b2}) {
    if (tensor == nullptr) continue;
    require(tensor->device_id == experts.device, "w13 lies on GPU {}, other weights on GPU {}",
            experts.device, tensor->device_id);
  }
  const ExpertConfig& config = experts.config;
  const auto bias = [](const sy_tensor* tensor) {
    return tensor == nullptr ? nullptr : reinterpret_cast<const float*>(capi::data_of(*tensor));
  };
  capi::check_weights(config, w13, w2, b13, b2, Backend::kCuda);
  return {.config = config,
          .dtype = experts.dtype,
          .w13 = capi::data_of(*w13),
          .w2 = capi::data_of(*w2),
          .b13 = bias(b13),
          .b2 = bias(b2)};
}

void run_fused(sy_experts_t& experts, const sy_tensor* x, const sy_tensor* expert,
               const sy_tensor* weight, const sy_tensor* y, void* stream) {
  const DeviceScope scope(experts.device);
  for (const sy_tensor* tensor : {x, expert, weight, y}) {
    require(tensor != nullptr && tensor->device_id == experts.device,
            "a tensor lies on GPU {}, the weights on GPU {}",
            tensor == nullptr ? -1 : tensor->device_id, experts.device);
  }
  const std::int64_t hidden = experts.config.hidden;
  const RawMatrix tokens = capi::raw_matrix("x", x, capi::kAny, hidden, Backend::kCuda);
  const auto ids =
      capi::matrix<std::int32_t>("expert", expert, tokens.rows, capi::kAny, Backend::kCuda);
  experts.fused->run(
      {.x = tokens,
       .expert = ids,
       .weight = capi::matrix<float>("weight", weight, tokens.rows, ids.shape[1], Backend::kCuda),
       .y = capi::raw_matrix("y", y, tokens.rows, hidden, Backend::kCuda)},
      stream);
}

/// `tokens`, or a copy rounded to the experts' type.
ConstRawMatrix in_type(sy_experts_t& experts, const ConstRawMatrix& tokens) {
  if (tokens.dtype == experts.dtype) return tokens;
  const RawMatrix rounded = experts.rounded.matrix(experts.dtype, tokens.rows, tokens.cols);
  parallel_for(experts.pool.get(), tokens.rows, [&](std::int64_t t, int) {
    row_ops::convert(tokens.dtype, tokens.row(t), experts.dtype, rounded.row(t), tokens.cols);
  });
  return rounded;
}

void run_on_cpu(sy_experts_t& experts, const sy_tensor* x, const sy_tensor* expert,
                const sy_tensor* weight, const sy_tensor* y) {
  const ExpertConfig& config = experts.config;
  const ConstRawMatrix tokens =
      in_type(experts, capi::raw_matrix("x", x, capi::kAny, config.hidden, Backend::kCpu));
  const auto ids =
      capi::matrix<std::int32_t>("expert", expert, tokens.rows, capi::kAny, Backend::kCpu);
  const std::int64_t top_k = ids.shape[1];
  require_ids("expert", {ids.data, ids.shape}, config.num_experts);
  const PlanView view =
      experts.plan.reserve(tokens.rows, top_k, config.num_experts,
                           max_rows({}, tokens.rows, top_k, config.num_experts, 0));
  plan({.assignments = DenseAssignments{.expert = ids,
                                        .weight = capi::matrix<float>("weight", weight, tokens.rows,
                                                                      top_k, Backend::kCpu)},
        .plan = view,
        .execution = experts.execution()});
  experts.runner.run(
      {.x = tokens,
       .plan = view,
       .weights = experts.weights.get(),
       .reduced = {.sums = capi::raw_matrix("y", y, tokens.rows, config.hidden, Backend::kCpu),
                   .subtree = {.order = {.num_experts = config.num_experts}}},
       .execution = experts.execution()},
      experts.execution());
}

void load_stored(sy_experts_t& experts, const sy_stored_experts& given) {
  const auto source = capi::stored_source_of(experts.config, {.w13 = given.w13,
                                                              .w13_scales = given.w13_scales,
                                                              .w2 = given.w2,
                                                              .w2_scales = given.w2_scales,
                                                              .b13 = given.b13,
                                                              .b2 = given.b2});
  LoadExpertsArgs args{.config = experts.config,
                       .source = source.get(),
                       .dtype = experts.dtype,
                       .num_local = experts.config.num_experts,
                       .format = capi::enumerator("weights", given.weights, "sy_weight_format",
                                                  WeightFormat::kStored),
                       .execution = experts.execution()};
  if (experts.device == DeviceScope::kNone) {
    experts.weights = load_experts(args);
    return;
  }
  const DeviceScope scope(experts.device);
  args.execution.backend = Backend::kCuda;
  experts.fused = make_fused_experts(load_experts(args));
  experts.calls.stays_behind(capi::StaysBehind::kGpu);
}

}  // namespace

void sy_expert_config_init(sy_expert_config* config, size_t struct_size) {
  const ExpertConfig defaults;
  capi::give(config,
             {.struct_size = 0,
              .num_experts = 0,
              .hidden = 0,
              .inner = 0,
              .gated = 1,
              .activation = SY_SILU,
              .alpha = defaults.alpha,
              .limit = defaults.limit},
             struct_size);
}

sy_status sy_experts_create(const sy_expert_config* config, const sy_tensor* w13,
                            const sy_tensor* w2, const sy_tensor* b13, const sy_tensor* b2,
                            int32_t num_threads, sy_experts* experts) {
  return capi::guarded([&] {
    require(experts != nullptr, "experts is NULL");
    const ExpertConfig experts_config =
        capi::to_config(capi::taken("config", config), b13 != nullptr);
    check(experts_config);
    auto handle = std::make_unique<sy_experts_t>();
    handle->config = experts_config;
    handle->number = ++objects_made;
    if (capi::backend_of("w13", w13) == Backend::kCuda) {
      handle->device = w13->device_id;
      handle->dtype = capi::dtype_of("w13", *w13);
      handle->on_device = place_of(*handle, w13, w2, b13, b2);
      const DeviceScope scope(handle->device);
      handle->fused = make_fused_experts(handle->on_device);
      handle->calls.stays_behind(capi::StaysBehind::kGpu);
      *experts = handle.release();
      return;
    }
    if (num_threads != 1) handle->pool = std::make_unique<ThreadPool>(num_threads);
    const auto source = capi::source_of(experts_config, w13, w2, b13, b2);
    handle->dtype = source->dtype();
    handle->weights = load_experts({.config = experts_config,
                                    .source = source.get(),
                                    .dtype = source->dtype(),
                                    .num_local = experts_config.num_experts,
                                    .execution = handle->execution()});
    *experts = handle.release();
  });
}

sy_status sy_experts_create_stored(const sy_expert_config* config, const sy_stored_experts* stored,
                                   sy_experts* experts) {
  return capi::guarded([&] {
    require(experts != nullptr, "experts is NULL");
    const sy_stored_experts given = capi::taken("stored", stored, sy_stored_experts{});
    const bool on_gpu = given.device_type == SY_DEVICE_CUDA;
    require(on_gpu || given.device_type == SY_DEVICE_CPU,
            "device_type={} is neither 1 (CPU) nor 2 (CUDA)", given.device_type);
    require(!on_gpu || given.device_id >= 0, "device_id={} is no GPU", given.device_id);
    auto handle = std::make_unique<sy_experts_t>();
    handle->config = capi::to_config(capi::taken("config", config), given.b13 != nullptr);
    check(handle->config);
    handle->number = ++objects_made;
    handle->is_stored = true;
    handle->dtype = capi::to_dtype("compute", given.compute);
    if (on_gpu) handle->device = given.device_id;
    if (!on_gpu && given.num_threads != 1) {
      handle->pool = std::make_unique<ThreadPool>(given.num_threads);
    }
    load_stored(*handle, given);
    *experts = handle.release();
  });
}

void sy_experts_free(sy_experts experts) {
  if (experts == nullptr || !experts->calls.may_free()) return;
  const DeviceScope scope(experts->device);
  delete experts;
}

sy_status sy_experts_run(sy_experts experts, const sy_tensor* x, const sy_tensor* expert,
                         const sy_tensor* weight, const sy_tensor* y, void* stream) {
  return capi::guarded([&] {
    require(experts != nullptr, "experts is NULL");
    const auto call = experts->calls.begin();
    const Backend where = experts->fused ? Backend::kCuda : Backend::kCpu;
    const std::int64_t hidden = experts->config.hidden;
    const RawMatrix tokens = capi::raw_matrix("x", x, capi::kAny, hidden, where);
    require_apart("y", capi::raw_matrix("y", y, tokens.rows, hidden, where), "x", tokens);
    const bool is_rounded = experts->is_stored && where == Backend::kCpu;
    require(is_rounded || tokens.dtype == experts->dtype, "x is {}, but the weights are {}",
            to_string(tokens.dtype), to_string(experts->dtype));
    if (where == Backend::kCuda) {
      run_fused(*experts, x, expert, weight, y, stream);
    } else {
      run_on_cpu(*experts, x, expert, weight, y);
    }
  });
}

sy_status sy_experts_read_expert(sy_experts experts, int32_t expert, const sy_tensor* w13,
                                 const sy_tensor* w2, const sy_tensor* b13, const sy_tensor* b2) {
  return capi::guarded([&] {
    require(experts != nullptr, "experts is NULL");
    const auto call = experts->calls.begin();
    if (experts->fused) {
      fail(ErrorCode::kUnsupported, "weights on a GPU are {}",
           experts->is_stored ? "not read back by an experts object"
                              : "used where the caller has them");
    }
    capi::read_expert(*experts->weights, expert, w13, w2, b13, b2);
  });
}

sy_status sy_experts_check(sy_experts experts) {
  return capi::guarded([&] {
    require(experts != nullptr, "experts is NULL");
    const auto call = experts->calls.begin();
    const DeviceScope scope(experts->device);
    if (experts->fused) experts->fused->check();
    for (auto& [top_k, layer] : experts->training) layer.check();
  });
}
