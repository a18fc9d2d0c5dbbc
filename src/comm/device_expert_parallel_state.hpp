#pragma once

// What a rank of the exchange between GPUs holds: its memory, the way to the others' and how a
// direction is enqueued.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <optional>

#include "comm/device_exchange.hpp"
#include "comm/device_exchange_setup.hpp"
#include "comm/device_windows.hpp"
#include "comm/nccl_transfer.hpp"
#include "core/cuda_check.hpp"
#include "switchyard/device_expert_parallel.hpp"

namespace switchyard {

struct FreeDevice {
  void operator()(void* memory) const noexcept { cudaFree(memory); }
};
struct FreePinned {
  void operator()(void* memory) const noexcept { cudaFreeHost(memory); }
};

struct DeviceExpertParallel::State {
  State(Communicator& comm, const ExpertParallelConfig& settings,
        const DeviceExchangeOptions& options, const DeviceSharing& sharing)
      : communicator(comm),
        config(settings),
        mode(mode_of(settings, options)),
        ctas(ctas_of(options, sharing)),
        device(options.device),
        ranks_on_device(sharing.here),
        copies(options.copies),
        subtree(subtree_of(settings, comm.rank(), comm.size())),
        recoveries(comm.recoveries()) {
    SWITCHYARD_CUDA(cudaSetDevice(device));
    params.layout = layout_of(config, options, comm.size());
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
    make_windows(options);
    params.num_experts = config.num_experts;
    params.fixed_places = mode == ExchangeMode::kLowLatency ? 1 : 0;
    const auto groups = static_cast<unsigned>(groups_per_row(config, comm.size()));
    params.group_bits = std::countr_zero(groups);
    // 256 tokens a chunk: some 100 tiles of rows, and a handful of flags.
    params.chunks = static_cast<std::int32_t>(
        std::clamp<std::int64_t>(config.max_tokens / 256, 1, ExchangeLayout::kRowChunks));
    load_dispatch_kernels(config.dtype, params.layout.dispatch_wire, config.max_tokens, ctas);
    load_combine_kernels(params.layout.combine_wire, comm.size() << params.group_bits);
    comm.barrier("device exchange");
  }

  void make_windows(const DeviceExchangeOptions& options) {
    const ExchangeLayout& layout = params.layout;
    if (options.engine == DeviceEngine::kNcclPairs) {
      transfer.emplace(communicator, NcclTransferArgs{.layout = layout,
                                                      .max_tokens = config.max_tokens,
                                                      .timeout_ns = params.timeout_ns,
                                                      .padded = mode == ExchangeMode::kLowLatency});
      params.window[params.rank] = transfer->window();
      return;
    }
    windows.emplace(communicator, static_cast<std::size_t>(layout.bytes_with_flags()),
                    options.engine);
    for (int rank = 0; rank < layout.num_ranks; ++rank) params.window[rank] = windows->part(rank);
  }

  ~State() {
    cudaDeviceSynchronize();  // this rank's kernels have left, or will in time
    if (communicator.size() == 1) return;
    // Not for long: an object may also go because another rank's process has.
    const std::chrono::milliseconds limit = communicator.timeout();
    try {
      communicator.set_timeout(std::min<std::chrono::milliseconds>(limit, std::chrono::seconds(5)));
      communicator.barrier("end of a device exchange");
      communicator.set_timeout(limit);
    } catch (const std::exception&) {
      if (windows) windows->keep();  // another rank's kernels may still write here
      if (transfer) transfer->keep();
      communicator.set_timeout(limit);
    }
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  [[nodiscard]] bool one_place() const { return params.layout.num_buffers == 1; }

  /// Collective, where no rank's kernels run any more: as after creation.
  void reset() {
    const ExchangeLayout& layout = params.layout;
    SWITCHYARD_CUDA(
        cudaMemset(params.window[params.rank] + layout.flags_begin(), 0,
                   static_cast<std::size_t>(layout.bytes_with_flags() - layout.flags_begin())));
    SWITCHYARD_CUDA(cudaMemset(state.get(), 0, sizeof(DeviceExchangeState)));
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
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

  void enqueue(DeviceDispatchParams launch, void* stream) {
    if (!transfer) return launch_dispatch(launch, config.dtype, ctas, stream);
    launch.exchange = transfer->for_step(params, DeviceStep::kPack);
    launch_dispatch(launch, config.dtype, ctas, stream);
    transfer->send_rows(dispatches + 1, stream);
    launch.exchange = transfer->for_step(params, DeviceStep::kFinish);
    launch_dispatch(launch, config.dtype, ctas, stream);
  }
  void enqueue(DeviceCombineParams launch, void* stream) {
    if (!transfer) return launch_combine(launch, ctas, stream);
    launch.exchange = transfer->for_step(params, DeviceStep::kPack);
    launch_combine(launch, ctas, stream);
    transfer->send_results(stream);
    launch.exchange = transfer->for_step(params, DeviceStep::kFinish);
    launch_combine(launch, ctas, stream);
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
  std::uint64_t recoveries;  // of the communicator, that the memory has gone along with
};

}  // namespace switchyard
