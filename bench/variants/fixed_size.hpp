#pragma once

// The fixed-size flavour of the all-to-all: every pair of ranks exchanges the same number M of
// rows, found from made-up routing; shorter messages end in zeros. One-sided: each rank writes its
// M rows for a peer into that peer's window and tells it.

#include <cstdint>
#include <memory>
#include <vector>

#include "switchyard/comm.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

class ThreadPool;

/// One point of a sweep; see data/all2all.json, "fixed_size_flavour".
struct FixedSizeConfig {
  std::int64_t tokens = 0;         ///< batch * sequence, on every rank.
  std::int32_t local_experts = 1;  ///< Per rank.
  std::int32_t top_k = 1;
  std::int64_t hidden = 0;
  std::uint32_t seed = 1000;  ///< Rank r routes from seed + r.
};

/// Which tokens of this rank go to which rank, and M of all.
struct FixedSizeRouting {
  std::vector<std::int64_t> begin;  ///< [R+1] into token.
  std::vector<std::int32_t> token;  ///< Sorted by (destination, token), each once per destination.
  std::int64_t rows_per_pair = 0;   ///< M: the largest count over all ordered pairs, self included.
  double padding = 0;               ///< Share of zero rows in all messages.
};

/// Collective: gate weights [E, H], then tokens [T, H], are standard normal from the rank's seed;
/// softmax (which keeps the order of the logits), top-k over E = R * local_experts.
/// Cost: T * H normal numbers and 2 * T * H * E FLOPs.
FixedSizeRouting make_fixed_size_routing(Communicator& communicator, const FixedSizeConfig& config,
                                         ThreadPool* pool);

class FixedSizeExchange {
 public:
  /// Collective.
  FixedSizeExchange(Communicator& communicator, std::int64_t rows_per_pair, std::int64_t hidden,
                    DType dtype);

  /// Collective: send the rows of `x` [T, H] by `routing`, padded with zeros, to every rank. Row j
  /// from rank s is then row s * M + j of the result, valid until the second following exchange.
  ConstRawMatrix exchange(ConstRawMatrix x, const FixedSizeRouting& routing, ThreadPool* pool);

  /// Bytes to other ranks in one exchange: (R - 1) * M * H * size.
  [[nodiscard]] std::int64_t wire_bytes() const;

 private:
  Communicator& communicator_;
  const std::int64_t rows_per_pair_;
  const std::int64_t hidden_;
  const DType dtype_;
  std::unique_ptr<Window> window_;
  std::uint64_t epoch_ = 0;
  std::uint64_t recoveries_ = 0;
  std::vector<std::byte> staging_;
};

}  // namespace switchyard
