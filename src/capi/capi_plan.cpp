// C interface: the plan of a rank's assignments, and the sums by it.
#include "capi/capi.hpp"
#include "core/check.hpp"
#include "core/gpu/device_scope.hpp"
#include "layer/gpu/stage_calls.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

struct sy_plan_t {
  sy_plan_config config{};
  int device = DeviceScope::kNone;
  Plan on_host;
  std::unique_ptr<PlanCalls> on_gpu;
  PlanView view;  // of the last call
  Backend backend = Backend::kCpu;
  bool planned = false;
  capi::Calls calls{"the plan"};
};

namespace {

PlanArgs plan_args(const sy_plan_config& config) {
  return {.first_expert = config.first_expert,
          .total_experts = config.total_experts,
          .layout = capi::to_layout(config.layout, config.alignment),
          .padded_rows = config.padded_rows};
}

void plan_on_host(sy_plan_t& handle, PlanArgs args) {
  args.plan = handle.on_host.reserve(args.assignments, args.layout, handle.config.num_experts,
                                     args.padded_rows);
  plan(args);
  handle.view = args.plan;
}

sy_plan_config default_config() {
  return {.struct_size = sizeof(sy_plan_config),
          .num_experts = 0,
          .first_expert = 0,
          .total_experts = 0,
          .layout = SY_LAYOUT_COMPACT,
          .alignment = 1,
          .padded_rows = 0};
}

}  // namespace

void sy_plan_config_init(sy_plan_config* config, size_t struct_size) {
  capi::give(config, default_config(), struct_size);
}

sy_status sy_plan_create(const sy_plan_config* config, sy_plan* plan) {
  return capi::guarded([&] {
    require(plan != nullptr, "plan is NULL");
    auto handle = std::make_unique<sy_plan_t>();
    handle->config = capi::taken("config", config, default_config());
    const sy_plan_config& given = handle->config;
    static_cast<void>(capi::to_layout(given.layout, given.alignment));
    require(given.num_experts >= 1 && given.first_expert >= 0 && given.padded_rows >= 0,
            "num_experts={}, first_expert={}, padded_rows={}: one is out of range",
            given.num_experts, given.first_expert, given.padded_rows);
    *plan = handle.release();
  });
}

void sy_plan_free(sy_plan plan) {
  if (plan == nullptr || !plan->calls.may_free()) return;
  const DeviceScope scope(plan->device);
  delete plan;
}

sy_status sy_plan_run(sy_plan plan, const sy_tensor* expert, const sy_tensor* weight,
                      sy_plan_rows* rows, void* stream) {
  return capi::guarded([&] {
    require(plan != nullptr, "plan is NULL");
    const auto call = plan->calls.begin();
    capi::check_struct("rows", rows);
    const Backend backend = capi::backend_of("expert", expert);
    PlanArgs args = plan_args(plan->config);
    const auto ids = capi::matrix<std::int32_t>("expert", expert, capi::kAny, capi::kAny, backend);
    args.assignments = DenseAssignments{
        .expert = ids,
        .weight = capi::matrix<float>("weight", weight, ids.shape[0], ids.shape[1], backend)};
    plan->planned = false;
    if (backend == Backend::kCuda) {
      require(plan->on_gpu == nullptr || plan->device == expert->device_id,
              "expert lies on GPU {}, the plan on GPU {}", expert->device_id, plan->device);
      plan->device = expert->device_id;
      const DeviceScope scope(plan->device);
      if (plan->on_gpu == nullptr) {
        plan->on_gpu = make_plan_calls(plan->config.num_experts);
        plan->calls.stays_behind(capi::StaysBehind::kGpu);
      }
      plan->view = plan->on_gpu->run(args, stream);
    } else {
      plan_on_host(*plan, args);
    }
    plan->backend = backend;
    plan->planned = true;
    const PlanView& view = plan->view;
    capi::give(rows,
               sy_plan_rows{.struct_size = 0,
                            .num_experts = view.num_experts,
                            .num_rows = view.row_token.shape[0],
                            .num_tokens = view.num_tokens(),
                            .expert_begin = view.expert_begin.data,
                            .expert_rows = view.expert_rows.data,
                            .row_token = view.row_token.data,
                            .row_weight = view.row_weight.data,
                            .token_begin = view.token_begin.data,
                            .token_row = view.token_row.data},
               rows->struct_size);
  });
}

sy_status sy_plan_combine(sy_plan plan, const sy_tensor* rows, const sy_tensor* y, void* stream) {
  return capi::guarded([&] {
    require(plan != nullptr, "plan is NULL");
    const auto call = plan->calls.begin();
    require(plan->planned, "nothing is planned");
    const DeviceScope scope(plan->backend == Backend::kCuda ? plan->device : DeviceScope::kNone);
    const PlanView& view = plan->view;
    const RawMatrix out = capi::raw_matrix("y", y, view.num_tokens(), capi::kAny, plan->backend);
    const RawMatrix outputs = capi::raw_matrix("rows", rows, capi::kAny, out.cols, plan->backend);
    require(plan->backend == Backend::kCuda || outputs.rows >= view.expert_begin[view.num_experts],
            "rows are {}, want {}", outputs.rows, view.expert_begin[view.num_experts]);
    const sy_plan_config& config = plan->config;
    const std::int32_t total =
        config.total_experts > 0 ? config.total_experts : config.first_expert + config.num_experts;
    combine({.rows = outputs,
             .plan = view,
             .first_expert = config.first_expert,
             .reduced = {.sums = out, .subtree = {.order = {.num_experts = total}}},
             .execution = {.backend = plan->backend, .stream = stream}});
  });
}

sy_status sy_plan_check(sy_plan plan) {
  return capi::guarded([&] {
    require(plan != nullptr, "plan is NULL");
    const auto call = plan->calls.begin();
    const DeviceScope scope(plan->device);
    if (plan->on_gpu) plan->on_gpu->check();
  });
}
