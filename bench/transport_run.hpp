#pragma once

// Variants of the all-to-all on one shape of the published benchmark: checked as published, and
// measured beside each other.

#include <string>
#include <vector>

#include "bench/exchange_shapes.hpp"
#include "bench/run_count.hpp"
#include "bench/stage_times.hpp"
#include "comm/on_ranks.hpp"

namespace switchyard::bench {

struct TransportCase {
  ExchangeShape shape{};
  /// T = max_tokens on every rank; else as published: uniform in [1, max_tokens) on each.
  bool every_token = false;
  std::vector<std::string> variants{};
  RankPlace where{};
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
  std::vector<StageSamples> stages{};
  std::int64_t num_tokens = 0;  ///< Of all ranks.
  std::int64_t wire_bytes = 0;  ///< From rank to rank, there and back, all ranks together.
  std::int64_t capacity = 0;    ///< Rows of a bucket; 0: not "bucketed".
  double error = 0;             ///< Largest |out - want| / (5e-3 + 1e-2 |want|); above 1: a miss.
  [[nodiscard]] bool holds() const { return error <= 1; }
};

/// Collective with processes; a result per variant where results are reported, else none.
[[nodiscard]] std::vector<TransportResult> run_transports(const TransportCase& c);

}  // namespace switchyard::bench
