#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "switchyard/models/model.hpp"

namespace switchyard::models {

/// How a token is drawn from logits. In this order: of the `top_k` largest logits, ties to the
/// lower id; divided by the temperature; of their probabilities in descending order up to and
/// including the one with which the sum reaches `top_p`. Source of the last: Holtzman et al. 2019
/// (arXiv:1904.09751).
struct SampleConfig {
  double temperature = 1;  ///< >= 0; 0: the largest logit, nothing is drawn.
  std::int64_t top_k = 0;  ///< 0: all.
  double top_p = 1;        ///< In (0, 1].
  std::uint64_t seed = 0;
};

/// @throws Error{kInvalidArgument} that names the value out of range.
void check(const SampleConfig& config);

/// The token of sequence `row` at `position`: a function of all arguments and of nothing else.
/// Probabilities in double. Philox4x32-10, key `seed`, counter (row, position).
/// @param logits  [V]. @throws Error{kInvalidArgument}: one is not a number.
[[nodiscard]] std::int32_t sample(std::span<const float> logits, const SampleConfig& config,
                                  std::int64_t row, std::int64_t position);

struct GenerateArgs {
  std::vector<std::int32_t> prompt{};  ///< At least one token.
  std::int64_t batch = 1;              ///< Sequences behind the same prompt.
  std::int64_t max_new_tokens = 1;
  SampleConfig sampling{};
  /// Sequence b has the same tokens whatever the batch's size, on a GPU too, where sequences go one
  /// after the other for it; on a CPU they have them anyway.
  bool batch_invariant = false;
  /// Told after each token of all sequences; true ends it there. May be empty. Where sequences go
  /// one after the other it is told of the first, and where it ends that all others end too.
  std::function<bool(std::int64_t done)> on_token{};
};

struct Generation {
  std::vector<std::vector<std::int32_t>> tokens{};  ///< [batch][new tokens], without the prompt.
  double prompt_seconds = 0;                        ///< The prompt, all sequences.
  double decode_seconds = 0;                        ///< The rest.
};

/// Continues a prompt by a cache of keys and values. Sequence b has the same tokens whatever the
/// batch's size; on a GPU but for near ties, since sizes have kernels of their own, unless
/// batch_invariant is set. There greedy tokens stay on the GPU from step to step, and the host sees
/// them a step later.
/// @throws Error{kInvalidArgument}: the prompt is empty or has an id that the model has not; prompt
///         and new tokens are more than ModelConfig::sequence; as check(); {kUnsupported}: the
///         router is not causal.
/// Cost: a forward of the prompt for each sequence, then of one token for each that is made.
[[nodiscard]] Generation generate(Model& model, const GenerateArgs& args);

}  // namespace switchyard::models
