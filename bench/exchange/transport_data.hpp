#pragma once

// The data of a case of the published all-to-all: who goes where, what must come out, and how far
// off it is.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/cases/synthetic.hpp"
#include "bench/exchange/shapes.hpp"

namespace switchyard::bench {

/// Of every rank: each can make it for all.
struct TransportData {
  TransportData(const ExchangeShape& which, int ranks, bool every_token);

  /// The rank of an expert.
  [[nodiscard]] int owner(std::int32_t expert) const;
  /// Tokens of rank `source` that have an expert at rank `target`.
  [[nodiscard]] std::int64_t rows(int source, int target) const;
  /// (token, k) of rank `source` whose expert is at rank `target`.
  [[nodiscard]] std::int64_t assignments(int source, int target) const;
  /// Rows of the expert that gets most.
  [[nodiscard]] std::int64_t largest_bucket() const;

  ExchangeShape shape;
  int num_ranks;
  std::vector<SyntheticRouting> routing;
  std::vector<std::int64_t> num_tokens;
};

/// [T, H] = sum over k of weight * y of a rank's tokens `x`, y = x * (1 + the expert's rank) in the
/// type of x.
[[nodiscard]] std::vector<float> expected_rows(const TransportData& data, int rank,
                                               const std::vector<std::byte>& x, ThreadPool* pool);

/// The published check, allclose with rtol 1e-2 and atol 5e-3, as a share of what it allows.
[[nodiscard]] double largest_error(const std::vector<float>& expected, const std::byte* out,
                                   DType dtype);

}  // namespace switchyard::bench
