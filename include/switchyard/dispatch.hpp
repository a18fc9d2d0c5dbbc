#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "switchyard/combine.hpp"
#include "switchyard/comm.hpp"
#include "switchyard/execution.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// What all ranks must agree on; compared at creation.
struct ExpertParallelConfig {
  std::int32_t num_experts = 0;  ///< E; rank r holds [r*E/R, (r+1)*E/R) by integer division.
  std::int32_t top_k = 0;        ///< K >= 1; at most 32 between GPUs.
  std::int64_t hidden = 0;       ///< H.
  std::int64_t max_tokens = 0;   ///< Most tokens of any rank in one call.
  DType dtype = DType::kF32;     ///< Of the tokens that are dispatched.
  std::optional<DType> dispatch_wire{};  ///< Type on the way to the experts; empty: dtype.
  DType combine_wire = DType::kF32;      ///< Type of the partial sums on the way back.
  std::int32_t reduction_groups = 8;     ///< G.
  bool rank_invariant = false;     ///< Round every group's partial to the wire type, at R = 1 too.
  std::int64_t max_recv_rows = 0;  ///< Rows the window holds; 0: R * max_tokens.
};

/// Rows and bytes per pair of ranks in the last exchange: entry s * R + d is from s to d, a rank's
/// own rows (s = d) included. W = 8 * (R + 2) bytes is one message of counts.
struct Traffic {
  std::vector<std::int64_t> rows{};           ///< [R*R] dispatched: tokens of s with experts on d.
  std::vector<std::int64_t> payload_bytes{};  ///< [R*R] rows * H * size on the wire.
  std::vector<std::int64_t> meta_bytes{};  ///< [R*R] W + 16 (two signals) + rows * (8K + scales).
  /// Of combine, [R*R] from the experts' rank s to the token's rank d; zero before it.
  std::vector<std::int64_t> return_rows{};
  std::vector<std::int64_t> return_payload_bytes{};  ///< [R*R] return_rows * H * size on the wire.
  std::vector<std::int64_t> return_meta_bytes{};     ///< [R*R] W + 8 + return_rows * scales.
};

struct DispatchArgs {
  ConstRawMatrix x{};                   ///< [T, H], T <= max_tokens.
  Matrix<const std::int32_t> expert{};  ///< [T, K] global ids, -1 unused.
  Matrix<const float> weight{};         ///< [T, K].
  Matrix<const std::uint8_t> kept{};  ///< [T, K], or empty: all; dropped assignments are not sent.
  Execution execution{};
};

/// Rows this rank has received, sorted by (source rank, token): the input of plan() and experts().
/// Views into the exchange's memory, valid until the second following dispatch on the object.
struct Received {
  ConstRawMatrix x{};                         ///< [N, H], dtype; wire values where they differ.
  Matrix<const std::int32_t> expert{};        ///< [N, K] global ids; -1 where not this rank's.
  Matrix<const float> weight{};               ///< [N, K].
  Vector<const std::int64_t> source_begin{};  ///< [R+1] first row of each source rank.
  std::int64_t dropped_rows = 0;  ///< Rows to this rank that did not fit into max_recv_rows.
  std::uint64_t number = 0;       ///< Of the dispatch on its object, from 1 on.
};

struct ReturnArgs {
  /// [N, H], or with rank_invariant [N * num_groups of subtree(), H]; combine_wire type, f32 where
  /// that is fp8.
  ConstRawMatrix partials{};
  Matrix<const float> shared{};  ///< [T, H] of this rank's own tokens, or empty.
  RawMatrix out{};               ///< [T, H].
  std::uint64_t of = 0;          ///< Received::number of the rows; another than the last dispatch's
                         ///< is an error. 0: not said (ExpertParallel; on GPUs not looked at).
  Execution execution{};
};

/// Dispatch and combine across ranks (expert parallelism). A token crosses once per destination
/// rank with its expert ids and weights; results come back as one row per (token, rank), or per
/// (token, group) when rank_invariant. Every place is known from counts exchanged first: no
/// atomics, the same bits whatever the timing. All calls are collective.
class ExpertParallel {
 public:
  /// @throws Error{kCommunication}: ranks disagree on a value (which one, whose);
  /// {kInvalidArgument}.
  ExpertParallel(Communicator& communicator, const ExpertParallelConfig& config);
  ~ExpertParallel();
  ExpertParallel(ExpertParallel&&) noexcept;
  ExpertParallel& operator=(ExpertParallel&&) noexcept;

  /// @throws Error{kInvalidArgument}: shapes, ids, more than max_tokens (before anything is sent);
  ///         {kTimeout}, {kCommunication}: then call recover() on the communicator, collectively.
  Received dispatch(const DispatchArgs& args);
  /// Send the partial sums of the last dispatch home and add them there by the fixed tree.
  void combine(const ReturnArgs& args);

  /// This rank's part of the reduction tree: what combine() of the rows must sum over.
  [[nodiscard]] Subtree subtree() const;
  /// Gathered from all ranks by the exchange itself; the same on every rank.
  [[nodiscard]] const Traffic& traffic() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard
