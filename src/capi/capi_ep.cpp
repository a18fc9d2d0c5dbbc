// C interface: dispatch and combine across ranks.
#include "capi/capi_ep.hpp"
#include "comm/expert_parallel_check.hpp"
#include "comm/ranks/collectively.hpp"
#include "core/check.hpp"
#include "core/gpu/device_scope.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

namespace {

/// What this rank's capacity leaves of its assignments. Collective, as the dispatch that follows.
Matrix<const std::uint8_t> choose_kept(sy_ep_t& ep, const DispatchArgs& args) {
  return collectively(*ep.ranks, [&]() -> Matrix<const std::uint8_t> {
    const std::int64_t experts = ep.config.num_experts;
    ep.kept.resize(static_cast<std::size_t>(args.expert.size()));
    ep.counts.resize(static_cast<std::size_t>(2 * experts));
    const Matrix<std::uint8_t> kept{ep.kept.data(), args.expert.shape};
    apply_capacity({.assignments = DenseAssignments{.expert = args.expert, .weight = args.weight},
                    .num_experts = ep.config.num_experts,
                    .capacity = capacity_of(ep.capacity_factor, args.expert.shape[0],
                                            ep.config.top_k, experts),
                    .policy = ep.drop_policy,
                    .kept = flat(kept),
                    .counts = {ep.counts.data(), {experts}},
                    .counts_kept = {ep.counts.data() + experts, {experts}}});
    return {kept.data, kept.shape};
  });
}

/// What the handle works with from the start; without a device ranks only agree here.
void make_exchange(sy_ep_t& ep, std::int32_t device) {
  switch (ep.device_type) {
    case 0:
      require_same_config(*ep.ranks, ep.config);
      check_config(ep.config, ep.ranks->size());
      return;
    case SY_DEVICE_CPU:
      ep.exchange = std::make_unique<ExpertParallel>(*ep.ranks, ep.config);
      return;
    case SY_DEVICE_CUDA: {
      ep.device = device;
      const DeviceScope scope(device);
      capi::make_native(ep);
      return;
    }
    default:
      fail(ErrorCode::kInvalidArgument, "device_type={} is none of 0, 1 (CPU) and 2 (CUDA)",
           ep.device_type);
  }
}

sy_ep_config default_config() {
  return {.struct_size = sizeof(sy_ep_config),
          .num_experts = 0,
          .top_k = 0,
          .hidden = 0,
          .max_tokens = 0,
          .dtype = SY_F32,
          .dispatch_wire = -1,
          .combine_wire = SY_F32,
          .rank_invariant = 0,
          .max_recv_rows = 0,
          .capacity_factor = 0,
          .drop_policy = SY_DROP_TOKEN,
          .device_type = SY_DEVICE_CPU,
          .device_id = 0,
          .mode = SY_MODE_AUTO,
          .ctas = 0,
          .device_engine = SY_ENGINE_AUTO};
}

}  // namespace

TransportInput capi::exchange_input(sy_ep_t& ep, const sy_tensor* x, const sy_tensor* expert,
                                    const sy_tensor* weight, Backend backend) {
  const std::int64_t top_k = ep.config.top_k;
  const RawMatrix tokens = raw_matrix("x", x, kAny, ep.config.hidden, backend);
  if (backend == Backend::kCuda) ep.check_device({x, expert, weight});
  return {.x = tokens,
          .expert = matrix<std::int32_t>("expert", expert, tokens.rows, top_k, backend),
          .weight = matrix<float>("weight", weight, tokens.rows, top_k, backend)};
}

void sy_ep_config_init(sy_ep_config* config, size_t struct_size) {
  capi::give(config, default_config(), struct_size);
}

sy_status sy_ep_create(sy_communicator communicator, const sy_ep_config* config, sy_ep* ep) {
  return capi::guarded([&] {
    require(communicator != nullptr && ep != nullptr, "communicator or ep is NULL");
    const sy_ep_config given = capi::taken("config", config, default_config());
    const auto call = communicator->calls.begin();
    auto handle = std::make_unique<sy_ep_t>(*communicator);
    handle->config = {.num_experts = given.num_experts,
                      .top_k = given.top_k,
                      .hidden = given.hidden,
                      .max_tokens = given.max_tokens,
                      .dtype = capi::to_dtype("dtype", given.dtype),
                      .combine_wire = capi::to_dtype("combine_wire", given.combine_wire),
                      .rank_invariant = given.rank_invariant != 0,
                      .max_recv_rows = given.max_recv_rows};
    if (given.dispatch_wire != -1) {
      handle->config.dispatch_wire = capi::to_dtype("dispatch_wire", given.dispatch_wire);
    }
    handle->capacity_factor = given.capacity_factor;
    handle->drop_policy = capi::to_drop_policy(given.drop_policy);
    require(handle->drop_policy != DropPolicy::kReroute,
            "drop_policy=reroute: a layer's router reroutes, and the exchange is given a routing");
    const Communicator& ranks = *handle->ranks;
    require(given.ctas >= 0, "ctas={} is negative", given.ctas);
    handle->device_options.mode =
        capi::enumerator("mode", given.mode, "sy_exchange_mode", ExchangeMode::kLowLatency);
    handle->device_options.engine = capi::to_engine(given.device_engine);
    handle->device_options.ctas = given.ctas;
    handle->device_type = given.device_type;
    handle->dtype_code = given.dtype;
    handle->first_expert = first_expert_of(given.num_experts, ranks.size(), ranks.rank());
    handle->num_local =
        first_expert_of(given.num_experts, ranks.size(), ranks.rank() + 1) - handle->first_expert;
    make_exchange(*handle, given.device_id);
    *ep = handle.release();
  });
}

void sy_ep_free(sy_ep ep) {
  if (ep == nullptr || !ep->calls.may_free()) return;
  const DeviceScope scope(ep->device);
  delete ep;
}

sy_status sy_ep_dispatch(sy_ep ep, const sy_tensor* x, const sy_tensor* expert,
                         const sy_tensor* weight, sy_received* received, void* stream) {
  return capi::guarded([&] {
    require(ep != nullptr, "ep is NULL");
    const auto call = ep->calls.begin();
    capi::check_struct("received", received);
    const std::int64_t top_k = ep->config.top_k;
    const Backend backend = ep->backend_for("x", x);
    const TransportInput input = capi::exchange_input(*ep, x, expert, weight, backend);
    if (backend == Backend::kCuda) {
      sy_received rows = capi::device_dispatch(*ep, input, stream);
      ep->num_tokens = input.x.rows;
      rows.number = ++ep->dispatches;
      capi::give(received, rows, received->struct_size);
      return;
    }
    if (ep->exchange == nullptr) {
      ep->exchange = std::make_unique<ExpertParallel>(*ep->ranks, ep->config);
    }
    DispatchArgs args{.x = input.x, .expert = input.expert, .weight = input.weight};
    if (ep->capacity_factor > 0) args.kept = choose_kept(*ep, args);
    ep->received = ep->exchange->dispatch(args);
    ep->num_tokens = input.x.rows;
    ++ep->dispatches;
    const std::int64_t num_rows = ep->received.x.rows;
    const PlanView view = ep->plan().reserve(num_rows, top_k, ep->num_local,
                                             max_rows({}, num_rows, top_k, ep->num_local, 0));
    plan({.assignments =
              DenseAssignments{.expert = ep->received.expert, .weight = ep->received.weight},
          .first_expert = ep->first_expert,
          .plan = view});
    capi::give(received,
               sy_received{.struct_size = 0,
                           .x = ep->received.x.data,
                           .num_rows = num_rows,
                           .num_assignments = view.expert_begin[ep->num_local],
                           .num_local_experts = ep->num_local,
                           .expert_begin = view.expert_begin.data,
                           .row_x = view.row_token.data,
                           .row_weight = view.row_weight.data,
                           .dropped_rows = ep->received.dropped_rows,
                           .x_dtype = ep->dtype_code,
                           .num_scales = 0,
                           .scale = nullptr,
                           .rows_received = nullptr,
                           .rows_dropped = nullptr,
                           .number = ep->dispatches},
               received->struct_size);
  });
}

sy_status sy_ep_check_received(sy_ep ep, const sy_received* received) {
  return capi::guarded([&] {
    require(ep != nullptr, "ep is NULL");
    const auto call = ep->calls.begin();
    capi::check_struct("received", received);
    const std::uint64_t number = received->number;
    require(number >= 1 && number <= ep->dispatches, "received is of no dispatch of this ep");
    const std::uint64_t lasts = received->rows_received == nullptr ? 2 : 1;  // dispatches
    require(ep->dispatches < number + lasts,
            "received is stale: dispatch {} has written over that of dispatch {}", number + lasts,
            number);
  });
}

sy_status sy_ep_combine(sy_ep ep, const sy_tensor* rows, const sy_tensor* y, void* stream) {
  return capi::guarded([&] {
    require(ep != nullptr, "ep is NULL");
    const auto call = ep->calls.begin();
    if (ep->backend_for("rows", rows) == Backend::kCuda) {
      capi::device_combine(*ep, rows, y, stream);
      return;
    }
    require(ep->exchange != nullptr, "ep has dispatched nothing");
    const PlanView& view = ep->plan().view();
    const std::int64_t hidden = ep->config.hidden;
    const std::int64_t num_assignments = view.expert_begin[ep->num_local];
    const Subtree subtree = ep->exchange->subtree();
    const bool each_group = ep->config.rank_invariant;
    const DType wire =
        ep->config.combine_wire == DType::kF8E4M3 ? DType::kF32 : ep->config.combine_wire;
    const RawMatrix sums =
        ep->sums.matrix(wire, ep->received.x.rows * (each_group ? subtree.num_groups : 1), hidden);
    combine({.rows = capi::raw_matrix("rows", rows, num_assignments, hidden, Backend::kCpu),
             .plan = view,
             .first_expert = ep->first_expert,
             .reduced = {.sums = sums, .subtree = subtree, .each_group = each_group}});
    ep->exchange->combine(
        {.partials = sums, .out = capi::raw_matrix("y", y, ep->num_tokens, hidden, Backend::kCpu)});
  });
}
