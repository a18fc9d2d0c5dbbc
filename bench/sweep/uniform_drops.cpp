// Expert capacity against a binomial count.
#include "bench/sweep/uniform_drops.hpp"

#include <algorithm>
#include <cmath>

namespace switchyard::bench {
namespace {

/// Of the distance of a count from C, on one side of it.
struct Side {
  double mean = 0, square = 0, chance = 0;

  void add(double chance_of_n, double distance) {
    mean += chance_of_n * distance;
    square += chance_of_n * distance * distance;
    chance += chance_of_n;
  }
};

/// ln of the chance that n of T tokens have an expert which each has with chance p in (0, 1).
double log_chance(double num_tokens, double p, double n) {
  return std::lgamma(num_tokens + 1) - std::lgamma(n + 1) - std::lgamma(num_tokens - n + 1) +
         n * std::log(p) + (num_tokens - n) * std::log1p(-p);
}

}  // namespace

UniformDrops uniform_drops(std::int64_t num_tokens, std::int32_t num_experts, std::int32_t top_k,
                           std::int64_t capacity) {
  const auto tokens = static_cast<double>(num_tokens);
  const double experts = num_experts;
  const auto slots = static_cast<double>(capacity);
  if (top_k == num_experts) return {.expected = std::max(0.0, 1 - slots / tokens), .deviation = 0};
  const double p = top_k / experts;
  Side over;
  Side under;
  for (std::int64_t n = 0; n <= num_tokens; ++n) {
    const double chance = std::exp(log_chance(tokens, p, static_cast<double>(n)));
    if (n > capacity) over.add(chance, static_cast<double>(n - capacity));
    if (n < capacity) under.add(chance, static_cast<double>(capacity - n));
  }
  // One assignment more costs one more where the other T - 1 tokens have filled the slots.
  const double full = capacity <= num_tokens ? std::exp(log_chance(tokens, p, slots)) : 0;
  over.chance += full * (1 - slots / tokens);
  under.chance += full * slots / tokens;
  // What is dropped and what stays free differ by T K - E C: their deviation is the same, and that
  // of the rarer one loses nothing to rounding.
  const Side& rare = over.chance < under.chance ? over : under;
  const double variance = tokens * p * (1 - p);  // of a count
  const double alone = rare.square - rare.mean * rare.mean;
  const double first = -experts * variance * rare.chance * rare.chance;
  const double second = experts / (experts - 1) * variance * variance * full * full / 2;
  const double together = experts * alone + first + second;
  const double all = tokens * top_k;
  return {.expected = experts * over.mean / all,
          .deviation = std::sqrt(std::max(0.0, together)) / all};
}

}  // namespace switchyard::bench
