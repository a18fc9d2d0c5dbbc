#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "switchyard/execution.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

class TensorMaps;

/// How a token's scores are made from its logits.
enum class Score : std::uint8_t {
  kSoftmax,      ///< Softmax over all experts, then the top_k largest.
  kTopkSoftmax,  ///< The top_k largest logits, then softmax over the chosen ones.
  kSigmoid,      ///< Sigmoid of each logit; selection by sigmoid + selection bias.
  kSparseMixer,  ///< The top_k largest logits; of each, a softmax over it and those not above it
                 ///< that are near it, see kMixerMargin. No groups, no selection bias; CPU only.
};

/// Score::kSparseMixer: the weight of the chosen expert with logit m is 1 / sum of exp(x - m) over
/// all experts that no larger choice took and whose logits x have (m - x) / max(|x|, m) <= this.
/// Every weight is a share of its own sum: they do not sum to 1.
/// Source: Phi-3.5-MoE, `sparsemixer` of its modelling code, 2 * router_jitter_noise;
/// SparseMixer-v2,
///         Liu et al. 2024 (arXiv:2409.12136).
inline constexpr float kMixerMargin = 0.02F;

/// What a group of experts is worth when only some groups may be chosen from.
enum class GroupScore : std::uint8_t {
  kMax,      ///< Its best selection score (DeepSeek-V2).
  kTop2Sum,  ///< The sum of its two best selection scores (DeepSeek-V3).
};

/// Each token takes the `top_k` experts with the best selection scores, ties to the lower id.
/// Source: softmax gate, Shazeer et al. 2017 (arXiv:1701.06538) section 2.1; sigmoid with bias and
///         groups, DeepSeek-V3 (arXiv:2412.19437) section 2.1.2; best of a group, DeepSeek-V2
///         (arXiv:2405.04434) section 2.1.3.
struct TopKRouter {
  std::int32_t top_k = 0;  ///< 1 <= K <= E; K <= experts of the chosen groups.
  Score score = Score::kSoftmax;
  bool renormalize = true;      ///< Scale the chosen scores to sum to 1 (before `scale`).
  float scale = 1.0F;           ///< Multiplies every weight, last.
  std::int32_t groups = 1;      ///< Groups of E/groups neighbouring experts; must divide E.
  std::int32_t top_groups = 1;  ///< Groups that may be chosen from; top_groups <= groups.
  GroupScore group_score = GroupScore::kMax;
};

/// The kinds of router. What is to be said about a new one, the compiler asks for: every place that
/// depends on the kind is a visit of all of them.
using Router = std::variant<TopKRouter>;

/// The rule by which experts are chosen and weighted.
struct RouterConfig {
  std::int32_t num_experts = 0;  ///< E >= 1.
  Router kind{};

  /// K: columns of a dense routing, the most experts that a token may be given.
  [[nodiscard]] std::int32_t top_k() const { return as_top_k().top_k; }
  [[nodiscard]] const TopKRouter& as_top_k() const {
    return std::visit([](const TopKRouter& router) -> const TopKRouter& { return router; }, kind);
  }
  [[nodiscard]] TopKRouter& as_top_k() {
    return std::visit([](TopKRouter& router) -> TopKRouter& { return router; }, kind);
  }
};

/// @throws Error{kInvalidArgument} that names the value which breaks a rule above.
void check(const RouterConfig& config);

/// Who does what for every token, in descending selection score.
struct Routing {
  Matrix<std::int32_t> expert{};  ///< [T, K] ids in [0, E); -1 where a token uses fewer than K.
  Matrix<float> weight{};         ///< [T, K] the weight of each.
};

/// What routing decided, on the host. All of this rank's tokens.
struct RoutingRecord {
  std::vector<std::int32_t> expert{};       ///< [T, K].
  std::vector<float> weight{};              ///< [T, K].
  std::vector<std::uint8_t> kept{};         ///< [T, K].
  std::vector<std::int64_t> counts{};       ///< [E] before capacity.
  std::vector<std::int64_t> counts_kept{};  ///< [E] after.
};

/// What a call asks of the router besides the choice. What is left empty costs nothing.
struct RouteRequest {
  /// out [T], where the logits are: the token's largest unbiased score over all experts (softmax
  /// probability, or sigmoid), the order of DropPolicy::kBpr.
  Vector<float> top_score{};
  /// out: MoeLayer::forward fills it, for only a layer knows what was kept; route() takes none.
  RoutingRecord* record = nullptr;
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

struct RouteArgs {
  Matrix<const float> logits{};          ///< [T, E].
  Vector<const float> selection_bias{};  ///< [E], or empty; added to the score for selection only.
  RouterConfig config{};
  Routing routing{};  ///< out, allocated by the caller.
  RouteRequest request{};
  Execution execution{};
};

/// Choose the experts of every token. Every implementation gives the same ids for the same scores;
/// scores differ by a few float ulp.
///
/// @throws Error{kInvalidArgument}: a shape disagrees, the configuration breaks a rule, a selection
///         bias is not finite, a record is asked for, or a logit is NaN (the message names the
///         lowest token and its lowest expert; on CUDA it is left in the status record instead).
///         {kUnsupported}: no implementation accepts it; the message has each one's reason.
/// Cost: reads 4*T*E bytes, writes 8*T*K.
void route(const RouteArgs& args);

}  // namespace switchyard
