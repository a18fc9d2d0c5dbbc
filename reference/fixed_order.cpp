#include "reference/fixed_order.hpp"

// The order of sums in fp32 as the contract states it: no bounds, the bits themselves.

#include <bit>
#include <cmath>

#include "reference/bounded.hpp"

namespace switchyard::reference {
namespace {

float to_wire(DType wire, float value) {
  return static_cast<float>(round_value(wire, double{value}));
}

}  // namespace

std::int32_t FixedOrder::num_groups() const { return groups % ranks == 0 ? groups : ranks; }

float FixedOrder::group_partial(std::span<const Term> terms, std::int32_t group) const {
  const std::int64_t all = num_groups();
  const auto begin = static_cast<std::int32_t>(group * std::int64_t{num_experts} / all);
  const auto end = static_cast<std::int32_t>((group + 1) * std::int64_t{num_experts} / all);
  float sum = 0.0F;
  for (std::int32_t expert = begin; expert < end; ++expert) {
    for (const Term& term : terms) {
      if (term.expert == expert) sum = std::fma(term.weight, term.value, sum);
    }
  }
  return sum;
}

float FixedOrder::subtree(std::span<const Term> terms, std::int32_t first,
                          std::int32_t count) const {
  if (first >= num_groups()) return 0.0F;
  const float sum =
      count == 1 ? group_partial(terms, first)
                 : subtree(terms, first, count / 2) + subtree(terms, first + count / 2, count / 2);
  const bool crosses = rank_invariant ? count == 1 : ranks > 1 && count == groups_of_rank();
  return crosses ? to_wire(wire, sum) : sum;
}

float FixedOrder::rank_part(std::span<const Term> terms, std::int32_t rank) const {
  return subtree(terms, rank * groups_of_rank(), groups_of_rank());
}

float FixedOrder::total(std::span<const Term> terms) const {
  const auto leaves = std::bit_ceil(static_cast<std::uint32_t>(num_groups()));
  return subtree(terms, 0, static_cast<std::int32_t>(leaves));
}

}  // namespace switchyard::reference
