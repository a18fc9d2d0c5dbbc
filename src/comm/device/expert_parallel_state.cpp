// What an exchange between GPUs has from its creation on: windows, counters, kernels; and how its
// calls become launches.
#include "comm/device/expert_parallel_state.hpp"

#include <algorithm>
#include <bit>
#include <limits>

#include "comm/device/setup.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/device_wide.hpp"
#include "core/gpu/stage_ranges.hpp"
#include "core/tree_width.hpp"

namespace switchyard {
namespace {

constexpr std::int32_t kBeyond = std::numeric_limits<std::int32_t>::max();

}  // namespace

std::unique_ptr<DeviceExpertParallel::State> DeviceExpertParallel::State::make(
    Communicator& communicator, const ExpertParallelConfig& config,
    const DeviceExchangeOptions& options, const DeviceExchangeExtent& extent) {
  const DeviceSharing sharing = check_device_exchange(communicator, config, options, extent);
  return std::make_unique<State>(communicator, config, options, sharing, extent);
}

DeviceExpertParallel::State::State(Communicator& comm, const ExpertParallelConfig& settings,
                                   const DeviceExchangeOptions& options,
                                   const DeviceSharing& sharing, const DeviceExchangeExtent& extent)
    : communicator(comm),
      topology(comm.topology()),
      config(settings),
      mode(mode_of(settings, options)),
      ctas(ctas_of(config, options, sharing)),
      ctas_chosen(options.ctas != 0 || sharing.most > 1),
      device(options.device),
      ranks_on_device(sharing.here),
      alone(sharing.most == 1),
      copies(extent.copies),
      subtree(subtree_of(settings, comm.rank(), comm.size())),
      recoveries(comm.recoveries()) {
  SWITCHYARD_CUDA(cudaSetDevice(device));
  params.layout = layout_of(config, options, comm.size());
  params.layout.most_summed = extent.most_summed;
  params.places = ExchangePlaces(params.layout);
  state = DeviceMemory(std::int64_t{sizeof(DeviceExchangeState)});
  SWITCHYARD_CUDA(cudaMemset(state.data(), 0, sizeof(DeviceExchangeState)));
  slots = DeviceMemory((config.max_tokens * comm.size() + 1) * 4);
  void* memory = nullptr;
  SWITCHYARD_CUDA(cudaHostAlloc(&memory, sizeof(DeviceFailure), cudaHostAllocMapped));
  failure.reset(memory);
  *static_cast<DeviceFailure*>(memory) = {};
  params.state = reinterpret_cast<DeviceExchangeState*>(state.data());
  params.slot = reinterpret_cast<std::int32_t*>(slots.data());
  params.failure = static_cast<DeviceFailure*>(failure.get());
  params.timeout_ns = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(options.timeout).count());
  params.max_tokens = config.max_tokens;
  params.rank = comm.rank();
  params.num_experts = config.num_experts;
  params.fixed_places = mode == ExchangeMode::kLowLatency ? 1 : 0;
  params.bulk_copies = sharing.bulk_copies && mode == ExchangeMode::kThroughput ? 1 : 0;
  const auto groups = static_cast<unsigned>(groups_per_row(config, comm.size()));
  params.group_bits = std::countr_zero(groups);
  // 256 tokens a chunk: some 100 tiles of rows, and a handful of flags.
  params.chunks = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(config.max_tokens / 256, 1, ExchangeLayout::kRowChunks));
  make_windows(options);
  if (by_few()) {
    load_dispatch_low_latency_kernels(config.dtype, params.layout.dispatch_wire);
    load_combine_low_latency_kernels(params.layout.combine_wire, num_parts());
    forget_results();
  } else {
    load_dispatch_kernels(params, config.dtype);
    load_combine_kernels(params.layout.combine_wire, num_parts());
  }
  if (can_pull()) load_pull_kernels(params.layout.combine_wire, num_parts());
  if (extent.most_summed > 0) {
    load_weights_home_kernel();
    load_sum_kernel(comm.size());
  }
  comm.barrier("device exchange");
}

void DeviceExpertParallel::State::make_windows(const DeviceExchangeOptions& options) {
  const ExchangeLayout& layout = params.layout;
  if (by_pairs(options, layout.num_ranks)) {
    transfer.emplace(communicator, NcclTransferArgs{.layout = layout,
                                                    .max_tokens = config.max_tokens,
                                                    .groups = 1 << params.group_bits,
                                                    .dtype = config.dtype,
                                                    .ctas = ctas,
                                                    .timeout_ns = params.timeout_ns,
                                                    .padded = mode == ExchangeMode::kLowLatency});
  } else {
    windows.emplace(communicator, static_cast<std::size_t>(layout.bytes_with_flags()),
                    options.engine);
    std::ranges::fill(topology.domain, 0);
  }
  for (int rank = 0; rank < layout.num_ranks; ++rank) {
    params.window[rank] = transfer ? transfer->window() : windows->part(rank);
  }
}

DeviceExpertParallel::State::~State() {
  // Not for long: an object may also go because another rank's process has.
  const std::chrono::milliseconds limit = communicator.timeout();
  const auto end = std::min<std::chrono::milliseconds>(limit, std::chrono::seconds(5));
  if (windows) windows->end(end);
  communicator.set_timeout(end);
  transfer.reset();
  communicator.set_timeout(limit);
}

void DeviceExpertParallel::State::forget_results() {
  const ExchangeLayout& layout = params.layout;
  SWITCHYARD_CUDA(cudaMemset(params.window[params.rank] + layout.result(0), 0xff,
                             static_cast<std::size_t>(layout.flags_begin() - layout.result(0))));
  SWITCHYARD_CUDA(wait_for_device());
}

DeviceRowLists DeviceExpertParallel::State::lists_of(const DeviceExpertLists& lists) const {
  const PlanView& plan = lists.plan;
  if (plan.expert_begin.data == nullptr) return {};
  require(makes_lists(), "lists are made in low latency, without rank_invariant");
  const std::int64_t experts = plan.num_experts;
  const std::int64_t rows = params.layout.max_rows;
  require(plan.expert_begin.shape[0] == experts + 1 && plan.expert_rows.shape[0] == experts &&
              plan.row_token.shape[0] >= rows * std::min<std::int64_t>(config.top_k, experts) &&
              plan.row_weight.shape[0] >= rows * std::min<std::int64_t>(config.top_k, experts) &&
              lists.assignment_row.shape[0] == rows * config.top_k,
          "the lists of {} experts are too short for {} rows", experts, rows);
  const std::int32_t first =
      first_expert_of(config.num_experts, params.layout.num_ranks, params.rank);
  return {.expert_begin = plan.expert_begin.data,
          .expert_rows = plan.expert_rows.data,
          .row_x = plan.row_token.data,
          .row_weight = plan.row_weight.data,
          .assignment_row = lists.assignment_row.data,
          .first_expert = first,
          .num_experts = plan.num_experts,
          .room = 0};
}

void DeviceExpertParallel::State::set_first_experts(std::int32_t (&first)[kMaxDeviceRanks]) const {
  for (std::int32_t rank = 0; rank < kMaxDeviceRanks; ++rank) {
    first[rank] = rank < params.layout.num_ranks
                      ? first_expert_of(config.num_experts, params.layout.num_ranks, rank)
                      : kBeyond;
  }
}

DeviceReceived DeviceExpertParallel::State::dispatch(const DispatchArgs& args,
                                                     const DeviceExpertLists& lists,
                                                     const std::int64_t* counts) {
  if (recoveries != communicator.recoveries()) renew();
  const std::int64_t tokens = args.x.rows * copies;
  require(tokens <= config.max_tokens, "{} tokens exceed max_tokens={}", tokens, config.max_tokens);
  require(tokens == 0 || (args.x.cols == config.hidden && args.x.dtype == config.dtype),
          "x is [{}, {}] {}, want [T, {}] {}", tokens, args.x.cols, to_string(args.x.dtype),
          config.hidden, to_string(config.dtype));
  require(tokens == 0 || is_aligned_16(args.x.data), "x is not aligned to 16 bytes");
  require(tokens == 0 || (args.expert.shape[0] == tokens && args.expert.shape[1] == config.top_k &&
                          args.weight.shape == args.expert.shape &&
                          (args.kept.data == nullptr || args.kept.shape == args.expert.shape)),
          "expert is [{}, {}], want [{}, {}], and weight and kept the same", args.expert.shape[0],
          args.expert.shape[1], tokens, config.top_k);
  const bool in_turn = mode != ExchangeMode::kLowLatency && !one_place();
  require(in_turn || !combine_owed,
          "low latency, or one place: combine the last dispatch before the next one");
  params.num_tokens = tokens;
  const FlowRange range("dispatch");
  const auto experts = static_cast<std::uint64_t>(config.num_experts);
  DeviceDispatchParams launch{.exchange = params,
                              .x = args.x.data,
                              .expert = args.expert.data,
                              .weight = args.weight.data,
                              .kept = args.kept.data,
                              .copies = copies,
                              .counts = counts,
                              .lists = lists_of(lists),
                              .first_expert = {},
                              .inverse_experts = static_cast<std::uint32_t>(
                                  ((std::uint64_t{1} << 32) + experts - 1) / experts)};
  set_first_experts(launch.first_expert);
  enqueue(launch, args.execution.stream);
  ++dispatches;
  combine_owed = true;
  weights_owed = params.layout.most_summed > 0;
  const ExchangeLayout& layout = params.layout;
  const std::int64_t buffer = layout.buffer_in_turn(dispatches);
  const std::byte* own = params.window[params.rank];
  const std::int64_t rows = layout.max_rows;
  const auto at = [&](std::int64_t offset) { return own + offset; };
  return {
      .x = {at(layout.row(buffer, 0)), layout.dispatch_wire, rows, config.hidden},
      .scale = {reinterpret_cast<const float*>(at(layout.scales(buffer, 0))),
                {rows, layout.row_scales()}},
      .expert = {reinterpret_cast<const std::int32_t*>(at(layout.ids(buffer, 0))),
                 {rows, config.top_k}},
      .weight = {reinterpret_cast<const float*>(at(layout.weights(buffer, 0))),
                 {rows, config.top_k}},
      .num_rows = &params.state->num_rows,
      .dropped_rows = &params.state->dropped_rows,
      .counts = params.state->counts,
  };
}

void DeviceExpertParallel::State::combine_partials(const ReturnArgs& args,
                                                   Vector<const std::int32_t> partial_row) {
  const ExchangeLayout& layout = params.layout;
  const DType type = layout.combine_wire == DType::kF8E4M3 ? DType::kF32 : layout.combine_wire;
  require(combine_owed, "combine without a dispatch to return the rows of");
  const std::int64_t rows = layout.max_rows << params.group_bits;
  const bool placed = partial_row.data != nullptr;
  require(!placed || (partial_row.shape[0] == rows && params.group_bits == 0),
          "partial_row is [{}], want [{}] of one row a token", partial_row.shape[0], rows);
  require((placed || args.partials.rows == rows) && args.partials.cols == layout.hidden &&
              args.partials.dtype == type,
          "partials is [{}, {}] {}, want [{}, {}] {}", args.partials.rows, args.partials.cols,
          to_string(args.partials.dtype), rows, layout.hidden, to_string(type));
  pulled = !placed && can_pull() && args.partials.data == place_of_partials();
  combine(args, partial_row.data, {});
}

void DeviceExpertParallel::State::combine_rows(const ReturnArgs& args,
                                               const DeviceExpertLists& lists) {
  const ExchangeLayout& layout = params.layout;
  require(makes_lists(),
          "rows are summed on their way in low latency, without "
          "rank_invariant");
  require(combine_owed, "combine without a dispatch to return the rows of");
  require(args.partials.cols == layout.hidden, "rows have {} columns, want {}", args.partials.cols,
          layout.hidden);
  DeviceExpertRows expert{.rows = args.partials.data,
                          .assignment_row = lists_of(lists).assignment_row,
                          .dtype = args.partials.dtype,
                          .width = tree_width(subtree.num_groups),
                          .border = {}};
  for (std::int32_t g = 0; g < kMaxDeviceRanks; ++g) {
    expert.border[g] =
        g + 1 < subtree.num_groups ? subtree.order.begin(subtree.first_group + g + 1) : kBeyond;
  }
  combine(args, nullptr, expert);
}

void DeviceExpertParallel::State::bring_weights_home(const WeightGradientsArgs& args) {
  require(weights_owed, "gradients of weights without a dispatch to return them of");
  require(params.num_tokens == 0 ||
              (args.expert.shape[0] == params.num_tokens && args.expert.shape[1] == config.top_k &&
               (args.dweight.data == nullptr || args.dweight.shape == args.expert.shape)),
          "expert is [{}, {}], want [{}, {}], and dweight the same", args.expert.shape[0],
          args.expert.shape[1], params.num_tokens, config.top_k);
  const FlowRange range("weights home");
  DeviceWeightsParams launch{.exchange = params,
                             .expert = args.expert.data,
                             .kept = args.kept.data,
                             .dweight = args.dweight.data,
                             .forward = args.forward,
                             .parameters = args.parameters,
                             .first_expert = {}};
  set_first_experts(launch.first_expert);
  launch_weights_home(launch, ctas, args.execution.stream);
  weights_owed = false;
}

void DeviceExpertParallel::State::sum_over_ranks(std::int64_t count, const Execution& execution) {
  require(count <= params.layout.most_summed, "a sum of {} values, there is room for {}", count,
          params.layout.most_summed);
  if (recoveries != communicator.recoveries()) renew();
  const FlowRange range("sum over ranks");
  launch_sum_over_ranks({.exchange = params, .count = count}, ctas, execution.stream);
}

void DeviceExpertParallel::State::combine(const ReturnArgs& args, const std::int32_t* partial_row,
                                          const DeviceExpertRows& expert) {
  const ExchangeLayout& layout = params.layout;
  require(!weights_owed, "gradients of weights come home before those of rows");
  require(is_aligned_16(args.partials.data) && is_aligned_16(args.shared.data) &&
              (args.out.rows == 0 || is_aligned_16(args.out.data)),
          "partials, shared or out are not aligned to 16 bytes");
  require(
      args.out.rows == params.num_tokens && (args.out.rows == 0 || args.out.cols == layout.hidden),
      "out is [{}, {}], want [{}, {}]", args.out.rows, args.out.cols, params.num_tokens,
      layout.hidden);
  const FlowRange range("combine");
  const DeviceCombineParams all{.exchange = params,
                                .partials = args.partials.data,
                                .partial_row = partial_row,
                                .shared = args.shared.data,
                                .out = args.out.data,
                                .out_type = args.out.dtype,
                                .expert = expert};
  enqueue(all, args.execution.stream);
  combine_owed = false;
}

void DeviceExpertParallel::State::reset() {
  const ExchangeLayout& layout = params.layout;
  SWITCHYARD_CUDA(
      cudaMemset(params.window[params.rank] + layout.flags_begin(), 0,
                 static_cast<std::size_t>(layout.bytes_with_flags() - layout.flags_begin())));
  SWITCHYARD_CUDA(cudaMemset(state.data(), 0, sizeof(DeviceExchangeState)));
  SWITCHYARD_CUDA(wait_for_device());
  if (by_few()) forget_results();
  *static_cast<DeviceFailure*>(failure.get()) = {};
  dispatches = 0;
  combine_owed = weights_owed = false;
  recoveries = communicator.recoveries();
  if (transfer) transfer->renew();
  communicator.barrier("recovered");
}

void DeviceExpertParallel::State::renew() {
  SWITCHYARD_CUDA(cudaSetDevice(device));
  SWITCHYARD_CUDA(wait_for_device());
  communicator.barrier("no kernel runs any more");
  reset();
}

void DeviceExpertParallel::State::enqueue(const DeviceDispatchParams& launch, void* stream) {
  if (transfer) return transfer->dispatch(launch, dispatches + 1, stream);
  if (by_few()) return launch_dispatch_low_latency(launch, config.dtype, launch_on(stream));
  launch_dispatch(launch, config.dtype, ctas, stream);
}

void DeviceExpertParallel::State::enqueue(const DeviceCombineParams& launch, void* stream) {
  if (transfer) return transfer->combine(launch, stream);
  if (by_few()) return launch_combine_low_latency(launch, launch_on(stream));
  if (!pulled) return launch_combine(launch, ctas, stream);
  const int blocks =
      ctas_chosen ? ctas : pull_blocks(params.num_tokens, params.layout.hidden, ctas);
  launch_pull(launch, blocks, stream);
}

void DeviceExpertParallel::State::check_engine() const {
  if (windows) windows->check();
  if (transfer) transfer->check();
}

}  // namespace switchyard
