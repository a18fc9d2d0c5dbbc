#pragma once

#include <cstdint>

#include "switchyard/comm.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// One step of balancing without a loss, on the host: after the optimizer's step, never in a
/// forward, so that a step's microbatches and its recomputation all choose alike.
struct SelectionBiasUpdate {
  /// [E] assignments before any was dropped, of all steps that were accumulated: for example sums
  /// of RoutingRecord::counts or SavedForward::counts(). Of this rank where there is a
  /// communicator.
  Vector<const std::int64_t> counts{};
  double rate = 1e-3;     ///< >= 0; DeepSeek-V3: 1e-3, and 0 towards the end.
  bool centered = false;  ///< Takes the mean of all moves from each, so that the mean bias stays.
  Vector<float> bias{};   ///< [E] in and out: LayerModel::selection_bias.
  Communicator* communicator = nullptr;  ///< Counts are summed over its ranks; null: one rank.
};

/// bias_e += rate * sign(mean of counts - counts_e): experts with fewer tokens than the mean come
/// to be chosen more. Over ranks collective; equal biases stay equal on all, bit for bit.
/// @throws Error{kInvalidArgument}: shapes disagree, a count is negative, the rate is not a number
///         from 0; {kTimeout}, {kCommunication}.
/// Source: loss-free balancing, Wang et al. 2024 (arXiv:2408.15664) algorithm 1; DeepSeek-V3
///         (arXiv:2412.19437) section 2.1.2; centred as torchtitan has it.
void update_selection_bias(const SelectionBiasUpdate& update);

}  // namespace switchyard
