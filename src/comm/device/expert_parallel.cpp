// The host's side of the exchange between GPUs: memory and kernels are made at creation, calls only
// fill in parameters and enqueue.
#include "switchyard/device_expert_parallel.hpp"

#include <algorithm>
#include <limits>

#include "comm/device/expert_parallel_state.hpp"
#include "comm/device/setup.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/stage_ranges.hpp"

namespace switchyard {
namespace {

constexpr std::int32_t kBeyond = std::numeric_limits<std::int32_t>::max();

}  // namespace

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
  const auto experts = static_cast<std::uint64_t>(config.num_experts);
  DeviceDispatchParams params{.exchange = state.params,
                              .x = args.x.data,
                              .expert = args.expert.data,
                              .weight = args.weight.data,
                              .kept = args.kept.data,
                              .copies = state.copies,
                              .lists = state.lists_of(lists),
                              .first_expert = {},
                              .inverse_experts = static_cast<std::uint32_t>(
                                  ((std::uint64_t{1} << 32) + experts - 1) / experts)};
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
