#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "switchyard/tensor.hpp"

namespace switchyard {

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

/// The best expert, and a second one that may be left out: two columns, weights softmax over both
/// logits, made before the second is left out, so what it would have had is lost.
/// Source: GShard, Lepikhin et al. 2020 (arXiv:2006.16668) section 2.2, algorithm 1; the threshold
///         is Mesh TensorFlow's.
struct GShardRouter {
  enum class Second : std::uint8_t {
    kAll,        ///< Always there.
    kThreshold,  ///< Where its weight exceeds `threshold`.
    kRandom,  ///< In training with probability weight / threshold, at most 1; else always. GShard's
              ///< is 0.5: 2 w.
  };
  Second second = Second::kRandom;
  float threshold = 0.5F;  ///< In (0, 1].
  bool sampled = false;    ///< In training the second is drawn: logits + Gumbel noise.
};

/// Null experts stand beside the E: N more columns of the gate behind theirs, without work. Each
/// token takes the `top_k` largest of all E + N logits, ties to the lower column; what falls on
/// null experts leaves the token with fewer experts, and never travels. Weights are the softmax
/// over the logits of the experts that it has: they sum to 1, or there are none. Source: AdaMoE,
/// Zeng et al. 2024 (arXiv:2406.13233) section 3.
struct AdaMoeRouter {
  std::int32_t top_k = 1;         ///< Null experts included: 1 <= K <= E.
  std::int32_t null_experts = 1;  ///< N >= 1.
};

/// Experts in descending probability (softmax over all) up to and including the one with which
/// their sum exceeds `threshold`; weights are the probabilities. From one to all experts a token.
/// Source: Huang et al. 2024 (arXiv:2403.07652) section 3.
struct TopPRouter {
  float threshold = 0.4F;  ///< In (0, 1]; 1: all.
};

/// Every expert whose logit is positive, which is its weight: from none to all.
/// Source: ReMoE, Wang et al. 2024 (arXiv:2412.14711) section 3.1.
struct ReluRouter {};

/// Experts choose: of each group of tokens an expert takes the C with the largest probability
/// (softmax over the experts), ties to the lower token; C = capacity_factor * group * top_k / E,
/// rounded down, at least 1 and at most the group. Weights are the probabilities. From none to all
/// experts a token. Not causal: a later token of the group may take an earlier one's place.
/// Source: Zhou et al. 2022 (arXiv:2202.09368) section 3.1.
struct ExpertChoiceRouter {
  std::int32_t top_k = 1;      ///< Experts of a token on average, with a factor of 1.
  double capacity_factor = 1;  ///< > 0.
  /// Tokens that are chosen among, neighbouring ones: those of a sequence. Must divide T; 0: all
  /// tokens of the call.
  std::int64_t group = 0;
};

/// An expert takes every token whose probability (softmax over the experts) is above the expert's
/// threshold: probability + selection bias > 0, so thresholds are negative biases; without them
/// 1 / E. Weights are the probabilities. From none to all experts a token. What expert choice
/// becomes where later tokens are not known: update_thresholds() follows its quantiles.
/// Source: expert threshold routing (arXiv:2603.11535).
struct ExpertThresholdRouter {};

/// `top_k` different experts by the token's id, each with the weight 1 / K: no logits, nothing to
/// learn. Number k of token id v is splitmix64((v << 8 | j) ^ (salt << 40)) mod E for the next j
/// from 0 whose expert is not taken (from j = 256 on the lowest that is free); or the table's.
/// Source: Roller et al. 2021 (arXiv:2106.04426) section 3.
struct HashRouter {
  std::int32_t top_k = 1;
  std::uint64_t salt = 0;
  /// [V, K] different experts of every token id; null: they are hashed.
  std::shared_ptr<const std::vector<std::int32_t>> table{};
};

/// Loads as they are asked for, whoever the tokens are: for benchmarks. `top_k` different experts,
/// weights 1 / K, no logits. The last three have exactly the counts that are nearest to the shares
/// (largest remainders, at most T an expert), in every call; which token gets which is drawn.
struct ForcedRouter {
  enum class Load : std::uint8_t {
    kUniform,     ///< Drawn for every token, all experts alike.
    kRoundRobin,  ///< (first_token + t) K + k mod E: every load is the same to one token.
    kZipf,        ///< Expert e has a share of 1 / (e + 1)^amount.
    kHot,         ///< Expert 0 has the share `amount` of the assignments, the others the rest.
    kDirichlet,   ///< Shares drawn from a symmetric Dirichlet distribution of this concentration.
  };
  Load load = Load::kUniform;
  std::int32_t top_k = 1;
  double amount = 1;
};

/// The kinds of router. What is to be said about a new one, the compiler asks for: every place that
/// depends on the kind is a visit of all of them, or asks for one by name.
using Router = std::variant<TopKRouter, GShardRouter, AdaMoeRouter, TopPRouter, ReluRouter,
                            ExpertChoiceRouter, ExpertThresholdRouter, HashRouter, ForcedRouter>;

/// What is random about the logits of a call in training, whatever is then made of them.
struct RouterNoise {
  enum class Kind : std::uint8_t {
    kNone,
    /// The router (never the experts) sees each number of a token times 1 + size * (2 u - 1), u
    /// uniform. Source: Switch, Fedus et al. 2021 (arXiv:2101.03961) section 2.4.
    kInputJitter,
    /// size * n is added to each logit, n normal; what is saved and what losses see are the sums.
    /// Source: V-MoE, Riquelme et al. 2021 (arXiv:2106.05974) section 2.1: size 1 / E.
    kLogits,
    /// (softplus(x . noise gate) + size) * n is added to each logit: the router learns where it is
    /// unsure, by a matrix [E, H] beside the gate. Source: Shazeer et al. 2017 (arXiv:1701.06538)
    /// section 2.1 equation 4; the floor `size` is Tensor2Tensor's noise_epsilon.
    kLearned,
  };
  Kind kind = Kind::kNone;
  float size = 0;  ///< >= 0; of the jitter < 1.

  /// Whether it is added to logits, so that two of them which are equal are no longer.
  [[nodiscard]] bool is_on_logits() const {
    return kind == Kind::kLogits || kind == Kind::kLearned;
  }
};

/// What a router's logits are made of: l = G z + b with a gate G [E, D] and features z [D] of a
/// token x [H]. Their parameters are one array of f32, LayerModel::router_network, of the matrices
/// that are named here, row-major and behind each other. On CUDA M is a multiple of 8.
struct RouterNetwork {
  enum class Kind : std::uint8_t {
    kLinear,  ///< z = x: D = H, no parameters.
    /// z = P x / |P x|, P [M, H], D = M; rows of G are divided by their lengths too, and multiplied
    /// by e^s, s [1], at most 100. Lengths are sqrt(sum of squares + kCosineEpsilon).
    /// Source: X-MoE, Chi et al. 2022 (arXiv:2204.09179) section 3; the clamp is Tutel's.
    kCosine,
    /// z = gelu(W1 x + b1), W1 [M, H], b1 [M]; D = M.
    kMlp,
    /// z = x * (W2 gelu(W1 x + b1) + b2), number by number: W1 [M, H], b1 [M], W2 [H, M], b2 [H];
    /// D = H.
    kHadamard,
  };
  Kind kind = Kind::kLinear;
  std::int32_t width = 0;  ///< M >= 1; 0: max(64, H / 2).

  [[nodiscard]] bool is_linear() const { return kind == Kind::kLinear; }
  /// M, of a layer with this hidden size.
  [[nodiscard]] std::int64_t inner(std::int64_t hidden) const {
    return width > 0 ? width : std::max<std::int64_t>(64, hidden / 2);
  }
  /// D: columns of the gate.
  [[nodiscard]] std::int64_t features(std::int64_t hidden) const {
    return kind == Kind::kCosine || kind == Kind::kMlp ? inner(hidden) : hidden;
  }
  /// Numbers of LayerModel::router_network.
  [[nodiscard]] std::int64_t size(std::int64_t hidden) const {
    const std::int64_t matrix = inner(hidden) * hidden;
    switch (kind) {
      case Kind::kLinear: return 0;
      case Kind::kCosine: return matrix + 1;
      case Kind::kMlp: return matrix + inner(hidden);
      case Kind::kHadamard: return 2 * matrix + inner(hidden) + hidden;
    }
    return 0;
  }
};

inline constexpr float kCosineEpsilon = 1e-12F;
/// "linear", "cosine", "mlp", "hadamard".
[[nodiscard]] const char* to_string(RouterNetwork::Kind kind) noexcept;

/// Chain-of-Experts: a layer's experts in C iterations, each with a gate of its own and a routing
/// by the rule of the configuration:
///   x_c = MoE_c(x_(c-1)) [+ x_(c-1)],  out = x_C [+ x_0]
/// The sums are f32. C iterations of K / C experts do the experts' work of one pass of K, one after
/// the other. Of a layer: route() is one iteration's.
/// Source: Wang et al. 2025 (arXiv:2506.18945) section 2.
struct ChainConfig {
  std::int32_t iterations = 0;  ///< C >= 1; 0: no chain.
  bool inner_residual = true;   ///< Whether an iteration adds to what it was given.
  bool outer_residual = false;  ///< Whether the layer adds to what it was given.
};

/// Experts that cost nothing, the last ids of a router in this order: a token's own rank makes what
/// they add, from the token alone, so their picks have no rows and never travel. With the pick's
/// weight g a constant expert adds g (a1 x + a2 v), (a1, a2) = softmax(W x), W [2, H] and v [H] its
/// own and learned, LayerModel::constant_experts; a copy expert g x; a zero expert nothing.
/// Source: MoE++, Jin et al. 2024 (arXiv:2410.07348) section 3.1; copies alone LongCat-Flash
///         (arXiv:2509.01322) section 2.1.
struct ZeroComputationExperts {
  std::int32_t constant = 0;
  std::int32_t copy = 0;
  std::int32_t zero = 0;
  /// In (0, 1]: what one of them counts in the balance loss where another expert counts 1, and of
  /// the slots of a capacity the share that an expert has of theirs (capacity_for()): less sends
  /// more tokens to them. MoE++ section 3.3, its best is 0.75. 0, as LongCat-Flash has it: they
  /// count as all others in the loss, take an expert's slots from none and are never full.
  float tau = 0;

  [[nodiscard]] std::int32_t total() const { return constant + copy + zero; }
};

/// The rule by which experts are chosen and weighted.
struct RouterConfig {
  std::int32_t num_experts = 0;  ///< E >= 1, those of `zero_computation` included.
  Router kind{};
  RouterNoise noise{};
  ChainConfig chain{};      ///< Of rules by logits, but not with learned noise.
  RouterNetwork network{};  ///< Of rules by logits, but not of a chain.
  ZeroComputationExperts zero_computation{};
  /// A layer's logits are G z + b + R l with l [E] those of the token in the layer before
  /// (RouteRequest::previous_logits) and a learned matrix R [E, E], LayerModel::gating_residual.
  /// Of rules by logits, but not of a chain, nor with null experts.
  /// Source: MoE++ section 3.2.
  bool gating_residual = false;

  /// Experts that have weights and rows: the first ids.
  [[nodiscard]] std::int32_t num_computing() const {
    return num_experts - zero_computation.total();
  }
  /// Columns of the routing, the most experts that a token may be given: K, or E where the rule
  /// gives any number (is_variable()). Places behind a token's last expert are -1.
  [[nodiscard]] std::int32_t top_k() const;
  /// Rows of a gate and a router's bias, columns of the logits: E, and behind them one for every
  /// null expert.
  [[nodiscard]] std::int32_t num_logits() const {
    const auto* adamoe = std::get_if<AdaMoeRouter>(&kind);
    return num_experts + (adamoe == nullptr ? 0 : adamoe->null_experts);
  }
  [[nodiscard]] bool is_chain() const { return chain.iterations > 0; }
  /// Gates, and so biases, behind each other: those of a chain's iterations, or one.
  [[nodiscard]] std::int32_t num_gates() const { return is_chain() ? chain.iterations : 1; }
  /// Rows of the gate's matrix: num_logits() of each of num_gates().
  [[nodiscard]] std::int64_t gate_rows() const { return std::int64_t{num_gates()} * num_logits(); }
  /// Whether a token may have any number of experts: then there is no K, and so no capacity.
  [[nodiscard]] bool is_variable() const {
    return std::holds_alternative<TopPRouter>(kind) || std::holds_alternative<ReluRouter>(kind) ||
           std::holds_alternative<ExpertChoiceRouter>(kind) ||
           std::holds_alternative<ExpertThresholdRouter>(kind);
  }
  /// Whether there is a gate and something to learn; else experts follow from ids or places.
  [[nodiscard]] bool has_logits() const {
    return !std::holds_alternative<HashRouter>(kind) && !std::holds_alternative<ForcedRouter>(kind);
  }
  [[nodiscard]] bool is_top_k() const { return std::holds_alternative<TopKRouter>(kind); }
  /// What its probabilities over all experts are made by, for losses and metrics.
  [[nodiscard]] Score score() const { return is_top_k() ? as_top_k().score : Score::kSoftmax; }
  /// Of a router that is one.
  [[nodiscard]] const TopKRouter& as_top_k() const { return std::get<TopKRouter>(kind); }
  [[nodiscard]] TopKRouter& as_top_k() { return std::get<TopKRouter>(kind); }
};

inline std::int32_t RouterConfig::top_k() const {
  struct Columns {
    std::int32_t num_experts;
    std::int32_t operator()(const TopKRouter& router) const { return router.top_k; }
    std::int32_t operator()(const GShardRouter& /*router*/) const { return 2; }
    std::int32_t operator()(const AdaMoeRouter& router) const { return router.top_k; }
    std::int32_t operator()(const TopPRouter& /*router*/) const { return num_experts; }
    std::int32_t operator()(const ReluRouter& /*router*/) const { return num_experts; }
    std::int32_t operator()(const ExpertChoiceRouter& /*router*/) const { return num_experts; }
    std::int32_t operator()(const ExpertThresholdRouter& /*router*/) const { return num_experts; }
    std::int32_t operator()(const HashRouter& router) const { return router.top_k; }
    std::int32_t operator()(const ForcedRouter& router) const { return router.top_k; }
  };
  return std::visit(Columns{num_experts}, kind);
}

/// @throws Error{kInvalidArgument} that names the value which breaks a rule above.
void check(const RouterConfig& config);

/// Slots for one source rank of T tokens. 0: any number.
struct RouterCapacity {
  std::int64_t computing = 0;         ///< Of an expert with rows.
  std::int64_t zero_computation = 0;  ///< Of one of RouterConfig::zero_computation.
};
/// With K = top_k(): capacity_of(factor, T, K, E), and any number of zero-computation experts;
/// where these have a tau, of Z among E = N + Z experts
///   computing         ceil(factor tau T K / (tau N + Z) - 1e-9),
///   zero_computation  ceil(factor T K / (tau N + Z) - 1e-9), each at least 1 where T is not 0.
/// Source: MoE++ (arXiv:2410.07348) section 3.3, times K as all capacities here.
/// @throws as capacity_of().
[[nodiscard]] RouterCapacity capacity_for(const RouterConfig& config, double factor,
                                          std::int64_t num_tokens);

/// A table for HashRouter that balances: token ids in descending frequency take the `top_k` experts
/// with the least load so far, ties to the lower id. @param frequency  [V] of each token id.
/// @throws Error{kInvalidArgument}: a frequency is negative, or top_k is not in [1, E].
/// Source: "balanced assignment" of Roller et al. 2021 (arXiv:2106.04426) section 3.1.
[[nodiscard]] std::vector<std::int32_t> balanced_hash_table(
    const std::vector<std::int64_t>& frequency, std::int32_t num_experts, std::int32_t top_k);

}  // namespace switchyard
