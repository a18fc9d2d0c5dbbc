#pragma once

// The all-to-all of the published benchmark in the steps of its ladder, each a transport with one
// interface, so that they can be checked against each other and measured beside each other.

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

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

/// "reference": lists on the host and a row at a time, as the published reference does it.
/// "sorted": one sort by expert, blocks per rank, regrouped by the receiver.
/// "flat": rows in the order source, token, k, with 8 bytes of meta; never regrouped.
/// "bucketed": every row straight into its expert's bucket.
/// "native": ExpertParallel: once per rank, index lists, sums where the experts are.
[[nodiscard]] std::span<const std::string_view> transport_names();

/// Collective. @throws Error{kInvalidArgument}: no such name; {kCommunication}: ranks disagree.
std::unique_ptr<Transport> make_transport(std::string_view name, Communicator& communicator,
                                          const TransportConfig& config);

}  // namespace switchyard
