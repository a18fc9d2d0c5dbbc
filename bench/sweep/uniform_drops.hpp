#pragma once

#include <cstdint>

namespace switchyard::bench {

/// What expert capacity drops of a uniform routing, in closed form.
struct UniformDrops {
  double expected = 0;   ///< Mean share of the T * K assignments.
  double deviation = 0;  ///< Standard deviation of the share of one routing.
};

/// Each of T tokens has K different experts of E, all alike, so that the count n of an expert is
/// binomial (T, K / E), and (n - C)+ of it are dropped. The mean is exact: the sum over n. The
/// deviation is that of one expert, exact, with what counts take from each other (they sum to T K)
/// to the second order in their correlation -1 / (E - 1).
/// @param capacity  C >= 0, slots of an expert; num_tokens, top_k >= 1, top_k <= num_experts.
[[nodiscard]] UniformDrops uniform_drops(std::int64_t num_tokens, std::int32_t num_experts,
                                         std::int32_t top_k, std::int64_t capacity);

}  // namespace switchyard::bench
