// C interface: dispatch and combine between GPUs. All of it only enqueues on the caller's stream.
#include "capi/capi_ep.hpp"
#include "core/check.hpp"
#include "core/gpu/device_scope.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

namespace {

Matrix<const float> weight_of(const sy_ep_t& ep, const sy_tensor* weight) {
  if (weight == nullptr) return {};
  return capi::matrix<float>("weight", weight, ep.num_tokens, ep.config.top_k, Backend::kCuda);
}

RawMatrix out_of(const sy_ep_t& ep, const sy_tensor* y) {
  return capi::raw_matrix("y", y, ep.num_tokens, ep.config.hidden, Backend::kCuda);
}

void check_rows(const sy_ep_t& ep, DType dtype) {
  require(dtype == ep.config.dtype, "rows are {}, want {}", to_string(dtype),
          to_string(ep.config.dtype));
}

DeviceAssignments& assignments_of(sy_ep_t& ep) {
  if (ep.assignments == nullptr) {
    ep.calls.stays_behind(capi::StaysBehind::kGpu);
    ep.assignments = make_device_assignments(*ep.ranks,
                                             {.num_experts = ep.config.num_experts,
                                              .top_k = ep.config.top_k,
                                              .hidden = ep.config.hidden,
                                              .max_tokens = ep.config.max_tokens,
                                              .dtype = ep.config.dtype},
                                             ep.device_options);
  }
  return *ep.assignments;
}

std::int32_t code_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return SY_BF16;
    case DType::kF16: return SY_F16;
    case DType::kF8E4M3: return SY_FP8_E4M3;
    default: return SY_F32;
  }
}

}  // namespace

Backend sy_ep_t::backend_for(const char* name, const sy_tensor* x) {
  const Backend backend = capi::backend_of(name, x);
  const std::int32_t type = backend == Backend::kCpu ? SY_DEVICE_CPU : SY_DEVICE_CUDA;
  require(device_type == 0 || device_type == type, "{} lies on {}, want {}", name,
          backend == Backend::kCpu ? "the CPU" : "a GPU",
          device_type == SY_DEVICE_CPU ? "the CPU" : "a GPU");
  if (backend == Backend::kCuda && device == -1) device = x->device_id;
  return backend;
}

void sy_ep_t::check_device(std::initializer_list<const sy_tensor*> tensors) const {
  for (const sy_tensor* tensor : tensors) {
    if (tensor == nullptr || tensor->device_type != SY_DEVICE_CUDA) continue;
    require(tensor->device_id == device, "a tensor lies on GPU {}, want {}", tensor->device_id,
            device);
  }
}

void capi::make_native(sy_ep_t& ep) {
  if (ep.native != nullptr) return;
  ep.device_options.device = ep.device;
  ep.device_options.timeout = ep.ranks->timeout();
  ep.calls.stays_behind(StaysBehind::kGpu);
  ep.native = make_device_native(*ep.ranks, {.exchange = ep.config,
                                             .options = ep.device_options,
                                             .capacity_factor = ep.capacity_factor,
                                             .drop_policy = ep.drop_policy});
}

sy_received capi::device_dispatch(sy_ep_t& ep, const TransportInput& input, void* stream) {
  const DeviceScope scope(ep.device);
  make_native(ep);
  const DeviceNative::Rows rows = ep.native->dispatch({.x = input.x,
                                                       .expert = input.expert,
                                                       .weight = input.weight,
                                                       .execution = {.stream = stream}});
  ep.max_assignments = rows.max_assignments;
  return {.struct_size = 0,
          .x = rows.received.x.data,
          .num_rows = rows.received.x.rows,
          .num_assignments = rows.max_assignments,
          .num_local_experts = ep.num_local,
          .expert_begin = rows.plan.expert_begin.data,
          .row_x = rows.plan.row_token.data,
          .row_weight = rows.plan.row_weight.data,
          .dropped_rows = 0,
          .x_dtype = code_of(rows.received.x.dtype),
          .num_scales = rows.received.scale.shape[1],
          .scale = rows.received.scale.data,
          .rows_received = rows.received.num_rows,
          .rows_dropped = rows.received.dropped_rows,
          .number = 0};
}

void capi::device_combine(sy_ep_t& ep, const sy_tensor* rows, const sy_tensor* y, void* stream) {
  const DeviceScope scope(ep.device);
  require(ep.native != nullptr, "ep has dispatched nothing");
  ep.check_device({rows, y});
  const RawMatrix outputs = raw_matrix("rows", rows, kAny, ep.config.hidden, Backend::kCuda);
  require(outputs.rows <= ep.max_assignments, "rows are {}, at most {} can be", outputs.rows,
          ep.max_assignments);
  ep.native->combine(outputs, out_of(ep, y), stream);
}

sy_flat capi::device_dispatch_flat(sy_ep_t& ep, const TransportInput& input, void* stream) {
  const DeviceScope scope(ep.device);
  ep.device_options.device = ep.device;
  ep.device_options.timeout = ep.ranks->timeout();
  const DeviceAssignments::Flat rows = assignments_of(ep).dispatch_flat(input, stream);
  return {.struct_size = 0,
          .x = rows.x.data,
          .num_rows = rows.x.rows,
          .meta = rows.meta.data,
          .rows_received = rows.num_rows};
}

void capi::device_combine_flat(sy_ep_t& ep, const sy_tensor* rows, const sy_tensor* weight,
                               const sy_tensor* y, void* stream) {
  const DeviceScope scope(ep.device);
  require(ep.assignments != nullptr, "ep has dispatched nothing by sy_ep_dispatch_flat");
  ep.check_device({rows, weight, y});
  const RawMatrix outputs = raw_matrix("rows", rows, kAny, ep.config.hidden, Backend::kCuda);
  check_rows(ep, outputs.dtype);
  ep.assignments->combine_flat(outputs, weight_of(ep, weight), out_of(ep, y), stream);
}

sy_bucketed capi::device_dispatch_bucketed(sy_ep_t& ep, const TransportInput& input,
                                           std::int64_t capacity, void* stream) {
  const DeviceScope scope(ep.device);
  ep.device_options.device = ep.device;
  ep.device_options.timeout = ep.ranks->timeout();
  const DeviceAssignments::Buckets rows =
      assignments_of(ep).dispatch_bucketed(input, capacity, stream);
  ep.capacity = capacity;
  return {.struct_size = 0,
          .expert_num_tokens = rows.num_tokens.data,
          .expert_x = rows.x.data,
          .expert_meta = rows.meta.data,
          .num_local_experts = ep.num_local,
          .capacity = capacity};
}

void capi::device_combine_bucketed(sy_ep_t& ep, const sy_tensor* rows, const sy_tensor* weight,
                                   const sy_tensor* y, void* stream) {
  const DeviceScope scope(ep.device);
  require(ep.assignments != nullptr, "ep has dispatched nothing by sy_ep_dispatch_bucketed");
  ep.check_device({rows, weight, y});
  check_tensor("rows", rows, {ep.num_local, ep.capacity, ep.config.hidden}, Backend::kCuda);
  const RawMatrix outputs{data_of(*rows), dtype_of("rows", *rows), ep.num_local * ep.capacity,
                          ep.config.hidden};
  check_rows(ep, outputs.dtype);
  ep.assignments->combine_bucketed(outputs, weight_of(ep, weight), out_of(ep, y), stream);
}

sy_status sy_ep_check(sy_ep ep) {
  return capi::guarded([&] {
    require(ep != nullptr, "ep is NULL");
    const auto call = ep->calls.begin();
    const DeviceScope scope(ep->device);
    if (ep->native != nullptr) ep->native->check();
    if (ep->assignments != nullptr) ep->assignments->check();
  });
}
