// C interface: ranks, dispatch and combine.
#include "capi/capi.hpp"
#include "comm/launch.hpp"
#include "core/check.hpp"
#include "layer/buffers.hpp"
#include "switchyard/expert_parallel.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

struct sy_ep_t {
  ExpertParallelConfig config;
  std::unique_ptr<ExpertParallel> exchange;
  std::int32_t first_expert = 0;
  std::int32_t num_local = 0;
  std::int64_t num_tokens = 0;  // of the last dispatch
  Received received{};
  Plan plan;
  RawBuffer sums;
};

sy_status sy_communicator_from_environment(sy_communicator* communicator) {
  return capi::guarded([&] {
    require(communicator != nullptr, "communicator is NULL");
    auto rank = make_launched_rank();
    if (rank == nullptr) rank = make_single_rank();
    *communicator = new sy_communicator_t{std::move(rank)};
  });
}

sy_status sy_communicator_threads(int32_t num_ranks, sy_communicator* communicators) {
  return capi::guarded([&] {
    require(communicators != nullptr, "communicators is NULL");
    auto ranks = make_thread_ranks(num_ranks);
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      communicators[r] = new sy_communicator_t{std::move(ranks[r])};
    }
  });
}

void sy_communicator_free(sy_communicator communicator) { delete communicator; }

int32_t sy_communicator_rank(sy_communicator communicator) {
  return communicator == nullptr ? 0 : communicator->communicator->rank();
}

int32_t sy_communicator_size(sy_communicator communicator) {
  return communicator == nullptr ? 1 : communicator->communicator->size();
}

sy_status sy_communicator_set_timeout(sy_communicator communicator, int64_t milliseconds) {
  return capi::guarded([&] {
    require(communicator != nullptr, "communicator is NULL");
    require(milliseconds > 0, "a timeout of {} ms is not positive", milliseconds);
    communicator->communicator->set_timeout(std::chrono::milliseconds(milliseconds));
  });
}

sy_status sy_communicator_recover(sy_communicator communicator) {
  return capi::guarded([&] {
    require(communicator != nullptr, "communicator is NULL");
    communicator->communicator->recover();
  });
}

void sy_ep_config_init(sy_ep_config* config) {
  *config = {.num_experts = 0,
             .top_k = 0,
             .hidden = 0,
             .max_tokens = 0,
             .dtype = SY_F32,
             .dispatch_wire = -1,
             .combine_wire = SY_F32,
             .rank_invariant = 0,
             .max_recv_rows = 0};
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
    Communicator& ranks = *communicator->communicator;
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
    ep->received = ep->exchange->dispatch(
        {.x = tokens,
         .expert = capi::matrix<std::int32_t>("expert", expert, tokens.rows, top_k, Backend::kCpu),
         .weight = capi::matrix<float>("weight", weight, tokens.rows, top_k, Backend::kCpu)});
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
