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

/// One step of the thresholds of ExpertThresholdRouter, on the host: after the optimizer's step.
struct ThresholdUpdate {
  Matrix<const float> logits{};  ///< [T, E] of this rank: SavedForward::logits().
  std::int32_t top_k = 1;        ///< Experts of a token on average: 1 <= K <= E.
  double momentum = 0.99;        ///< Of what was before; in [0, 1].
  Vector<float> bias{};          ///< [E] in and out: thresholds with a minus.
  Communicator* communicator = nullptr;
};

/// bias_e = momentum * bias_e - (1 - momentum) * q_e, q_e the (1 - K/E) quantile of the
/// probabilities of e: the (C+1)-th largest of the rank's tokens, C = K T / E rounded down, so that
/// C are above it; 0 where C is T, which all exceed. Over ranks collective: the mean of
/// the ranks' q by their tokens. Without tokens nothing changes.
/// @throws Error{kInvalidArgument}: shapes disagree, K or the momentum is out of range; {kTimeout},
///         {kCommunication}.
/// Source: expert threshold routing (arXiv:2603.11535).
void update_thresholds(const ThresholdUpdate& update);

}  // namespace switchyard
