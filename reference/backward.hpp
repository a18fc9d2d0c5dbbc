#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/bounded.hpp"
#include "reference/expert.hpp"
#include "reference/layer.hpp"
#include "reference/router.hpp"

// Gradients by the derivatives of the definitions. Rounding passes a gradient as it is, and the
// choice of experts is a constant.

namespace switchyard::reference {

/// One token through the rule that made the weights of the experts `chosen` [K] (-1: unused):
/// [E] dlogits from dweight [K], added to `start` [E], or to none. Of gshard with both experts.
std::vector<Bounded> route_gradient(const RouterConfig& config, std::span<const Bounded> logits,
                                    std::span<const std::int32_t> chosen,
                                    std::span<const Bounded> dweight,
                                    std::span<const float> start = {});

/// The derivatives of inner_value(); that by `up` counts where the experts are gated. 0 at the bend
/// of relu; a clamp passes the gradient at its ends.
struct InnerSlopes {
  Bounded gate{};
  Bounded up{};
};
InnerSlopes inner_slopes(const ExpertConfig& config, Bounded gate, Bounded up);

/// Gradients of the parameters of experts, one after the other.
struct ExpertGradient {
  std::vector<Bounded> w13;  ///< [E * 2I, H] gate rows, then up rows; plain [E * I, H].
  std::vector<Bounded> w2;   ///< [E * H, I].
  std::vector<Bounded> b13;  ///< [E, 2I], plain [E, I]; empty: no biases.
  std::vector<Bounded> b2;   ///< [E, H], likewise.
};

/// Back through one expert, row by row.
class ExpertBackward {
 public:
  ExpertBackward(const ExpertConfig& config, const ExpertMatrices& matrices,
                 const Precision& precision);

  struct Row {
    Bounded weight{};         ///< Gradient of the row's weight.
    std::vector<Bounded> dx;  ///< [H].
  };
  /// x [H] and dout [H], the gradient of the token's weighted sum, as computed with.
  Row add(std::span<const double> x, std::span<const double> dout, Bounded weight);

  /// Of all rows so far.
  [[nodiscard]] ExpertGradient gradient() const;

 private:
  const ExpertConfig& config_;
  const ExpertMatrices& matrices_;
  DType compute_;
  bool may_round_inner_gradient_;
  double loss_;         ///< Of products of the forward; those of the way back are whole.
  std::int64_t width_;  ///< Of the pre-activation: 2I, plain I.
  std::vector<BoundedSum> w13_, w2_, b13_, b2_;
};

/// What the backward of a layer starts from.
struct BackwardInput {
  std::span<const double> tokens{};  ///< [T, H] as computed with.
  Assignments assignments{};         ///< The forward's.
  bool routed = true;                ///< By the router, from `logits`; false: given.
  RouterWeights router{};
  std::span<const Bounded> logits{};  ///< [T, E].
  /// Of learned noise: the matrix [E, H], and noise_slopes() [T, E]; else empty.
  std::span<const float> noise_gate{};
  std::span<const Bounded> noise_slopes{};
  /// Of a gating residual: the matrix [E, E] and the logits of the layer before [T, E]; else empty.
  std::span<const float> gating_residual{};
  std::span<const float> previous_logits{};
  std::span<const double> dout{};    ///< [T, H] as computed with.
  std::span<const float> dlogits{};  ///< [T, E] of auxiliary losses; empty: none.
};

/// All gradients of a layer, before they are rounded to their types.
struct LayerGradient {
  std::vector<Bounded> tokens;            ///< [T, H].
  std::vector<Bounded> weight;            ///< [T, K]; 0 where unused or dropped.
  std::vector<Bounded> logits;            ///< [T, E]; as the next two, empty where not routed.
  std::vector<Bounded> gate;              ///< [E, H].
  std::vector<Bounded> noise_gate;        ///< [E, H]; empty: there is none.
  std::vector<Bounded> network;           ///< As RouterWeights::network.
  std::vector<Bounded> router_bias;       ///< [E].
  std::vector<Bounded> gating_residual;   ///< [E, E], empty: there is none, as the next.
  std::vector<Bounded> previous_logits;   ///< [T, E].
  std::vector<Bounded> constant_experts;  ///< As LayerModel::constant_experts.
  ExpertGradient experts;
  ExpertGradient shared;             ///< As of one expert; empty: there are none.
  std::vector<Bounded> shared_gate;  ///< [H]; empty: there is none.
};

/// For exact weights, on one rank.
LayerGradient layer_gradient(const LayerModel& model, const LayerRun& run,
                             const BackwardInput& input);

}  // namespace switchyard::reference
