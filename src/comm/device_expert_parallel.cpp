// The host's side of the exchange between GPUs: memory and kernels are made at creation, calls only
// fill in parameters and enqueue.
#include "switchyard/device_expert_parallel.hpp"

#include <cuda_runtime_api.h>

#include <optional>

#include "comm/agreement.hpp"
#include "comm/device_exchange.hpp"
#include "comm/device_windows.hpp"
#include "comm/expert_parallel_check.hpp"
#include "core/check.hpp"
#include "core/cuda_check.hpp"
#include "core/stage_ranges.hpp"

namespace switchyard {
namespace {

struct FreeDevice {
  void operator()(void* memory) const noexcept { cudaFree(memory); }
};
struct FreePinned {
  void operator()(void* memory) const noexcept { cudaFreeHost(memory); }
};

ExchangeMode mode_of(const ExpertParallelConfig& config, const DeviceExchangeOptions& options) {
  if (options.mode != ExchangeMode::kAuto) return options.mode;
  return config.max_tokens <= 512 ? ExchangeMode::kLowLatency : ExchangeMode::kThroughput;
}

int ctas_of(const DeviceExchangeOptions& options) {
  if (options.ctas != 0) return options.ctas;
  return 64;  // of 8 to 128 the fastest pair, or within 5% of it, at 8 to 4096 tokens on 4 H200s
}

ExchangeLayout layout_of(const ExpertParallelConfig& config, int num_ranks, ExchangeMode mode) {
  const std::int64_t all = num_ranks * config.max_tokens;
  const bool bounded = mode == ExchangeMode::kThroughput && config.max_recv_rows > 0;
  return {.num_ranks = num_ranks,
          .top_k = config.top_k,
          .hidden = config.hidden,
          .max_rows = bounded ? std::min(all, config.max_recv_rows) : all,
          .max_results = all,  // fixed places: rank r's row j for this rank is r * max_tokens + j
          .dispatch_wire = dispatch_wire_of(config),
          .combine_wire = config.combine_wire};
}

void check_options(Communicator& communicator, const ExpertParallelConfig& config,
                   const DeviceExchangeOptions& options) {
  require_same_config(communicator, config);
  const ExchangeMode mode = mode_of(config, options);
  const AgreedValue values[] = {{"mode", static_cast<std::int64_t>(mode)},
                                {"ctas", ctas_of(options)}};
  require_agreement(communicator, values);
  check_config(config, communicator.size());
  const auto supported = [](bool holds, const std::string& why) {
    if (!holds) fail(ErrorCode::kUnsupported, "the exchange between GPUs: {}", why);
  };
  supported(communicator.size() <= kMaxDeviceRanks,
            fmt::format("{} ranks, at most {}", communicator.size(), kMaxDeviceRanks));
  supported(config.num_experts <= kMaxDeviceExperts,
            fmt::format("{} experts, at most {}", config.num_experts, kMaxDeviceExperts));
  supported(config.hidden % 8 == 0, fmt::format("hidden={} is no multiple of 8", config.hidden));
  supported(config.max_tokens <= 16384,
            fmt::format("max_tokens={}, at most 16384", config.max_tokens));
  const Subtree subtree =
      subtree_of_rank({config.num_experts, config.reduction_groups}, 0, communicator.size());
  supported(!config.rank_invariant || subtree.num_groups == 1,
            "rank_invariant with several groups on a rank");
  const int ctas = ctas_of(options);
  require(ctas >= 1 && ctas <= 128, "ctas={}, want 1 to 128", ctas);
}

}  // namespace

struct DeviceExpertParallel::State {
  State(Communicator& comm, const ExpertParallelConfig& settings,
        const DeviceExchangeOptions& options)
      : communicator(comm),
        config(settings),
        mode(mode_of(settings, options)),
        ctas(ctas_of(options)),
        device(options.device),
        subtree(subtree_of_rank({settings.num_experts, settings.reduction_groups}, comm.rank(),
                                comm.size())) {
    SWITCHYARD_CUDA(cudaSetDevice(device));
    params.layout = layout_of(config, comm.size(), mode);
    windows.emplace(comm, static_cast<std::size_t>(params.layout.bytes_with_flags()));
    for (int rank = 0; rank < comm.size(); ++rank) params.window[rank] = windows->part(rank);
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
    // 256 tokens a chunk: some 100 tiles of rows, and a handful of flags.
    params.chunks = static_cast<std::int32_t>(
        std::clamp<std::int64_t>(config.max_tokens / 256, 1, ExchangeLayout::kRowChunks));
    load_dispatch_kernels(config.dtype, params.layout.dispatch_wire, config.max_tokens, ctas);
    load_combine_kernels(params.layout.combine_wire, comm.size());
    comm.barrier("device exchange");
  }

  Communicator& communicator;
  const ExpertParallelConfig config;
  const ExchangeMode mode;
  const int ctas;
  const int device;
  const Subtree subtree;
  DeviceExchangeParams params{};
  std::optional<DeviceWindows> windows;
  std::unique_ptr<void, FreeDevice> state;
  std::unique_ptr<void, FreeDevice> slots;
  std::unique_ptr<void, FreePinned> failure;
  std::uint64_t dispatches = 0;  // enqueued: tells the buffer of the views
  bool combine_owed = false;
};

DeviceExpertParallel::DeviceExpertParallel(Communicator& communicator,
                                           const ExpertParallelConfig& config,
                                           const DeviceExchangeOptions& options) {
  check_options(communicator, config, options);
  state_ = std::make_unique<State>(communicator, config, options);
}
DeviceExpertParallel::~DeviceExpertParallel() = default;
DeviceExpertParallel::DeviceExpertParallel(DeviceExpertParallel&&) noexcept = default;
DeviceExpertParallel& DeviceExpertParallel::operator=(DeviceExpertParallel&&) noexcept = default;

DeviceReceived DeviceExpertParallel::dispatch(const DispatchArgs& args) {
  State& state = *state_;
  const ExpertParallelConfig& config = state.config;
  const std::int64_t tokens = args.x.rows;
  require(tokens <= config.max_tokens, "{} tokens exceed max_tokens={}", tokens, config.max_tokens);
  require(tokens == 0 || (args.x.cols == config.hidden && args.x.dtype == config.dtype),
          "x is [{}, {}] {}, want [T, {}] {}", tokens, args.x.cols, to_string(args.x.dtype),
          config.hidden, to_string(config.dtype));
  require(tokens == 0 || (args.expert.shape[0] == tokens && args.expert.shape[1] == config.top_k &&
                          args.weight.shape == args.expert.shape &&
                          (args.kept.data == nullptr || args.kept.shape == args.expert.shape)),
          "expert is [{}, {}], want [{}, {}], and weight and kept the same", args.expert.shape[0],
          args.expert.shape[1], tokens, config.top_k);
  require(state.mode != ExchangeMode::kLowLatency || !state.combine_owed,
          "low latency: combine the last dispatch before the next one");
  state.params.num_tokens = tokens;
  const FlowRange range("dispatch");
  launch_dispatch({.exchange = state.params,
                   .x = args.x.data,
                   .expert = args.expert.data,
                   .weight = args.weight.data,
                   .kept = args.kept.data},
                  config.dtype, state.ctas, args.execution.stream);
  ++state.dispatches;
  state.combine_owed = true;
  const ExchangeLayout& layout = state.params.layout;
  const std::int64_t buffer = ExchangeLayout::buffer_of(state.dispatches);
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
      .ready = reinterpret_cast<const std::uint64_t*>(at(layout.rows_flag(0, 0))),
      .chunks = state.params.chunks,
      .chunks_stride = ExchangeLayout::kRowChunks,
      .tokens_per_chunk = (config.max_tokens + state.params.chunks - 1) / state.params.chunks,
  };
}

void DeviceExpertParallel::combine(const ReturnArgs& args) {
  State& state = *state_;
  const ExchangeLayout& layout = state.params.layout;
  const DType type = layout.combine_wire == DType::kF8E4M3 ? DType::kF32 : layout.combine_wire;
  require(state.combine_owed, "combine without a dispatch to return the rows of");
  require(args.partials.rows == layout.max_rows && args.partials.cols == layout.hidden &&
              args.partials.dtype == type,
          "partials is [{}, {}] {}, want [{}, {}] {}", args.partials.rows, args.partials.cols,
          to_string(args.partials.dtype), layout.max_rows, layout.hidden, to_string(type));
  require(args.out.rows == state.params.num_tokens &&
              (args.out.rows == 0 || args.out.cols == layout.hidden),
          "out is [{}, {}], want [{}, {}]", args.out.rows, args.out.cols, state.params.num_tokens,
          layout.hidden);
  const FlowRange range("combine");
  launch_combine({.exchange = state.params,
                  .partials = args.partials.data,
                  .shared = args.shared.data,
                  .out = args.out.data,
                  .out_type = args.out.dtype},
                 state.ctas, args.execution.stream);
  state.combine_owed = false;
}

void DeviceExpertParallel::check() const {
  const volatile auto* failure = static_cast<const DeviceFailure*>(state_->failure.get());
  if (failure->set == 0) return;
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
  const ExchangeLayout& layout = state.params.layout;
  SWITCHYARD_CUDA(
      cudaMemset(state.params.window[state.params.rank] + layout.flags_begin(), 0,
                 static_cast<std::size_t>(layout.bytes_with_flags() - layout.flags_begin())));
  SWITCHYARD_CUDA(cudaMemset(state.state.get(), 0, sizeof(DeviceExchangeState)));
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  *static_cast<DeviceFailure*>(state.failure.get()) = {};
  state.dispatches = 0;
  state.combine_owed = false;
  state.communicator.barrier("recovered");
}

Subtree DeviceExpertParallel::subtree() const { return state_->subtree; }

ExchangeMode DeviceExpertParallel::mode() const { return state_->mode; }

}  // namespace switchyard
