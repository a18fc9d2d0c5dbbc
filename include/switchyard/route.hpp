#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/execution.hpp"
#include "switchyard/router.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

class TensorMaps;

/// Who does what for every token: K = RouterConfig::top_k() columns, in the order of choice where
/// the rule has one (descending selection score), else in ascending id.
struct Routing {
  Matrix<std::int32_t> expert{};  ///< [T, K] ids in [0, E); -1 where a token uses fewer than K.
  Matrix<float> weight{};         ///< [T, K] the weight of each; 0 beside -1.
};

/// What routing decided, on the host. All of this rank's tokens. Of a chain K is that of an
/// iteration and T stands for iterations times tokens, iteration after iteration.
struct RoutingRecord {
  std::vector<std::int32_t> expert{};       ///< [T, K].
  std::vector<float> weight{};              ///< [T, K].
  std::vector<std::uint8_t> kept{};         ///< [T, K].
  std::vector<std::int64_t> counts{};       ///< [E] before capacity.
  std::vector<std::int64_t> counts_kept{};  ///< [E] after.
};

/// What a call asks of the router besides the choice, and what the choice draws upon. What is left
/// empty costs nothing.
struct RouteRequest {
  /// out [T], where the logits are: the token's largest unbiased score over all experts (softmax
  /// probability, or sigmoid), the order of DropPolicy::kBpr. Of TopKRouter only.
  Vector<float> top_score{};
  /// out: MoeLayer::forward fills it, for only a layer knows what was kept; route() takes none.
  RoutingRecord* record = nullptr;

  /// Of a layer: out [T, E] RouterConfig::num_logits(), where the layer is, or empty: the logits
  /// that it routes by, as SavedForward::logits(). What is `previous_logits` of the layer behind.
  Matrix<float> logits{};
  /// Of a layer with RouterConfig::gating_residual, and only of one: [T, E] logits of the same
  /// tokens in the layer before, where the layer is.
  Matrix<const float> previous_logits{};
  /// [T] the text's token in each row, where the logits are; what HashRouter goes by.
  Vector<const std::int32_t> token_ids{};
  /// What is random is a function of these, the token (first_token + t) and the expert or column:
  /// the same for any number of threads and ranks, and in the backward.
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::int32_t layer = 0;
  std::int64_t first_token = 0;  ///< Tokens on the ranks before this one.
  /// Draw noise and samples; without it the rule's inference form, which draws nothing.
  bool training = false;
};

struct RouterGemmArgs {
  ConstRawMatrix tokens{};  ///< [T, H] f32, bf16 or f16.
  ConstRawMatrix gate{};    ///< [E, H] f32, bf16 or f16; on CUDA f32 or the tokens' type.
  /// CUDA: the kernel that precedes this call in the stream may have written the gate; otherwise it
  /// is fetched while that one still runs.
  bool gate_is_fresh = false;
  TensorMaps* gate_maps = nullptr;  ///< CUDA: who keeps what kernels read it by; null: made anew.
  Vector<const float> bias{};       ///< [E], or empty.
  Matrix<float> logits{};           ///< [T, E] out.
  Execution execution{};
};

/// logits = tokens * gate^T + bias, products and sums in fp32, ascending h.
/// @throws Error{kInvalidArgument}: shapes disagree; {kUnsupported}: nobody accepts the dtypes.
/// Cost: 2*T*E*H operations; reads T*H + E*H elements, writes 4*T*E bytes.
void router_gemm(const RouterGemmArgs& args);

struct NoiseArgs {
  ConstRawMatrix tokens{};   ///< kInputJitter: [T, H] f32, bf16 or f16.
  Matrix<float> jittered{};  ///< kInputJitter: out [T, H], or in and out a gradient of it.
  Matrix<float> logits{};    ///< kLogits, kLearned: in and out [T, E].
  Matrix<const float> noise_logits{};  ///< kLearned: [T, E] tokens * noise gate^T.
  RouterNoise noise{};
  RouteRequest request{};  ///< seed, step, layer, first_token.
  Execution execution{};
};

/// The noise of a call in training: of kInputJitter `jittered` = tokens times their factors, or,
/// without tokens, `jittered` times these factors, as its gradient goes back; of kLogits and
/// kLearned, `logits` plus theirs.
/// On CUDA the jitter and the normal numbers have the bits of a CPU's, and so have the sums of
/// kLogits; the softplus of kLearned differs by a few float ulp.
/// @throws Error{kInvalidArgument}: shapes disagree; {kUnsupported}: no implementation accepts it.
void add_noise(const NoiseArgs& args);

struct NoiseBackwardArgs {
  Matrix<const float> noise_logits{};  ///< [T, E] the forward's.
  Matrix<const float> dlogits{};       ///< [T, E] gradient of the logits with their noise.
  RouterNoise noise{};                 ///< kLearned.
  RouteRequest request{};              ///< The forward's.
  Matrix<float> dnoise_logits{};       ///< out [T, E].
  Execution execution{};
};

/// dnoise_logits = dlogits * n * sigmoid(noise_logits), n drawn again; zeros where the call did not
/// train, for then it drew none. The logits without noise have dlogits as it is.
/// @throws Error{kInvalidArgument}: shapes disagree, other noise; {kUnsupported}.
void noise_backward(const NoiseBackwardArgs& args);

struct RouteArgs {
  Matrix<const float> logits{};  ///< [T, E], with their noise; empty for rules without logits.
  /// [E], or empty; added to the score for selection only. Of TopKRouter and ExpertThresholdRouter.
  Vector<const float> selection_bias{};
  RouterConfig config{};
  /// CUDA: HashRouter's table [V, K], where it has one, in device memory; a CPU reads the router's.
  Matrix<const std::int32_t> hash_table{};
  Routing routing{};  ///< out, allocated by the caller.
  /// Of TopKRouter: so many tokens an expert has room for. Token after token takes its K
  /// best experts of those that have some left, as if there were no others; where these are fewer,
  /// the best of the full ones behind them. Weights are those of the experts taken. 0: any number.
  std::int64_t room = 0;
  RouteRequest request{};
  Execution execution{};
};

/// Choose the experts of every token. Every implementation gives the same ids for the same scores;
/// scores differ by a few float ulp.
///
/// @throws Error{kInvalidArgument}: a shape disagrees, the configuration breaks a rule, a selection
///         bias is not finite, a record is asked for, token ids are missing or out of the table's
///         range, a group does not divide T, or a logit is NaN (the message names the lowest token
///         and its lowest expert; on CUDA NaN and ids are left in the status record instead, and
///         the token gets no expert).
///         {kUnsupported}: no implementation accepts it; the message has each one's reason.
/// Cost: reads 4*T*E bytes, writes 8*T*K. With room on one thread (CUDA: one block), for a
/// token's choice depends on those before.
void route(const RouteArgs& args);

}  // namespace switchyard
