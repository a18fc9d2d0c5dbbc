#pragma once

// One point of a sweep of the fixed-size all-to-all.

#include <string>
#include <vector>

#include "bench/exchange/shapes.hpp"
#include "bench/measure/run_count.hpp"
#include "bench/measure/stage_times.hpp"
#include "comm/ranks/on_ranks.hpp"

namespace switchyard::bench {

struct FixedSizeCase {
  /// Exchanges that are chained in a graph on a GPU.
  static constexpr int kChain = 10;

  FixedSizeConfig config{};
  RankPlace where{};
  Backend backend = Backend::kCpu;
  DeviceEngine engine = DeviceEngine::kAuto;  ///< CUDA.
  RunCount count{};
  bool peer_mpi = false;           ///< Time MPI_Alltoallv of the same messages in turn.
  bool peer_nccl = false;          ///< CUDA: time NCCL's all-to-all of the same messages in turn.
  std::int64_t memory_budget = 0;  ///< Bytes that windows and buffers of all ranks may take.
};

struct FixedSizeResult {
  /// "exchange", and "mpi_alltoallv" or "nccl_all_to_all" with the peer; on a GPU "exchange" is one
  /// of a chain in a graph, "eager" one that the host launches.
  std::vector<StageSamples> stages{};
  std::int64_t rows_per_pair = 0;  ///< M.
  double padding = 0;              ///< Share of zero rows in all messages.
  std::int64_t wire_bytes = 0;     ///< From rank to rank, all ranks together.
  bool holds = true;               ///< Every message came as it was sent, zeros included.
  std::int64_t bytes_wanted = 0;   ///< Above the budget: nothing was run.
};

/// Collective with processes; the figures are right where results are reported.
[[nodiscard]] FixedSizeResult run_fixed_size(const FixedSizeCase& c);

}  // namespace switchyard::bench
