#pragma once

#include "experts/implementations.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/pack.hpp"

namespace switchyard {

/// From rows and a plan to weighted sums, on any backend: by experts that combine, where the layout
/// is compact and some take the call; else packed where the layout wants that, run through the
/// experts, and combined.
/// @tparam Buffer  RawBuffer or DeviceBuffer: memory where the backend works.
template <typename Buffer>
class ExpertRunner {
 public:
  /// Memory for the experts' rows in so many rows of the layout, so that no call has to grow it.
  void reserve(const Layout& layout, DType compute, std::int64_t rows, std::int64_t hidden) {
    if (layout.kind != LayoutKind::kCompact) (void)packed_.matrix(compute, rows, hidden);
    (void)rows_.matrix(compute, rows, hidden);
  }

  /// @param wanted     x as it came, without `rows`.
  /// @param execution  Of pack and combine: on a GPU experts have a workspace of their own.
  void run(const ExpertsArgs& wanted, const Execution& execution) {
    const PlanView& plan = wanted.plan;
    const bool on_cpu = execution.backend == Backend::kCpu;
    // Only the device knows how many rows there are on it.
    const std::int64_t rows =
        on_cpu ? plan.expert_begin[plan.num_experts] : plan.row_token.shape[0];
    const std::int64_t hidden = wanted.x.cols;
    ExpertsArgs call = wanted;
    if (call.x.dtype == DType::kF8E4M3) {
      // Gathered with its scales, whatever the layout, by experts that do not combine.
    } else if (call.layout.kind != LayoutKind::kCompact) {
      const RawMatrix packed = packed_.matrix(call.x.dtype, rows, hidden);
      const double bytes_per_row = 2 * static_cast<double>(hidden * size_of(call.x.dtype));
      const ScopedStage stage(execution, "pack",
                              {.bytes = static_cast<double>(rows) * bytes_per_row,
                               .most_rows = on_cpu ? 0 : rows,
                               .bytes_per_row = on_cpu ? 0 : bytes_per_row});
      pack({.x = call.x, .plan = plan, .rows = packed, .execution = execution});
      call.x = packed;
      call.x_is_packed = true;
    } else if (try_experts(call)) {
      return;
    }
    call.reduced = {};
    call.rows = rows_.matrix(on_cpu ? DType::kF32 : call.weights->dtype(), rows, hidden);
    experts(call);
    const std::int64_t kept = on_cpu ? plan.token_begin[plan.num_tokens()] : 0;
    const ScopedStage stage(
        execution, "combine",
        {.bytes = static_cast<double>(call.rows.bytes() + wanted.reduced.sums.bytes()),
         .flops = 2 * static_cast<double>(kept * hidden),
         .most_rows = on_cpu ? 0 : rows,
         .bytes_per_row = on_cpu ? 0 : static_cast<double>(hidden * size_of(call.rows.dtype))});
    combine({.rows = call.rows,
             .plan = plan,
             .first_expert = call.weights->first_expert(),
             .reduced = wanted.reduced,
             .execution = execution});
  }

  /// Where the experts' rows are.
  [[nodiscard]] Buffer& rows() { return rows_; }

 private:
  Buffer packed_, rows_;
};

}  // namespace switchyard
