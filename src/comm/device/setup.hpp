#pragma once

#include "comm/device/device_exchange.hpp"
#include "comm/device/windows/sharing.hpp"
#include "comm/exchange_layout.hpp"
#include "switchyard/device_dispatch.hpp"

namespace switchyard {

[[nodiscard]] ExchangeMode mode_of(const ExpertParallelConfig& config,
                                   const DeviceExchangeOptions& options);
[[nodiscard]] int ctas_of(const DeviceExchangeOptions& options, const DeviceSharing& sharing);
[[nodiscard]] int ctas_of(const ExpertParallelConfig& config, const DeviceExchangeOptions& options,
                          const DeviceSharing& sharing);
[[nodiscard]] Subtree subtree_of(const ExpertParallelConfig& config, int rank, int num_ranks);
/// Rows that come home for each that was received.
[[nodiscard]] int groups_per_row(const ExpertParallelConfig& config, int num_ranks);
/// Whether rows move by ncclSend and ncclRecv: a rank alone needs neither.
[[nodiscard]] bool by_pairs(const DeviceExchangeOptions& options, int num_ranks);
[[nodiscard]] ExchangeLayout layout_of(const ExpertParallelConfig& config,
                                       const DeviceExchangeOptions& options, int num_ranks);

/// Collective: ranks agree, and everything is within its limits. Returns how they lie on devices.
/// @throws As the constructor of DeviceExpertParallel.
[[nodiscard]] DeviceSharing check_device_exchange(Communicator& communicator,
                                                  const ExpertParallelConfig& config,
                                                  const DeviceExchangeOptions& options,
                                                  const DeviceExchangeExtent& extent);

}  // namespace switchyard
