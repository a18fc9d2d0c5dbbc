#pragma once

// What the ways to dispatch and combine of the published all-to-all benchmark have in common: one
// interface, so that they can be checked against each other and measured beside each other.

#include <cstdint>

#include "switchyard/comm.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

class ThreadPool;

/// The same on all ranks.
struct TransportConfig {
  std::int32_t num_experts = 0;  ///< E; rank r holds [r*E/R, (r+1)*E/R).
  std::int32_t top_k = 0;        ///< K.
  std::int64_t hidden = 0;       ///< H.
  std::int64_t max_tokens = 0;   ///< Most tokens of a rank.
  DType dtype = DType::kF16;     ///< Of tokens, wire and results: f32, bf16, f16.
  std::int64_t capacity = 0;     ///< "bucketed": rows per expert; 0: max_tokens * R.
  ThreadPool* pool = nullptr;
};

struct TransportInput {
  ConstRawMatrix x;                   ///< [T, H].
  Matrix<const std::int32_t> expert;  ///< [T, K] global ids, -1 unused.
  Matrix<const float> weight;         ///< [T, K].
};

/// What the experts of this rank work on: row i is row `x_row[i]` of x (i itself if that is empty)
/// for expert `expert[i]`, -1: not used. Valid until the next dispatch.
struct ExpertInput {
  ConstRawMatrix x;                   ///< [rows of x, H].
  Vector<const std::int32_t> x_row;   ///< [S], or empty.
  Vector<const std::int32_t> expert;  ///< [S] global ids.
  [[nodiscard]] std::int64_t rows() const { return expert.shape[0]; }
};

/// Collective. @throws Error{kCommunication}: ranks disagree on a value (which one, whose);
/// {kInvalidArgument}: a size that cannot be.
void require_same(Communicator& communicator, const TransportConfig& config);

/// One way to dispatch and combine. All calls are collective.
class Transport {
 public:
  virtual ~Transport() = default;
  /// @throws Error{kInvalidArgument}, {kTimeout}, {kCommunication}.
  virtual ExpertInput dispatch(const TransportInput& input) = 0;
  /// @param rows  [S, H] results of the last dispatch, unweighted, of the configured type.
  /// @param out   [T, H] = sum over k of weight * result, in fp32, rounded once.
  virtual void combine(ConstRawMatrix rows, RawMatrix out) = 0;
  /// Bytes that this rank has sent to other ranks in the last dispatch and combine.
  [[nodiscard]] virtual std::int64_t wire_bytes() const = 0;
};

}  // namespace switchyard
