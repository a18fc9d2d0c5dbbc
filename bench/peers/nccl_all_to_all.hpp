#pragma once

#include <cstdint>
#include <vector>

#include "bench/exchange/device_chain.hpp"

namespace switchyard {

/// NCCL's all-to-all (a group of ncclSend and ncclRecv) with the bytes of an exchange's payload.
struct NcclAllToAllArgs {
  std::vector<std::int64_t> rows{};  ///< [R*R] rows from s to d; a rank's own are not sent.
  std::int64_t dispatch_row_bytes = 0;
  std::int64_t combine_row_bytes = 0;
};

struct NcclAllToAllTimes {
  SlowestTimes dispatch;
  SlowestTimes pair;
};

/// Collective, ranks as threads, one GPU each. Meta, counts, placing and sums are left out: a floor
/// of what an exchange built on it takes.
void measure_nccl_all_to_all(Communicator& communicator, const NcclAllToAllArgs& args,
                             NcclAllToAllTimes& times);

}  // namespace switchyard
