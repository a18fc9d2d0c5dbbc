#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/combine.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// Where the experts of a layer live.
struct ExpertMap {
  std::vector<std::int32_t> rank;   ///< [E] rank that holds the expert.
  std::vector<std::int32_t> group;  ///< [E] its reduction group, counted from its rank's first.
};

[[nodiscard]] ExpertMap make_expert_map(ReductionOrder order, std::int32_t num_ranks);

/// Which tokens go to which rank: each token once per distinct destination, in token order.
struct SendPlan {
  std::vector<std::int64_t> begin;  ///< [R+1] into token.
  std::vector<std::int32_t> token;  ///< Sorted by (destination, token).
  [[nodiscard]] std::int64_t count(std::int32_t rank) const {
    return begin[static_cast<std::size_t>(rank) + 1] - begin[static_cast<std::size_t>(rank)];
  }
};

/// @param expert  [T, K], ids in [-1, E); those without `kept` are not sent.
void make_send_plan(Matrix<const std::int32_t> expert, Matrix<const std::uint8_t> kept,
                    const ExpertMap& map, std::int32_t num_ranks, SendPlan& plan);

/// Rows of every pair of ranks, from the counts that all ranks have published, and what each window
/// can hold: the same on every rank.
struct Placement {
  std::int32_t num_ranks = 0;
  std::vector<std::int64_t> sent;     ///< [R*R] rows from s to d that fit, s * R + d.
  std::vector<std::int64_t> begin;    ///< [R*R] first row of s at d.
  std::vector<std::int64_t> dropped;  ///< [R] rows to d that did not fit.

  [[nodiscard]] std::int64_t sent_rows(std::int32_t s, std::int32_t d) const {
    return sent[index(s, d)];
  }
  [[nodiscard]] std::int64_t first_row(std::int32_t s, std::int32_t d) const {
    return begin[index(s, d)];
  }
  /// First result at s of those that come from d, in rows of a token.
  [[nodiscard]] std::int64_t first_result(std::int32_t s, std::int32_t d) const;
  [[nodiscard]] std::size_t index(std::int32_t s, std::int32_t d) const {
    return static_cast<std::size_t>(s) * static_cast<std::size_t>(num_ranks) +
           static_cast<std::size_t>(d);
  }
};

/// Rows beyond `max_rows` are dropped whole, in (source rank, token) order.
/// @param counts  [R*R] rows that s wants to send to d.
void make_placement(const std::vector<std::int64_t>& counts, std::int32_t num_ranks,
                    std::int64_t max_rows, Placement& placement);

}  // namespace switchyard
