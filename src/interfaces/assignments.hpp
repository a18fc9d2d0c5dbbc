#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/exchange_layout.hpp"
#include "interfaces/transport.hpp"
#include "switchyard/combine.hpp"

namespace switchyard {

/// Which assignment a received row is, beside its expert's and source's numbers.
struct AssignmentMeta {
  std::int32_t position = -1;  ///< token * K + k at the source; -1: no row.
  std::int32_t expert = -1;    ///< Global id.
};
static_assert(sizeof(AssignmentMeta) == 8);

/// One row per (token, k) to the expert's rank, and one back to the token's: what all variants
/// that do not merge the copies of a token share. Where a row goes follows from counts per expert
/// that every rank publishes.
class AssignmentExchange {
 public:
  enum class Order {
    kToken,    ///< A destination's rows lie in the order token, k.
    kExpert,   ///< ... in the order expert, token, k.
    kBuckets,  ///< Each expert has `capacity` rows at its rank; there in the order source, token,
               ///< k.
  };

  /// Collective. @throws As require_same().
  AssignmentExchange(Communicator& communicator, const TransportConfig& config, Order order);

  /// Send the rows; received ones are in rows() and meta() when it returns.
  void dispatch(const TransportInput& input);
  /// Weights [T, K] for the next combine() instead of those of dispatch().
  void set_weight(Matrix<const float> weight);
  /// Send `rows`, results in the places of the received rows, home and add them up.
  void combine(ConstRawMatrix rows, RawMatrix out);

  [[nodiscard]] std::int64_t num_rows() const { return num_rows_; }  ///< Places, buckets' gaps too.
  [[nodiscard]] ConstRawMatrix rows() const;
  [[nodiscard]] const AssignmentMeta* meta() const;
  /// Rows from `source` for expert e, e global.
  [[nodiscard]] std::int64_t count(std::int32_t source, std::int32_t expert) const {
    return counts_[static_cast<std::size_t>(source) * static_cast<std::size_t>(num_experts()) +
                   static_cast<std::size_t>(expert)];
  }
  /// First place of the rows from `source` for `expert`, on the expert's rank (not in kToken).
  [[nodiscard]] std::int64_t first_place(std::int32_t source, std::int32_t expert) const;
  [[nodiscard]] std::int64_t block_begin(std::int32_t source, std::int32_t to) const;
  [[nodiscard]] std::int32_t first_expert(std::int32_t rank) const {
    return first_expert_of(num_experts(), communicator_.size(), rank);
  }
  [[nodiscard]] std::int64_t capacity() const { return capacity_; }
  [[nodiscard]] std::int64_t wire_bytes() const { return wire_bytes_; }

 private:
  /// Rows that lie behind each other at their destination, and behind each other in order_.
  struct Piece {
    std::int32_t to = 0;
    std::int64_t first = 0;  ///< In order_.
    std::int64_t place = 0;  ///< At the destination.
    std::int64_t count = 0;
  };
  [[nodiscard]] std::int32_t num_experts() const { return config_.num_experts; }
  [[nodiscard]] std::int32_t rank_of(std::int32_t expert) const;
  void exchange_counts(const TransportInput& input);
  void sort_assignments(const TransportInput& input);
  void send(const TransportInput& input);
  [[nodiscard]] std::vector<Piece> pieces_from(std::int32_t source) const;
  void add_up(RawMatrix out) const;

  Communicator& communicator_;
  const TransportConfig config_;
  const Order order_kind_;
  const std::int64_t capacity_;
  std::int64_t rows_offset_ = 0;  // of the window: counts, meta, rows, results
  std::int64_t meta_offset_ = 0;
  std::int64_t results_offset_ = 0;
  std::unique_ptr<Window> window_;
  std::uint64_t epoch_ = 0;
  std::uint64_t recoveries_ = 0;
  std::int64_t num_rows_ = 0;
  std::int64_t num_tokens_ = 0;
  std::int64_t wire_bytes_ = 0;
  std::vector<std::int32_t> counts_;       // [R, E] of all sources
  std::vector<std::int32_t> order_;        // own assignments, token * K + k, as they are sent
  std::vector<std::int32_t> order_place_;  // [T*K] where in order_, -1: unused
  std::vector<float> weight_;              // [T*K] of the last dispatch
  std::vector<std::byte> staging_;
};

}  // namespace switchyard
