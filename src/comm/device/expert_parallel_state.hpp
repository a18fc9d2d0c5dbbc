#pragma once

// What an exchange between GPUs has from its creation on; calls fill in parameters and enqueue.

#include <cuda_runtime_api.h>

#include <limits>
#include <memory>
#include <optional>

#include "comm/device/device_exchange.hpp"
#include "comm/device/exchange.hpp"
#include "comm/device/windows/sharing.hpp"
#include "comm/device/windows/windows.hpp"
#include "comm/nccl/pairs/transfer.hpp"
#include "core/gpu/device_buffer.hpp"

namespace switchyard {

struct DeviceExpertParallel::State {
  /// Collective. @throws As the constructor of DeviceExpertParallel.
  static std::unique_ptr<State> make(Communicator& communicator, const ExpertParallelConfig& config,
                                     const DeviceExchangeOptions& options,
                                     const DeviceExchangeExtent& extent);
  State(Communicator& comm, const ExpertParallelConfig& settings,
        const DeviceExchangeOptions& options, const DeviceSharing& sharing,
        const DeviceExchangeExtent& extent);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void make_windows(const DeviceExchangeOptions& options);
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
  void forget_results();
  [[nodiscard]] ExchangeLaunch launch_on(void* stream) const {
    return {.ctas = ctas, .overlapped = alone, .stream = stream};
  }
  /// Of each rank, as kernels find an expert's owner.
  void set_first_experts(std::int32_t (&first)[kMaxDeviceRanks]) const;
  [[nodiscard]] DeviceRowLists lists_of(const DeviceExpertLists& lists) const;

  // As DeviceExchange.
  DeviceReceived dispatch(const DispatchArgs& args, const DeviceExpertLists& lists,
                          const std::int64_t* counts);
  void combine_partials(const ReturnArgs& args, Vector<const std::int32_t> partial_row);
  void combine_rows(const ReturnArgs& args, const DeviceExpertLists& lists);
  void bring_weights_home(const WeightGradientsArgs& args);
  void sum_over_ranks(std::int64_t count, const Execution& execution);
  void combine(const ReturnArgs& args, const std::int32_t* partial_row,
               const DeviceExpertRows& expert);
  /// Collective, where no rank's kernels run any more: as after creation.
  void reset();
  /// Collective: the communicator has recovered since the last call.
  void renew();
  void enqueue(const DeviceDispatchParams& launch, void* stream);
  void enqueue(const DeviceCombineParams& launch, void* stream);
  void check_engine() const;

  struct FreePinned {
    void operator()(void* memory) const noexcept { cudaFreeHost(memory); }
  };

  Communicator& communicator;
  Topology topology;
  const ExpertParallelConfig config;
  const ExchangeMode mode;
  const int ctas;
  const bool ctas_chosen;  // by the caller, or by ranks that share a device
  const int device;
  const int ranks_on_device;
  const bool alone;  // no two ranks share a device
  const int copies;
  const Subtree subtree;
  DeviceExchangeParams params{};
  std::optional<DeviceWindows> windows;
  std::optional<NcclTransfer> transfer;  // instead of windows
  DeviceMemory state;
  DeviceMemory slots;
  std::unique_ptr<void, FreePinned> failure;
  std::uint64_t dispatches = 0;  // enqueued: tells the buffer of the views
  bool combine_owed = false;
  bool weights_owed = false;  // of a way back
  bool pulled = false;        // the last combine
  std::uint64_t recoveries;   // of the communicator, that the memory has gone along with
};

}  // namespace switchyard
