// The host's side of the exchange between GPUs: memory and kernels are made at creation, calls only
// fill in parameters and enqueue.
#include "switchyard/device_expert_parallel.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <optional>

#include "combine/implementations.hpp"
#include "comm/device_exchange.hpp"
#include "comm/device_exchange_setup.hpp"
#include "comm/device_windows.hpp"
#include "comm/nccl_transfer.hpp"
#include "core/check.hpp"
#include "core/cuda_device.hpp"
#include "core/stage_ranges.hpp"

namespace switchyard {
namespace {

struct FreeDevice {
  void operator()(void* memory) const noexcept { cudaFree(memory); }
};
struct FreePinned {
  void operator()(void* memory) const noexcept { cudaFreeHost(memory); }
};

constexpr std::int32_t kBeyond = std::numeric_limits<std::int32_t>::max();

}  // namespace

struct DeviceExpertParallel::State {
  State(Communicator& comm, const ExpertParallelConfig& settings,
        const DeviceExchangeOptions& options, const DeviceSharing& sharing)
      : communicator(comm),
        config(settings),
        mode(mode_of(settings, options)),
        ctas(ctas_of(config, options, sharing)),
        device(options.device),
        ranks_on_device(sharing.here),
        alone(sharing.most == 1),
        copies(options.copies),
        subtree(subtree_of(settings, comm.rank(), comm.size())),
        recoveries(comm.recoveries()) {
    SWITCHYARD_CUDA(cudaSetDevice(device));
    params.layout = layout_of(config, options, comm.size());
    params.places = ExchangePlaces(params.layout);
    void* memory = nullptr;
    SWITCHYARD_CUDA(cudaMalloc(&memory, sizeof(DeviceExchangeState)));
    state.reset(memory);
    SWITCHYARD_CUDA(cudaMemset(memory, 0, sizeof(DeviceExchangeState)));
    SWITCHYARD_CUDA(
        cudaMalloc(&memory, static_cast<std::size_t>(config.max_tokens * comm.size() + 1) * 4));
    slots.reset(memory);
    SWITCHYARD_CUDA(cudaHostAlloc(&memory, sizeof(DeviceFailure), cudaHostAllocMapped));
    failure.reset(memory);
    *static_cast<DeviceFailure*>(memory) = {};
    params.state = static_cast<DeviceExchangeState*>(state.get());
    params.slot = static_cast<std::int32_t*>(slots.get());
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
      load_dispatch_kernels(params, config.dtype, ctas);
      load_combine_kernels(params.layout.combine_wire, num_parts());
    }
    if (can_pull()) load_pull_kernels(params.layout.combine_wire, num_parts());
    comm.barrier("device exchange");
  }

  void make_windows(const DeviceExchangeOptions& options) {
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
    }
    for (int rank = 0; rank < layout.num_ranks; ++rank) {
      params.window[rank] = transfer ? transfer->window() : windows->part(rank);
    }
  }

  ~State() {
    // Not for long: an object may also go because another rank's process has.
    const std::chrono::milliseconds limit = communicator.timeout();
    const auto end = std::min<std::chrono::milliseconds>(limit, std::chrono::seconds(5));
    if (windows) windows->end(end);
    communicator.set_timeout(end);
    transfer.reset();
    communicator.set_timeout(limit);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  [[nodiscard]] bool can_pull() const {
    return !transfer && params.bulk_copies != 0 && params.layout.combine_wire != DType::kF8E4M3;
  }
  /// Where sums lie that their readers fetch; null where they cannot.
  [[nodiscard]] std::byte* place_of_partials() const {
    return can_pull() ? params.window[params.rank] + params.layout.result(0) : nullptr;
  }

  [[nodiscard]] bool one_place() const { return params.layout.num_buffers == 1; }
  /// Low latency by kernels of its own: not where NCCL moves the rows.
  [[nodiscard]] bool by_few() const { return mode == ExchangeMode::kLowLatency && !transfer; }
  [[nodiscard]] int num_parts() const { return params.layout.num_ranks << params.group_bits; }
  [[nodiscard]] bool makes_lists() const {
    return by_few() && !config.rank_invariant && subtree.num_groups <= most_groups(num_parts());
  }

  /// No result has come to this rank.
  void forget_results() {
    const ExchangeLayout& layout = params.layout;
    SWITCHYARD_CUDA(cudaMemset(params.window[params.rank] + layout.result(0), 0xff,
                               static_cast<std::size_t>(layout.flags_begin() - layout.result(0))));
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
  }
  [[nodiscard]] ExchangeLaunch launch_on(void* stream) const {
    return {.ctas = ctas, .overlapped = alone, .stream = stream};
  }

  [[nodiscard]] DeviceRowLists lists_of(const DeviceExpertLists& lists) const {
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

  void combine(const ReturnArgs& args, const std::int32_t* partial_row,
               const DeviceExpertRows& expert) {
    const ExchangeLayout& layout = params.layout;
    require(is_aligned_16(args.partials.data) && is_aligned_16(args.shared.data) &&
                (args.out.rows == 0 || is_aligned_16(args.out.data)),
            "partials, shared or out are not aligned to 16 bytes");
    require(args.out.rows == params.num_tokens &&
                (args.out.rows == 0 || args.out.cols == layout.hidden),
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

  /// Collective, where no rank's kernels run any more: as after creation.
  void reset() {
    const ExchangeLayout& layout = params.layout;
    SWITCHYARD_CUDA(
        cudaMemset(params.window[params.rank] + layout.flags_begin(), 0,
                   static_cast<std::size_t>(layout.bytes_with_flags() - layout.flags_begin())));
    SWITCHYARD_CUDA(cudaMemset(state.get(), 0, sizeof(DeviceExchangeState)));
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
    if (by_few()) forget_results();
    *static_cast<DeviceFailure*>(failure.get()) = {};
    dispatches = 0;
    combine_owed = false;
    recoveries = communicator.recoveries();
    if (transfer) transfer->renew();
    communicator.barrier("recovered");
  }

  /// Collective: the communicator has recovered since the last call.
  void renew() {
    SWITCHYARD_CUDA(cudaSetDevice(device));
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
    communicator.barrier("no kernel runs any more");
    reset();
  }

  void enqueue(const DeviceDispatchParams& launch, void* stream) {
    if (transfer) return transfer->dispatch(launch, dispatches + 1, stream);
    if (by_few()) return launch_dispatch_low_latency(launch, config.dtype, launch_on(stream));
    launch_dispatch(launch, config.dtype, ctas, stream);
  }
  void enqueue(const DeviceCombineParams& launch, void* stream) {
    if (transfer) return transfer->combine(launch, stream);
    if (by_few()) return launch_combine_low_latency(launch, launch_on(stream));
    (pulled ? launch_pull : launch_combine)(launch, ctas, stream);
  }
  void check_engine() const {
    if (windows) windows->check();
    if (transfer) transfer->check();
  }

  Communicator& communicator;
  const ExpertParallelConfig config;
  const ExchangeMode mode;
  const int ctas;
  const int device;
  const int ranks_on_device;
  const bool alone;  // no two ranks share a device
  const int copies;
  const Subtree subtree;
  DeviceExchangeParams params{};
  std::optional<DeviceWindows> windows;
  std::optional<NcclTransfer> transfer;  // instead of windows
  std::unique_ptr<void, FreeDevice> state;
  std::unique_ptr<void, FreeDevice> slots;
  std::unique_ptr<void, FreePinned> failure;
  std::uint64_t dispatches = 0;  // enqueued: tells the buffer of the views
  bool combine_owed = false;
  bool pulled = false;       // the last combine
  std::uint64_t recoveries;  // of the communicator, that the memory has gone along with
};

DeviceExpertParallel::DeviceExpertParallel(Communicator& communicator,
                                           const ExpertParallelConfig& config,
                                           const DeviceExchangeOptions& options) {
  const DeviceSharing sharing = check_device_exchange(communicator, config, options);
  state_ = std::make_unique<State>(communicator, config, options, sharing);
}
DeviceExpertParallel::~DeviceExpertParallel() = default;
DeviceExpertParallel::DeviceExpertParallel(DeviceExpertParallel&&) noexcept = default;
DeviceExpertParallel& DeviceExpertParallel::operator=(DeviceExpertParallel&&) noexcept = default;

DeviceReceived DeviceExpertParallel::dispatch(const DispatchArgs& args,
                                              const DeviceExpertLists& lists) {
  State& state = *state_;
  if (state.recoveries != state.communicator.recoveries()) state.renew();
  const ExpertParallelConfig& config = state.config;
  const std::int64_t tokens = args.x.rows * state.copies;
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
  const bool in_turn = state.mode != ExchangeMode::kLowLatency && !state.one_place();
  require(in_turn || !state.combine_owed,
          "low latency, or one place: combine the last dispatch before the next one");
  state.params.num_tokens = tokens;
  const FlowRange range("dispatch");
  DeviceDispatchParams params{.exchange = state.params,
                              .x = args.x.data,
                              .expert = args.expert.data,
                              .weight = args.weight.data,
                              .kept = args.kept.data,
                              .copies = state.copies,
                              .lists = state.lists_of(lists),
                              .first_expert = {}};
  for (std::int32_t rank = 0; rank < kMaxDeviceRanks; ++rank) {
    params.first_expert[rank] =
        rank < state.params.layout.num_ranks
            ? first_expert_of(config.num_experts, state.params.layout.num_ranks, rank)
            : kBeyond;
  }
  state.enqueue(params, args.execution.stream);
  ++state.dispatches;
  state.combine_owed = true;
  const ExchangeLayout& layout = state.params.layout;
  const std::int64_t buffer = layout.buffer_in_turn(state.dispatches);
  const std::byte* own = state.params.window[state.params.rank];
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
      .num_rows = &state.params.state->num_rows,
      .dropped_rows = &state.params.state->dropped_rows,
      .counts = state.params.state->counts,
      .ready = reinterpret_cast<const std::uint64_t*>(at(layout.rows_flag(0, 0))),
      .chunks = state.params.chunks,
      .chunks_stride = ExchangeLayout::kRowChunks,
      .tokens_per_chunk = (config.max_tokens + state.params.chunks - 1) / state.params.chunks,
  };
}

void DeviceExpertParallel::combine(const ReturnArgs& args, Vector<const std::int32_t> partial_row) {
  State& state = *state_;
  const ExchangeLayout& layout = state.params.layout;
  const DType type = layout.combine_wire == DType::kF8E4M3 ? DType::kF32 : layout.combine_wire;
  require(state.combine_owed, "combine without a dispatch to return the rows of");
  const std::int64_t rows = layout.max_rows << state.params.group_bits;
  const bool placed = partial_row.data != nullptr;
  require(!placed || (partial_row.shape[0] == rows && state.params.group_bits == 0),
          "partial_row is [{}], want [{}] of one row a token", partial_row.shape[0], rows);
  require((placed || args.partials.rows == rows) && args.partials.cols == layout.hidden &&
              args.partials.dtype == type,
          "partials is [{}, {}] {}, want [{}, {}] {}", args.partials.rows, args.partials.cols,
          to_string(args.partials.dtype), rows, layout.hidden, to_string(type));
  state.pulled = !placed && state.can_pull() && args.partials.data == state.place_of_partials();
  state.combine(args, partial_row.data, {});
}

void DeviceExpertParallel::combine_rows(const ReturnArgs& args, const DeviceExpertLists& lists) {
  State& state = *state_;
  const ExchangeLayout& layout = state.params.layout;
  require(state.makes_lists(),
          "rows are summed on their way in low latency, without "
          "rank_invariant");
  require(state.combine_owed, "combine without a dispatch to return the rows of");
  require(args.partials.cols == layout.hidden, "rows have {} columns, want {}", args.partials.cols,
          layout.hidden);
  const Subtree& subtree = state.subtree;
  DeviceExpertRows expert{.rows = args.partials.data,
                          .assignment_row = state.lists_of(lists).assignment_row,
                          .dtype = args.partials.dtype,
                          .width = tree_width(subtree.num_groups),
                          .border = {}};
  for (std::int32_t g = 0; g < kMaxDeviceRanks; ++g) {
    expert.border[g] =
        g + 1 < subtree.num_groups ? subtree.order.begin(subtree.first_group + g + 1) : kBeyond;
  }
  state.combine(args, nullptr, expert);
}

bool DeviceExpertParallel::makes_lists() const { return state_->makes_lists(); }

void DeviceExpertParallel::check() const {
  const volatile auto* failure = static_cast<const DeviceFailure*>(state_->failure.get());
  // What was wrong before a recovery of the communicator is void.
  if (failure->set == 0 || state_->recoveries != state_->communicator.recoveries()) {
    state_->check_engine();
    return;
  }
  const DeviceFailure seen{failure->set, failure->phase, failure->rank, failure->expected,
                           failure->seen};
  if (seen.phase == DevicePhase::kExpertId) {
    fail(ErrorCode::kInvalidArgument, "token {} has expert {}, want -1 to {}", seen.expected,
         static_cast<std::int64_t>(seen.seen), state_->config.num_experts - 1);
  }
  constexpr const char* kNames[] = {"nothing", "counts", "rows", "results"};
  fail(ErrorCode::kTimeout, "{}: waiting for rank {}, expected {}, seen {}{}",
       kNames[static_cast<std::size_t>(seen.phase)], seen.rank, seen.expected, seen.seen,
       seen.set == 2 ? "; left because another rank gave up"
                     : fmt::format(" after {} ms", state_->params.timeout_ns / 1000000));
}

void DeviceExpertParallel::recover() {
  State& state = *state_;
  SWITCHYARD_CUDA(cudaSetDevice(state.device));
  SWITCHYARD_CUDA(cudaDeviceSynchronize());  // this rank's kernels have left, or will in time
  state.communicator.recover();              // all ranks' have
  state.reset();
}

RawMatrix DeviceExpertParallel::place_of_partials() const {
  const ExchangeLayout& layout = state_->params.layout;
  if (!state_->can_pull()) return {};
  return {state_->place_of_partials(), layout.combine_wire,
          layout.max_rows << state_->params.group_bits, layout.hidden};
}

Subtree DeviceExpertParallel::subtree() const { return state_->subtree; }

ExchangeMode DeviceExpertParallel::mode() const { return state_->mode; }

DeviceEngine DeviceExpertParallel::engine() const {
  return state_->transfer ? DeviceEngine::kNcclPairs : state_->windows->engine();
}

int DeviceExpertParallel::ctas() const { return state_->ctas; }

int DeviceExpertParallel::ranks_on_device() const { return state_->ranks_on_device; }

Traffic DeviceExpertParallel::traffic(const std::int64_t* counts) const {
  const ExchangeLayout& layout = state_->params.layout;
  const std::int64_t ranks = layout.num_ranks;
  // What travels of each pair beyond its rows.
  const bool padded = state_->transfer && state_->transfer->padded();
  const auto padding = [&](std::int64_t pair, std::int64_t rows) {
    return padded && pair / ranks != pair % ranks ? state_->config.max_tokens - rows : 0;
  };
  const std::int64_t chunks = state_->params.chunks;
  const LowLatencyBlocks blocks = low_latency_blocks(state_->ctas);
  const bool few = state_->by_few();
  // Flags of 8 bytes: with the counts, of each block for each chunk, and with what comes home.
  const std::int64_t flags_there =
      few ? blocks.planners + blocks.senders * chunks : 1 + state_->ctas * chunks;
  const std::int64_t flags_back = few || state_->pulled ? 1 : state_->ctas;
  const std::int64_t row_meta = 8 * std::int64_t{layout.top_k} + 4 * layout.row_scales();
  Traffic traffic;
  for (std::int64_t pair = 0; pair < ranks * ranks; ++pair) {
    const std::int64_t rows = counts[pair];
    traffic.rows.push_back(rows);
    traffic.payload_bytes.push_back(rows * layout.row_bytes());
    traffic.meta_bytes.push_back(layout.message_bytes() + 8 * flags_there + rows * row_meta +
                                 padding(pair, rows) * (layout.row_bytes() + row_meta));
  }
  for (std::int64_t pair = 0; pair < ranks * ranks; ++pair) {  // rows from s to d are those home
    const std::int64_t sent = counts[pair % ranks * ranks + pair / ranks];
    const std::int64_t rows = sent << state_->params.group_bits;
    const std::int64_t padded_rows = padding(pair, sent) << state_->params.group_bits;
    traffic.return_rows.push_back(rows);
    traffic.return_payload_bytes.push_back(rows * layout.result_bytes());
    traffic.return_meta_bytes.push_back(8 * flags_back + rows * 4 * layout.result_scales() +
                                        padded_rows *
                                            (layout.result_bytes() + 4 * layout.result_scales()));
  }
  return traffic;
}

}  // namespace switchyard
