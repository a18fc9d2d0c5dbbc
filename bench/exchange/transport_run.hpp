#pragma once

// Variants of the all-to-all on one shape of the published benchmark: checked as published, and
// measured beside each other.

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/exchange/shapes.hpp"
#include "bench/measure/run_count.hpp"
#include "bench/measure/stage_times.hpp"
#include "comm/ranks/on_ranks.hpp"

namespace switchyard::bench {

struct TransportData;

struct TransportCase {
  /// Round trips that are chained in a graph on a GPU.
  static constexpr int kChain = 32;
  static constexpr int kHostChain = 4;  ///< Where the host takes part in each.

  ExchangeShape shape{};
  /// T = max_tokens on every rank; else as published: uniform in [1, max_tokens) on each.
  bool every_token = false;
  std::vector<std::string> variants{};
  RankPlace where{};
  Backend backend = Backend::kCpu;
  DeviceEngine engine = DeviceEngine::kAuto;  ///< CUDA.
  RunCount count{};
  bool peer_mpi = false;  ///< Time MPI_Alltoallv of the same bytes in turn with "native".
  /// Buckets are made for the largest one of this input where those for any would take more than so
  /// many bytes in all.
  std::int64_t bucket_budget = std::int64_t{1} << 40;
};

struct TransportResult {
  std::string variant{};
  /// "dispatch", "experts" (y = x * (1 + rank)), "combine", "dispatch+combine", "round_trip": the
  /// slowest rank's; "barrier_to_barrier": rank 0's, the way in which it was published;
  /// "mpi_alltoallv" with the peer. Bytes: what crosses between ranks, read once and written once.
  /// On a GPU without "dispatch+combine"; "round_trip" is one of a chain in a graph, "eager" one
  /// that the host launches and waits for; dispatch, experts and combine are by events.
  std::vector<StageSamples> stages{};
  std::int64_t num_tokens = 0;  ///< Of all ranks.
  std::int64_t wire_bytes = 0;  ///< From rank to rank, there and back, all ranks together.
  std::int64_t most_there = 0;  ///< GPU: bytes to others of the rank that dispatches most.
  std::int64_t most_back = 0;   ///< GPU: the same of combine.
  std::int64_t capacity = 0;    ///< Rows of a bucket; 0: not "bucketed".
  double error = 0;             ///< Largest |out - want| / (5e-3 + 1e-2 |want|); above 1: a miss.
  [[nodiscard]] bool holds() const { return error <= 1; }
};

/// Collective with processes; a result per variant where results are reported, else none.
[[nodiscard]] std::vector<TransportResult> run_transports(const TransportCase& c);
/// This rank's part on a GPU, a JSON object per variant; only in a build with CUDA. Collective.
[[nodiscard]] nlohmann::json run_device_variants(const TransportCase& c, const TransportData& data,
                                                 Communicator& communicator);

}  // namespace switchyard::bench
