#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/assignments.hpp"
#include "switchyard/execution.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// How the rows of the experts lie behind each other.
enum class LayoutKind : std::uint8_t {
  kCompact,  ///< Without a gap.
  kAligned,  ///< Each expert starts at a multiple of `alignment`; the gap is padding.
  kPadded,   ///< [El, C, H]: each expert has C rows, used or not.
};

struct Layout {
  LayoutKind kind = LayoutKind::kCompact;
  std::int32_t alignment = 1;  ///< Rows; kAligned only; >= 1.
};

/// Which assignments an expert keeps when more want it than it has capacity for.
enum class DropPolicy : std::uint8_t {
  kToken,   ///< The first in (token, k) order; k is the place among a token's own.
  kChoice,  ///< All first choices in token order, then all second ones, ... (GShard, Switch).
  kProbs,   ///< The largest weights; ties in (token, k) order (Megatron-Core).
  kBpr,     ///< As kChoice, with tokens in the order of their largest unbiased score (V-MoE).
  /// As kToken, of a routing that was made with RouteArgs::room: a token takes the best experts
  /// that have room left from the tokens before it. Of layers on a CPU that route by top-k.
  kReroute,
};

/// Slots of one expert for one source rank: ceil(factor * T * K / E - 1e-9), T the tokens there;
/// at least 1, but 0 where T is 0.
/// @throws Error{kInvalidArgument} if factor is not finite and positive.
[[nodiscard]] std::int64_t capacity_of(double factor, std::int64_t num_tokens, std::int64_t top_k,
                                       std::int64_t num_experts);

struct CapacityArgs {
  AnyAssignments assignments{};
  Vector<const float> top_score{};             ///< [T] for kBpr; empty: the token's largest weight.
  std::int32_t num_experts = 0;                ///< E.
  std::int64_t capacity = 0;                   ///< Slots per expert; 0: no limit.
  std::int32_t zero_computation = 0;           ///< The last so many experts have others,
  std::int64_t zero_computation_capacity = 0;  ///< these; 0: no limit.
  DropPolicy policy = DropPolicy::kToken;
  /// out [T * K], or [A]: 1 kept, 0 dropped or unused, in the order of the assignments.
  Vector<std::uint8_t> kept{};
  Vector<std::int64_t> counts{};       ///< out [E]: assignments wanted.
  Vector<std::int64_t> counts_kept{};  ///< out [E]: assignments kept, no more than slots.
  Execution execution{};
};

/// Decide, on the source rank and before anything moves, which assignments are kept.
/// @throws Error{kInvalidArgument}: shapes disagree, an expert id lies outside [-1, E), or a list's
///         token_begin does not ascend from 0 to A (CUDA counts these in the status as bad ids).
///         {kUnsupported}: nobody accepts it, with the reasons.
void apply_capacity(const CapacityArgs& args);

/// A plan's arrays, owned by somebody else, on the host or on the device. Rows are sorted stably by
/// (expert, source rank, token, k): CSR both ways.
struct PlanView {
  std::int32_t num_experts = 0;         ///< El.
  Vector<std::int32_t> expert_begin{};  ///< [El+1] first row of each expert in the layout.
  Vector<std::int32_t> expert_rows{};   ///< [El] rows that are used; the rest of it is padding.
  Vector<std::int32_t> row_token{};     ///< [S max] row of x it comes from; -1: padding.
  Vector<float> row_weight{};           ///< [S max]; 0: padding.
  Vector<std::int32_t> token_begin{};   ///< [N+1] into token_row.
  Vector<std::int32_t> token_row{};     ///< [N*K, or A, max] the rows of each token, ascending.
  /// Rows of a token at most: K of a dense routing, and what Plan::reserve() says of one; 0: any
  /// number, as of lists. On a GPU combine() is slow then, and with too small a number wrong.
  std::int64_t most_rows = 0;
  [[nodiscard]] std::int64_t num_tokens() const { return token_begin.shape[0] - 1; }  ///< N.
};

/// Rows that the layout may need in the worst case: what to allocate for row_token and row_weight.
/// @param padded_rows  C; kPadded only.
[[nodiscard]] std::int64_t max_rows(const Layout& layout, std::int64_t num_tokens,
                                    std::int64_t top_k, std::int32_t num_experts,
                                    std::int64_t padded_rows);
/// The same for these assignments.
[[nodiscard]] std::int64_t max_rows(const Layout& layout, const AnyAssignments& assignments,
                                    std::int32_t num_experts, std::int64_t padded_rows);

struct PlanArgs {
  AnyAssignments assignments{};       ///< Global ids; those outside this rank's are skipped.
  Vector<const std::uint8_t> kept{};  ///< [N * K], or [A]; empty: all kept.
  std::int32_t first_expert = 0;      ///< This rank holds [first_expert, first_expert + El).
  /// E of the layer: an id outside [-1, E) is an error (CUDA: counted in the status). 0: any id
  /// that is not this rank's is skipped.
  std::int32_t total_experts = 0;
  Layout layout{};
  std::int64_t padded_rows = 0;  ///< C; kPadded only; no expert may have more rows.
  PlanView plan{};               ///< out.
  Execution execution{};
};

/// Sort the assignments by a counting sort: histogram, exclusive scan, stable scatter.
/// A dense routing and the same as a list have the same plan.
/// @throws Error{kInvalidArgument}: shapes disagree, an array is too small, an expert has more than
///         padded_rows rows, a list's token_begin does not ascend from 0 to A (CUDA counts these in
///         the status as bad ids). {kUnsupported}: nobody accepts it, with the reasons.
/// Cost: reads 9*N*K bytes (a list: 9*A + 4*N), writes about 12 bytes a row.
void plan(const PlanArgs& args);

/// A plan that owns host memory; reused from call to call, it only grows.
class Plan {
 public:
  /// Size the arrays for at most this many tokens and rows and give the view of them, for a dense
  /// routing.
  PlanView reserve(std::int64_t num_tokens, std::int64_t top_k, std::int32_t num_experts,
                   std::int64_t rows);
  /// As much as the plan of these assignments in this layout may need.
  PlanView reserve(const AnyAssignments& assignments, const Layout& layout,
                   std::int32_t num_experts, std::int64_t padded_rows);
  [[nodiscard]] const PlanView& view() const { return view_; }

 private:
  PlanView reserve_arrays(std::int64_t num_tokens, std::int64_t num_assignments,
                          std::int64_t most_rows, std::int32_t num_experts, std::int64_t rows);

  std::vector<std::int32_t> ints_{};
  std::vector<float> weights_{};
  PlanView view_{};
};

}  // namespace switchyard
