#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "switchyard/models/model.hpp"
#include "switchyard/models/text.hpp"
#include "switchyard/routing/metrics.hpp"

namespace switchyard::models {

// What a trained model's routers have come to, on held-out text. Formulas: docs/metrics.md; how
// they are to be read: docs/models.md.

/// Which experts the tokens of a text have, in every MoE layer.
struct TextRouting {
  std::vector<std::int64_t> token_types{};  ///< [T] each token's id.
  std::vector<std::int64_t> documents{};    ///< [T] index of its document.
  std::vector<LayerRouting> layers{};       ///< Each MoE layer, ascending: [T, K].

  [[nodiscard]] std::int64_t num_tokens() const { return std::ssize(token_types); }
};

struct TextRoutingOptions {
  std::int64_t max_tokens = 32768;         ///< Of the text, by sampled_windows().
  std::int64_t sequences = 16;             ///< Windows of a call.
  std::function<void(double)> progress{};  ///< Share of the windows that are done; may be empty.
};

/// What the routers decide for every token that is read in sampled_windows(): routing as in
/// inference, without noise and without a capacity. Short windows are padded with tokens 0, which
/// are not in the result. Memory: 8 K L T bytes. Cost: a forward of these tokens.
/// @throws Error{kInvalidArgument}: the vocabulary is not that of the text; the model has no MoE
///         layer; an option; {kUnsupported}: as Model::evaluate() with a hook.
[[nodiscard]] TextRouting route_text(Model& model, const Text& text,
                                     const TextRoutingOptions& options = {});

/// Of one MoE layer.
struct LayerSpecialisation {
  std::int32_t layer = 0;                          ///< In the model.
  std::vector<std::int64_t> counts{};              ///< [E] assignments.
  metrics::Load load{};                            ///< Of the counts.
  metrics::Information token_type{};               ///< MI(token id; expert), nats.
  std::optional<metrics::Information> document{};  ///< MI(document; expert), of two and more.
  std::vector<double> coactivation{};              ///< [E, E] metrics::coactivation().
};

/// MI(type; expert) by its plug-in estimate, Miller and Madow's bias and a null of permuted tokens.
/// An untrained router sends equal tokens to equal experts too: what training has added is the
/// difference to the same figure behind Model::reset_routers().
/// @param permutations  Of each null. Cost: permutations * L * T * K steps, on one thread.
/// @throws Error{kInvalidArgument}: permutations < 0; a layer in which no token has an expert.
[[nodiscard]] std::vector<LayerSpecialisation> specialisation(const TextRouting& routing,
                                                              int permutations = 100,
                                                              std::uint64_t seed = 0);

/// Router saturation of each MoE layer: the share of the experts of `last` that the same token had
/// in `earlier` already, |E_earlier and E_last| / K on average over tokens; where tokens have
/// different numbers of experts, over all assignments of `last`. For experts chosen at random K /
/// E. Source: Muennighoff et al. 2024, OLMoE (arXiv:2409.02060), 5.1.
/// @throws Error{kInvalidArgument}: not of the same tokens and layers.
[[nodiscard]] std::vector<double> saturation(const TextRouting& earlier, const TextRouting& last);

/// metrics::churn() of each MoE layer: the share of the experts of `before` that a token does not
/// have in `after`. @throws as saturation().
[[nodiscard]] std::vector<double> churn(const TextRouting& before, const TextRouting& after);

}  // namespace switchyard::models
