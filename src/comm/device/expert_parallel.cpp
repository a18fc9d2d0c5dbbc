// The host's side of the exchange between GPUs: memory and kernels are made at creation, calls only
// fill in parameters and enqueue (expert_parallel_state.cpp).
#include "switchyard/device_dispatch.hpp"

#include <utility>

#include "comm/device/expert_parallel_state.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/device_wide.hpp"

namespace switchyard {
DeviceExpertParallel::DeviceExpertParallel(Communicator& communicator,
                                           const ExpertParallelConfig& config,
                                           const DeviceExchangeOptions& options)
    : state_(State::make(communicator, config, options, {})) {}
DeviceExpertParallel::DeviceExpertParallel(std::unique_ptr<State> state)
    : state_(std::move(state)) {}
DeviceExpertParallel::~DeviceExpertParallel() = default;
DeviceExpertParallel::DeviceExpertParallel(DeviceExpertParallel&&) noexcept = default;
DeviceExpertParallel& DeviceExpertParallel::operator=(DeviceExpertParallel&&) noexcept = default;

DeviceReceived DeviceExpertParallel::dispatch(const DispatchArgs& args) {
  return state_->dispatch(args, {}, nullptr);
}

void DeviceExpertParallel::combine(const ReturnArgs& args) { state_->combine_partials(args, {}); }

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
  const int own = state_->params.rank;
  if (seen.phase == DevicePhase::kForward) {
    fail(ErrorCode::kCommunication,
         "gradients of weights: rank {} goes back through forward {}, rank {} through {}",
         seen.rank, seen.seen, own, seen.expected);
  }
  if (seen.phase == DevicePhase::kParameters) {
    fail(ErrorCode::kCommunication,
         "gradients of weights: ranks {} and {} ask for gradients of different parameters ({:#x}, "
         "{:#x})",
         seen.rank, own, seen.seen, seen.expected);
  }
  constexpr const char* kNames[] = {"nothing",        "counts",  "rows",
                                    "results",        "weights", "parts of a sum over ranks",
                                    "sums over ranks"};
  const bool back = state_->params.layout.most_summed > 0;
  fail(ErrorCode::kTimeout, "{}{}: waiting for rank {}, expected {}, seen {}{}",
       back ? "on the way back, " : "", kNames[static_cast<std::size_t>(seen.phase)], seen.rank,
       seen.expected, seen.seen,
       seen.set == 2 ? "; left because another rank gave up"
                     : fmt::format(" after {} ms", state_->params.timeout_ns / 1000000));
}

void DeviceExpertParallel::recover() {
  State& state = *state_;
  SWITCHYARD_CUDA(cudaSetDevice(state.device));
  SWITCHYARD_CUDA(wait_for_device());  // this rank's kernels have left, or will in time
  state.communicator.recover();        // all ranks' have
  state.reset();
}

const Topology& DeviceExpertParallel::topology() const { return state_->topology; }

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
