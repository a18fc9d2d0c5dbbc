#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/host/rank_sums.hpp"
#include "comm/host/row_writer.hpp"
#include "comm/host/send_plan.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/comm.hpp"
#include "switchyard/dispatch.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// How a forward's rows have travelled: all that places of its gradients follow from.
struct GradientRoute {
  Matrix<const std::int32_t> expert{};  ///< [T, K] global ids, -1 unused.
  Matrix<const std::uint8_t> kept{};    ///< [T, K], or empty: all.
  Matrix<const std::int64_t> sent{};    ///< [R, R] rows from s to d: Traffic::rows.
  std::uint64_t forward = 0;            ///< Which it was: the same on all ranks.
  bool dtokens = false;                 ///< Whether this rank wants them home,
  bool dweight = false;                 ///< and these.
  std::uint64_t summed = 0;  ///< What will be summed, a bit for each: the same on all ranks.
};

/// What has come for this rank's experts.
struct ArrivedGradients {
  ConstRawMatrix dout{};  ///< [N, H], as the forward's rows; valid until the next send().
  bool dtokens = false;   ///< Whether any rank wants them,
  bool dweight = false;   ///< and these.
};

/// What has come home for a rank's tokens; valid until the next send().
struct GradientsAtHome {
  Matrix<const float> dtokens{};  ///< Rows that `partial_row` names, as finish() takes them.
  Matrix<const std::int32_t> partial_row{};  ///< [T, R], -1: absent.
};

/// The exchange backwards: gradients of sums go to the ranks of the experts by the forward's
/// places, which no counts have to be exchanged for; gradients of rows come home. What the
/// forward's wires round to plays no part: dout travels in its own type, the rest as f32. One
/// backward at a time; all calls are collective.
/// Memory: a window of R*max_tokens rows [H] of `dtype` and max_tokens*min(R, K) rows [H + K] of
/// f32; that of RankSums.
class GradientExchange {
 public:
  /// @param dtype       Of dout.
  /// @param most_summed Most values of one sum_over_ranks().
  /// @throws Error{kTimeout}, {kCommunication}.
  GradientExchange(Communicator& communicator, const ExpertParallelConfig& config, DType dtype,
                   std::int64_t most_summed);

  /// Whether all that it is made of is younger than the last recovery.
  [[nodiscard]] bool usable() const { return recoveries_ == communicator_.recoveries(); }

  /// dout [T, H] of this rank's tokens to the rows [N, H] that this rank had in the forward.
  /// @throws Error{kTimeout} that names a rank; {kCommunication}: ranks go back through different
  ///         forwards, or for different gradients.
  ArrivedGradients send(ConstRawMatrix dout, const GradientRoute& route,
                        const Execution& execution);
  /// Gradients of the rows home, to those that want them.
  /// @param dtokens    [N, H], or empty where nobody wants them.
  /// @param dweight    [N, K] by choice, 0 where an expert is not this rank's; or likewise.
  /// @param of_choice  out [T, K], or empty: not wanted here.
  GradientsAtHome bring_home(Matrix<const float> dtokens, Matrix<const float> dweight,
                             Matrix<float> of_choice, const Execution& execution);
  /// values[i] = the sum over all ranks by the tree of ranks ((0+1)+(2+3))+..., the same bits on
  /// every rank.
  void sum_over_ranks(float* values, std::int64_t count) { sums_.add_up(values, count); }

 private:
  struct Layout {
    std::int64_t rows = 0, dtokens = 0, dweight = 0, bytes = 0;
  };
  static Layout layout_of(const ExpertParallelConfig& config, DType dtype, std::int32_t num_ranks);
  /// Signals: what of a rank has landed, one of each kind per rank.
  enum Kind : std::uint8_t { kRows, kHome, kKinds };
  static constexpr std::uint64_t kTokens = 1;  ///< Wishes.
  static constexpr std::uint64_t kWeight = 2;
  void place(const GradientRoute& route, std::int64_t num_tokens);
  void hear(std::int32_t from);
  void choose(Matrix<float> of_choice);
  void wait_for_all(const char* phase, Kind kind, std::uint64_t value);
  [[nodiscard]] std::int32_t in_turn(std::int32_t i) const { return (rank_ + i) % num_ranks_; }
  [[nodiscard]] std::byte* at(std::int64_t offset) { return window_->local() + offset; }

  Communicator& communicator_;
  const ExpertParallelConfig config_;
  const DType dtype_;
  const std::int32_t num_ranks_;
  const std::int32_t rank_;
  const ExpertMap map_;
  const Layout layout_;
  const std::uint64_t recoveries_;
  std::unique_ptr<Window> window_;
  RankSums sums_;
  RowWriter writer_;

  std::uint64_t epoch_ = 0;  ///< Backwards.
  std::int64_t num_tokens_ = 0;
  GradientRoute route_{};
  SendPlan plan_;
  Placement placement_;
  std::vector<std::int64_t> counts_;
  std::vector<std::int32_t> partial_row_;
  std::vector<std::uint64_t> wishes_;  ///< [R] of each rank, kTokens + kWeight.
};

}  // namespace switchyard
