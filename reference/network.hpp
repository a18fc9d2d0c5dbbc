#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/bounded.hpp"
#include "reference/router.hpp"
#include "switchyard/router.hpp"

namespace switchyard::reference {

/// A router's logits of tokens [T, H], which are already values of the compute type, through its
/// network: router_logits() where that is linear.
std::vector<Bounded> network_logits(const RouterConfig& config, std::span<const double> tokens,
                                    std::int64_t hidden, const RouterWeights& weights);

/// Adds to logits [T, E] those of the layer before [T, E] times a matrix [E, E]; nothing where both
/// are empty.
void add_residual(std::vector<Bounded>& logits, std::span<const float> residual,
                  std::span<const float> previous);

/// What dlogits [T, E] come to, of a network that is not linear.
struct NetworkGradient {
  std::vector<Bounded> tokens;      ///< [T, H].
  std::vector<Bounded> gate;        ///< [E, D].
  std::vector<Bounded> parameters;  ///< [RouterNetwork::size(H)].
};
NetworkGradient network_gradient(const RouterConfig& config, std::span<const double> tokens,
                                 std::int64_t hidden, const RouterWeights& weights,
                                 std::span<const Bounded> dlogits);

}  // namespace switchyard::reference
