#pragma once

// What host and kernels of the exchange by ncclSend and ncclRecv share, beside the parameters of
// every exchange between GPUs, whose windows are all this rank's own here.

#include <cstdint>

#include "comm/device/exchange.hpp"

namespace switchyard {

/// How far the kernels of a rank are, in pinned memory that they write: a transfer lies between the
/// two epochs of a direction. Dispatch is 0, combine 1.
struct TransferProgress {
  std::uint64_t packed[2];    ///< The last whose rows wait for the transfer.
  std::uint64_t finished[2];  ///< The last whose transfer has ended.
};

/// Where rows are packed: those to rank d in the places that a window has for source d.
struct Staging {
  ExchangeLayout layout{};  ///< The window's with one buffer.
  std::byte* memory = nullptr;
  TransferProgress* progress = nullptr;
};

/// Every kernel below, so that none is loaded later. `num_parts`: ranks times groups.
void load_pairs_kernels(DType dtype, DType dispatch_wire, DType combine_wire, int num_parts);
/// Each token's place among the rows to each rank, and the message of counts.
void launch_pairs_slots(const DeviceDispatchParams& params, const Staging& staging, void* stream);
void launch_pairs_rows(const DeviceDispatchParams& params, const Staging& staging, DType dtype,
                       int ctas, void* stream);
/// After the transfer: checks the counts that have come, and says what has been received.
void launch_pairs_received(const DeviceExchangeParams& params, const Staging& staging, int ctas,
                           void* stream);
void launch_pairs_results(const DeviceCombineParams& params, const Staging& staging, int ctas,
                          void* stream);
/// After the transfer.
void launch_pairs_sums(const DeviceCombineParams& params, const Staging& staging, int ctas,
                       void* stream);

}  // namespace switchyard
