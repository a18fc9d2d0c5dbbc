#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "switchyard/assignments.hpp"
#include "switchyard/router.hpp"
#include "switchyard/tensor.hpp"

/// Statistics of a routing, on the host and in double. Formulas and sources: docs/metrics.md.
/// Python's sw.metrics has the same names. Entropies and information are in nats. Bad input is an
/// Error{kInvalidArgument} that names the value.
namespace switchyard::metrics {

/// What a router decided, and what it said of all experts. Host memory.
struct Routed {
  std::int32_t num_experts = 0;
  AnyAssignments assignments{};         ///< Before any is dropped. Weights may be missing.
  Vector<const std::uint8_t> kept{};    ///< [T*K or A] what a capacity has left; or empty.
  Matrix<const float> logits{};         ///< [T, E], null experts' columns behind them; or empty.
  Score score = Score::kSoftmax;        ///< Of the logits: p are sigmoids by their sum, or softmax.
  Vector<const std::int64_t> counts{};  ///< [E] before any is dropped; empty: they are counted.
};

/// [E] assignments of each expert, before any is dropped.
[[nodiscard]] std::vector<std::int64_t> counts(const Routed& a);

/// Of counts n_e, N in all. Without any assignment all are 0 but dead_experts.
struct Load {
  double cv = 0;        ///< Population deviation / mean.
  double cv_floor = 0;  ///< sqrt((E-1)/N): what uniform random routing has.
  double max_over_mean = 0;
  double min_over_mean = 0;
  double kl = 0;                 ///< Of the shares n_e/N to uniform ones: ln E - their entropy.
  double entropy = 0;            ///< That of the shares / ln E; 1 for one expert.
  double effective_experts = 0;  ///< exp of that of the shares.
  double gini = 0;
  std::int64_t dead_experts = 0;  ///< Without any assignment.
};
[[nodiscard]] Load load(Vector<const std::int64_t> counts);

/// max/mean over ranks, of which r has the experts [r*E/R, (r+1)*E/R): what sets the time of a step
/// over ranks. 0 without any assignment.
[[nodiscard]] double rank_imbalance(Vector<const std::int64_t> counts, std::int32_t ranks);

/// Three that are taken for each other, and information = marginal - router >= 0: of token and
/// expert under the router, large where it is sure and balanced.
struct Entropies {
  double router = 0;    ///< Mean over tokens of that of p, 0 to ln E.
  double marginal = 0;  ///< That of the mean of p, 0 to ln E.
  double information = 0;
  std::optional<double> weights{};  ///< Mean of that of the chosen weights by their sum, 0 to ln K.
};
/// Of `a.logits`, which must be there.
[[nodiscard]] Entropies entropies(const Routed& a);

/// Shares of what is gone.
struct Drops {
  double assignments = 0;
  double tokens = 0;                ///< Tokens with none left, though they had some.
  std::optional<double> mass{};     ///< Of the weights, where there are some.
  std::vector<double> by_choice{};  ///< Of first, second, ... choices: their overflow.
};
/// Of `a.kept`, which must be there.
[[nodiscard]] Drops drops(const Routed& a);

/// 1 - used / computed: the share of computed rows that are padding. 0 where none are computed.
[[nodiscard]] double padding_waste(std::int64_t rows_used, std::int64_t rows_computed);

/// [E, E] the share of the tokens of expert i that also go to j, N_ij / N_i: 1 on the diagonal, 0
/// for an expert without tokens.
[[nodiscard]] std::vector<double> coactivation(const Routed& a);

/// 1 - |A and B| / |A| over the experts A, then B of the same tokens: at two steps, with and
/// without noise, ...
[[nodiscard]] double churn(const AnyAssignments& before, const AnyAssignments& after);

/// Mutual information of a token's type and its experts.
struct Information {
  double plug_in = 0;
  double bias = 0;  ///< By Miller and Madow: (|joint| - |types| - |experts| + 1) / 2N.
  double corrected = 0;
  double normalised = 0;  ///< plug_in by the smaller of both entropies.
  /// Of permutations of the tokens: the mean, and the share that has as much (the data itself is
  /// one of them). Empty without permutations.
  std::optional<double> null_mean{};
  std::optional<double> p{};
};
/// @param types  [T] any numbers. Permutations are drawn from `seed`.
[[nodiscard]] Information information(Vector<const std::int64_t> types, const Routed& a,
                                      int permutations = 100, std::uint64_t seed = 0);

/// What to log for a layer and a step: what can be said of `a`.
struct Routing {
  std::vector<std::int64_t> counts{};  ///< [E] before any is dropped.
  Load load{};
  std::optional<Entropies> entropies{};    ///< Where there are logits.
  std::optional<Drops> drops{};            ///< Where there is `kept`.
  std::optional<double> rank_imbalance{};  ///< Of more than one rank.
};
[[nodiscard]] Routing routing(const Routed& a, std::int32_t ranks = 1);

}  // namespace switchyard::metrics
