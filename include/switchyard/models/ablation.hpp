#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "switchyard/models/model.hpp"
#include "switchyard/models/text.hpp"

namespace switchyard::models {

// What a model loses where its routing is not followed: by tokens that take others' experts, and by
// experts that give nothing.

/// What becomes of the weight of an assignment whose expert is ablated. No other expert comes in
/// its place in either.
enum class AblatedWeight : std::uint8_t {
  /// Its term of the token's sum is 0 and all others stay: zero ablation, and what a full expert
  /// does to a token (Fedus et al. 2021, Switch Transformer, arXiv:2101.03961, 2.2).
  kDrop,
  /// The token's other weights are scaled so that their sum stays; of a token that has no other it
  /// is dropped. What leaving out an expert does to a router that normalises over those that it
  /// takes (Lu et al. 2024, "Not All Experts are Equal", arXiv:2402.14800).
  kRenormalise,
};

/// "drop", "renormalise".
[[nodiscard]] const char* to_string(AblatedWeight weight) noexcept;
/// @throws Error{kInvalidArgument} with both names.
[[nodiscard]] AblatedWeight parse_ablated_weight(std::string_view name);

struct AblationOptions {
  AblatedWeight weight = AblatedWeight::kDrop;
  std::int64_t max_tokens = 16384;  ///< Of the text, by sampled_windows().
  std::int64_t sequences = 16;      ///< Windows of a call; routing is shuffled inside of one.
  std::uint64_t seed = 0;           ///< Of the shuffles.
  std::function<void(double)> progress{};  ///< Share of all passes that is done; may be empty.
};

/// What ablate() will do: passes of tokens.
struct AblationCost {
  std::int64_t windows = 0, tokens = 0;  ///< Of one pass.
  std::int64_t passes = 0;  ///< 2 + the sum over MoE layers of 1 + E: forwards of these tokens.
};
/// @throws Error{kInvalidArgument}: as ablate(). Cost: none.
[[nodiscard]] AblationCost count_ablations(const Model& model, const Text& text,
                                           const AblationOptions& options = {});

/// One pass: nats of the targets of each window, the sum over tokens in order.
struct PassLoss {
  std::vector<double> nats{};  ///< [windows].
};

struct ExpertAblation {
  std::int64_t assignments = 0;  ///< That it has in the base pass, and does not have in this.
  PassLoss loss{};
};

struct LayerAblation {
  std::int32_t layer = 0;                 ///< In the model.
  PassLoss shuffled{};                    ///< Routing shuffled in this layer alone.
  std::vector<ExpertAblation> experts{};  ///< [E] each alone ablated.
};

struct Ablations {
  std::vector<Window> windows{};
  std::vector<std::int64_t> bytes{};  ///< [windows] that the targets stand for.
  PassLoss base{};
  PassLoss shuffled{};  ///< In all layers.
  std::vector<LayerAblation> layers{};
};

/// Losses of the same held-out tokens with the routing as it is, and changed. Differences are
/// paired by window; where experts do not matter they are 0.
///
/// Shuffled: each token of a call takes the experts and the weights of another one of the call, by
/// a random cycle of its tokens (Sattolo 1986), a function of (seed, layer, call): loads stay, and
/// what is lost is what knowing the token is worth to the choice.
/// Ablated: every assignment of that expert in that layer goes, as AblatedWeight says; shared
/// experts stay.
/// @throws Error{kInvalidArgument}: the vocabulary is not that of the text, the model has no MoE
///         layer, an option; {kUnsupported}: as Model::evaluate() with a hook; the router chain.
/// Cost: AblationCost::passes forwards; what a pass changes of a layer is computed twice there.
[[nodiscard]] Ablations ablate(Model& model, const Text& text, const AblationOptions& options = {});

}  // namespace switchyard::models
