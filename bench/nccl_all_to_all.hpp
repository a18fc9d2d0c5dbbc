#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "bench/device_chain.hpp"

namespace switchyard {

/// NCCL's all-to-all (a group of ncclSend and ncclRecv) with the bytes of an exchange's payload.
struct NcclAllToAll {
  std::vector<std::int64_t> rows{};  ///< [R*R] rows from s to d; a rank's own are not sent.
  std::int64_t dispatch_row_bytes = 0;
  std::int64_t combine_row_bytes = 0;
  SlowestTimes dispatch{};  ///< Measured, as the next.
  SlowestTimes pair{};
};

/// Times them, ranks as threads, one GPU each: in a graph, or enqueued where NCCL cannot be
/// captured. Meta, counts, placing and sums are left out: a floor of what an exchange built on it
/// takes. @returns How they were launched, "graph" or "eager"; @throws Error: NCCL cannot be used.
const char* measure_nccl_all_to_all(int num_ranks, std::deque<NcclAllToAll>& sizes);

}  // namespace switchyard
