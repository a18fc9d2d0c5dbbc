#pragma once

#include <cstdint>
#include <memory>

#include "switchyard/comm.hpp"

namespace switchyard {

/// Adds up values that all ranks have as many of, each rank a share of them at a time. All calls
/// are collective.
/// Memory: a window of at most 2*R*256 KiB.
class RankSums {
 public:
  /// @param most  Values of one call, about: fewer or more are right too.
  /// @throws Error{kTimeout}, {kCommunication}.
  RankSums(Communicator& communicator, std::int64_t most);

  /// Whether its window is younger than the last recovery.
  [[nodiscard]] bool usable() const { return recoveries_ == communicator_.recoveries(); }

  /// values[i] = the sum over all ranks by the tree of ranks ((0+1)+(2+3))+..., the same bits on
  /// every rank. @throws Error{kTimeout} that names a rank.
  void add_up(float* values, std::int64_t count);

 private:
  /// Signals: what of a rank has landed, one of each kind per rank.
  enum Kind : std::uint8_t { kParts, kSums, kKinds };
  void add_chunk(float* values, std::int64_t count);
  void signal_all(Kind kind);
  void wait_for_all(const char* phase, Kind kind);
  [[nodiscard]] std::int32_t in_turn(std::int32_t i) const { return (rank_ + i) % num_ranks_; }
  /// Where the part, or the sum, that a rank sends begins.
  [[nodiscard]] std::int64_t place(Kind kind, std::int32_t rank) const {
    return 4 * chunk_ * (kind * num_ranks_ + rank);
  }

  Communicator& communicator_;
  const std::int32_t num_ranks_;
  const std::int32_t rank_;
  const std::int64_t chunk_;  ///< Values that one rank adds up at a time.
  const std::uint64_t recoveries_;
  std::unique_ptr<Window> window_;
  std::uint64_t chunks_ = 0;  ///< That were added up.
};

}  // namespace switchyard
