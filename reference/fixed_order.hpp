#pragma once

#include <cstdint>
#include <span>

#include "switchyard/tensor.hpp"

namespace switchyard::reference {

/// One addend of an output element: an expert's value and its weight.
struct Term {
  std::int32_t expert = 0;
  float weight = 0;
  float value = 0;
};

/// The fixed order of sums, by bits, for one element of one token. `terms` stand in the order of k.
/// Groups and ranks as design has them: group g of G holds the experts [g*E/G, (g+1)*E/G).
struct FixedOrder {
  std::int32_t num_experts = 0;  ///< E.
  std::int32_t groups = 8;       ///< G.
  std::int32_t ranks = 1;        ///< R; where it does not divide G, each rank is one group.
  DType wire = DType::kF32;      ///< Of the parts that cross.
  bool rank_invariant = false;   ///< Round every group's partial to it, else every rank's.

  /// Groups of the whole layer, and of each rank.
  [[nodiscard]] std::int32_t num_groups() const;
  [[nodiscard]] std::int32_t groups_of_rank() const { return num_groups() / ranks; }

  /// acc = fma(weight, value, acc) from +0 in ascending expert id, then k.
  [[nodiscard]] float group_partial(std::span<const Term> terms, std::int32_t group) const;
  /// What a rank sends for one row: the sum over its groups, rounded to the wire type. (With
  /// rank_invariant each of its groups' partials is sent.)
  [[nodiscard]] float rank_part(std::span<const Term> terms, std::int32_t rank) const;
  /// The sum over all ranks, before shared experts and the rounding to the output.
  [[nodiscard]] float total(std::span<const Term> terms) const;

 private:
  [[nodiscard]] float subtree(std::span<const Term> terms, std::int32_t first,
                              std::int32_t count) const;
};

}  // namespace switchyard::reference
