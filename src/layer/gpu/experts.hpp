#pragma once

#include <memory>

#include "comm/device/device_exchange.hpp"
#include "experts/gpu/planned_experts.hpp"
#include "layer/gpu/router/router.hpp"
#include "layer/gpu/scratch.hpp"
#include "plan/gpu/device_plan.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// Who is to do what with the rows of a call, where the device reads it.
struct RowAssignments {
  Matrix<const std::int32_t> expert{};  ///< [N, K], -1 where unused.
  Matrix<const float> weight{};         ///< [N, K].
  Matrix<const std::uint8_t> kept{};    ///< [N, K], or empty: all.
  std::int32_t total_experts = 0;       ///< 0: ids of other ranks' experts are none.
};

/// Rows for experts, of the compute type, or e4m3 with their scales (ExpertsArgs::x_scale).
struct RowsForExperts {
  ConstRawMatrix x{};           ///< [N, H]
  Matrix<const float> scale{};  ///< [N, ceil(H/128)], or empty.
};

/// The experts that a rank holds, on a GPU: their weights, the plan of a call, and the rows on
/// their way through them in the layer's layout.
class CudaExperts {
 public:
  /// @param execution  Its backend and batch_invariant count.
  /// @param scratch    Outlives it.
  CudaExperts(const LayerModel& model, const LayerOptions& options, const CudaRouter& router,
              DType compute, const Execution& execution, CudaScratch& scratch, int rank,
              int num_ranks);

  /// All memory that calls of so many tokens a rank need.
  void reserve(std::int64_t num_tokens);

  /// Of all ranks, without those that return their input.
  [[nodiscard]] std::int32_t num_experts() const { return config_.num_experts; }
  [[nodiscard]] std::int32_t num_local() const { return num_local_; }
  /// Of the last call.
  [[nodiscard]] const PlanView& plan() const { return plan_.view(); }
  /// Tokens that this rank's experts may have to work on when a rank has `num_tokens`: the host
  /// does not know how many come.
  [[nodiscard]] std::int64_t most_received(std::int64_t num_tokens) const;

  /// Reports "plan". @param num_tokens  Of this rank's call.
  void make_plan(const RowAssignments& work, std::int64_t num_tokens, const Execution& execution);
  /// make_plan() and reduce() at once, and `report`, where the experts' kernel does all that; else
  /// false, and nothing is done. So too where the call has a recorder of its own
  /// (`stages_apart`), which is told what would have run: the stages' times would be one.
  [[nodiscard]] bool plan_and_reduce(const RowAssignments& work, std::int64_t num_tokens,
                                     ConstRawMatrix x, ReducedRows reduced,
                                     const PlanReport& report, bool stages_apart,
                                     const Execution& execution);
  /// Whether the layer's experts take rows of e4m3 where there are many.
  [[nodiscard]] bool computes_fp8() const;
  /// Whether they do for this call, whose rows are as `x` in the compute type: not where an
  /// implementation combines those. Makes room for its plan.
  [[nodiscard]] bool takes_fp8(const RowAssignments& work, std::int64_t num_tokens,
                               ConstRawMatrix x, ReducedRows reduced, const Execution& execution);
  /// Weighted sums [N, H] of the outputs for the rows [N, H] by the last plan, fused where an
  /// implementation combines. `reduced.subtree` is this rank's.
  /// @param preactivation  out, as ExpertsArgs has it, or empty.
  void reduce(const RowsForExperts& rows, ReducedRows reduced, const Execution& execution,
              RawMatrix preactivation = {});
  /// Rows that the layout has room for when a rank has `num_tokens`.
  [[nodiscard]] std::int64_t layout_rows(std::int64_t num_tokens) const;
  [[nodiscard]] std::int64_t preactivation_cols() const {
    return (config_.gated ? 2 : 1) * config_.inner;
  }
  /// Of experts_backward() for so many tokens, where it has lend_inner() and, if
  /// `has_dpreactivation`, memory of the caller for that.
  [[nodiscard]] std::int64_t backward_workspace_bytes(std::int64_t num_tokens,
                                                      bool has_dpreactivation) const;
  /// Whether the pre-activations of every call have so many bytes a token.
  [[nodiscard]] bool preactivation_has(std::int64_t bytes_per_token) const;
  /// The forward's memory for rows [S max, I] between its products and [S max, H] behind them, of
  /// the compute type: for the way back, since a call leaves nothing there. After reserve().
  [[nodiscard]] RawMatrix lend_inner(std::int64_t num_tokens);
  [[nodiscard]] RawMatrix lend_rows(std::int64_t num_tokens);
  /// Reads the weights again, or takes note that they are used where they lie and have changed.
  void reload(const ExpertSource& source, const Execution& execution);
  /// weights() is an error until a reload().
  void drop() { weights_.reset(); }
  /// Index lists that an exchange may make in the place of make_plan(), where somebody else then
  /// adds up the rows: not where an implementation combines, nor in another layout than the compact
  /// one (then false). After reserve().
  [[nodiscard]] bool offer_lists(const Execution& execution);
  [[nodiscard]] const DeviceExpertLists& lists() const { return lists_; }
  /// The outputs [S max, H], unweighted, for the rows [N, H] by the lists.
  [[nodiscard]] ConstRawMatrix rows_by_lists(const RowsForExperts& rows,
                                             const Execution& execution);
  /// Plans no rows and runs what follows, so that all kernels are loaded. @param sums  [N, H] or,
  /// with each_group, [N * groups, H], as reduce() takes them; nothing of it counts, nor of
  /// `preactivation`.
  void rehearse(const RawMatrix& sums, bool each_group, const Execution& execution,
                RawMatrix preactivation = {});
  [[nodiscard]] Subtree subtree() const { return subtree_; }
  /// @throws Error{kInvalidArgument}: a reload has failed.
  [[nodiscard]] const ExpertWeights& weights() const;

 private:
  [[nodiscard]] std::int64_t padded_rows(std::int64_t num_tokens) const;
  [[nodiscard]] PlanArgs plan_args(const RowAssignments& work, std::int64_t num_tokens,
                                   const Execution& execution);
  [[nodiscard]] ExpertsArgs experts_args(const RowsForExperts& rows, const ReducedRows& reduced,
                                         const Execution& execution);

  const LayerOptions& options_;
  const CudaRouter& router_;
  ExpertConfig config_;
  std::int32_t top_k_;
  DType compute_;
  int num_ranks_;
  Subtree subtree_;
  std::int32_t first_expert_;
  std::int32_t num_local_;
  std::unique_ptr<ExpertWeights> weights_;
  DevicePlan plan_;
  CudaScratch& scratch_;
  DeviceBuffer assignment_rows_;
  DeviceExpertLists lists_;  ///< By the arrays of plan_.
};

/// Weights of `count` experts from `first` on, as the layer's options want them.
[[nodiscard]] std::unique_ptr<ExpertWeights> load_device_experts(
    const ExpertSource& source, const ExpertConfig& config, std::int32_t first, std::int32_t count,
    DType compute, const LayerOptions& options, const Execution& execution);

}  // namespace switchyard
