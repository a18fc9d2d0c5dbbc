// C interface: dispatch and combine across ranks.
#include "capi/capi_ep.hpp"
#include "comm/collectively.hpp"
#include "core/check.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

namespace {

/// What this rank's capacity leaves of its assignments. Collective, as the dispatch that follows.
Matrix<const std::uint8_t> choose_kept(sy_ep_t& ep, const DispatchArgs& args) {
  return collectively(*ep.ranks, [&]() -> Matrix<const std::uint8_t> {
    const std::int64_t experts = ep.config.num_experts;
    ep.kept.resize(static_cast<std::size_t>(args.expert.size()));
    ep.counts.resize(static_cast<std::size_t>(2 * experts));
    const Matrix<std::uint8_t> kept{ep.kept.data(), args.expert.shape};
    apply_capacity({.expert = args.expert,
                    .weight = args.weight,
                    .num_experts = ep.config.num_experts,
                    .capacity = capacity_of(ep.capacity_factor, args.expert.shape[0],
                                            ep.config.top_k, experts),
                    .policy = ep.drop_policy,
                    .kept = kept,
                    .counts = {ep.counts.data(), {experts}},
                    .counts_kept = {ep.counts.data() + experts, {experts}}});
    return {kept.data, kept.shape};
  });
}

}  // namespace

void sy_ep_config_init(sy_ep_config* config) {
  *config = {.num_experts = 0,
             .top_k = 0,
             .hidden = 0,
             .max_tokens = 0,
             .dtype = SY_F32,
             .dispatch_wire = -1,
             .combine_wire = SY_F32,
             .rank_invariant = 0,
             .max_recv_rows = 0,
             .capacity_factor = 0,
             .drop_policy = 0};
}

sy_status sy_ep_create(sy_communicator communicator, const sy_ep_config* config, sy_ep* ep) {
  return capi::guarded([&] {
    require(communicator != nullptr && config != nullptr && ep != nullptr,
            "communicator, config or ep is NULL");
    auto handle = std::make_unique<sy_ep_t>();
    handle->config = {.num_experts = config->num_experts,
                      .top_k = config->top_k,
                      .hidden = config->hidden,
                      .max_tokens = config->max_tokens,
                      .dtype = capi::to_dtype("dtype", config->dtype),
                      .combine_wire = capi::to_dtype("combine_wire", config->combine_wire),
                      .rank_invariant = config->rank_invariant != 0,
                      .max_recv_rows = config->max_recv_rows};
    if (config->dispatch_wire != -1) {
      handle->config.dispatch_wire = capi::to_dtype("dispatch_wire", config->dispatch_wire);
    }
    require(config->drop_policy >= 0 && config->drop_policy <= 3, "drop_policy={} is not in 0..3",
            config->drop_policy);
    handle->capacity_factor = config->capacity_factor;
    handle->drop_policy = static_cast<DropPolicy>(config->drop_policy);
    Communicator& ranks = *communicator->communicator;
    handle->ranks = &ranks;
    handle->exchange = std::make_unique<ExpertParallel>(ranks, handle->config);
    handle->first_expert = first_expert_of(config->num_experts, ranks.size(), ranks.rank());
    handle->num_local =
        first_expert_of(config->num_experts, ranks.size(), ranks.rank() + 1) - handle->first_expert;
    *ep = handle.release();
  });
}

void sy_ep_free(sy_ep ep) { delete ep; }

sy_status sy_ep_dispatch(sy_ep ep, const sy_tensor* x, const sy_tensor* expert,
                         const sy_tensor* weight, sy_received* received, void* stream) {
  return capi::guarded([&] {
    static_cast<void>(stream);  // the CPU has none
    require(ep != nullptr && received != nullptr, "ep or received is NULL");
    const std::int64_t top_k = ep->config.top_k;
    const RawMatrix tokens = capi::raw_matrix("x", x, capi::kAny, ep->config.hidden, Backend::kCpu);
    DispatchArgs args{
        .x = tokens,
        .expert = capi::matrix<std::int32_t>("expert", expert, tokens.rows, top_k, Backend::kCpu),
        .weight = capi::matrix<float>("weight", weight, tokens.rows, top_k, Backend::kCpu)};
    if (ep->capacity_factor > 0) args.kept = choose_kept(*ep, args);
    ep->received = ep->exchange->dispatch(args);
    ep->num_tokens = tokens.rows;
    const std::int64_t num_rows = ep->received.x.rows;
    const PlanView view = ep->plan.reserve(num_rows, top_k, ep->num_local,
                                           max_rows({}, num_rows, top_k, ep->num_local, 0));
    plan({.expert = ep->received.expert,
          .weight = ep->received.weight,
          .first_expert = ep->first_expert,
          .plan = view});
    *received = {.x = ep->received.x.data,
                 .num_rows = num_rows,
                 .num_assignments = view.expert_begin[ep->num_local],
                 .num_local_experts = ep->num_local,
                 .expert_begin = view.expert_begin.data,
                 .row_x = view.row_token.data,
                 .row_weight = view.row_weight.data,
                 .dropped_rows = ep->received.dropped_rows};
  });
}

sy_status sy_ep_combine(sy_ep ep, const sy_tensor* rows, const sy_tensor* y, void* stream) {
  return capi::guarded([&] {
    static_cast<void>(stream);  // the CPU has none
    require(ep != nullptr, "ep is NULL");
    const PlanView& view = ep->plan.view();
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
