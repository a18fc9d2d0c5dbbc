#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace switchyard {

/// The routing that the exchange between GPUs is measured with: every rank has T tokens, each with
/// K distinct experts of E.
struct ExchangeRouting {
  int num_ranks = 1;                                ///< R.
  std::vector<std::vector<std::int32_t>> expert{};  ///< Of each rank, [T, K].
  std::vector<std::int64_t> rows{};                 ///< [R*R] rows from s to d, one a token.

  /// Rows to other ranks, of the rank that sends most.
  [[nodiscard]] std::int64_t most_sent() const;
  /// Rows from other ranks, of the rank that receives most: as many go home from there.
  [[nodiscard]] std::int64_t most_received() const;
  /// Rows that the rank with most of them gets, its own included.
  [[nodiscard]] std::int64_t most_with_own() const;
};

/// Rows from a rank to another to be expected of T tokens with K distinct experts of E, all as
/// likely: T * (1 - C(E - E/R, K) / C(E, K)). R divides E.
[[nodiscard]] double expected_rows_of_pair(std::int64_t num_tokens, std::int32_t num_experts,
                                           std::int32_t top_k, int num_ranks);

struct ExchangeRoutingArgs {
  std::int64_t num_tokens = 0;  ///< T.
  std::int32_t num_experts = 0;
  std::int32_t top_k = 0;
  int num_ranks = 1;
  /// "uniform", "zipf:S" or "hot:F" (bench/cases/synthetic.hpp): the experts' weights, and the hot
  /// one, are the same for all ranks.
  std::string skew = "uniform";
};
[[nodiscard]] ExchangeRouting make_exchange_routing(const ExchangeRoutingArgs& args);

}  // namespace switchyard
