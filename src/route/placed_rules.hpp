#pragma once

// The rules that go by a token's id or place instead of logits, one token at a time: the same code
// on a CPU and in kernels, so the same experts.

#include "core/splitmix64.hpp"
#include "route/draws.hpp"

namespace switchyard {

/// HashRouter without a table: the experts of one token id, into expert[0, K).
SWITCHYARD_HOST_DEVICE void hash_of_id(std::uint64_t salt, std::int32_t num_experts,
                                       std::int32_t id, std::int32_t top_k, std::int32_t* expert) {
  constexpr std::uint64_t kHashes = 256;
  const auto token = static_cast<std::uint64_t>(static_cast<std::uint32_t>(id)) << 8U;
  std::uint64_t j = 0;
  for (std::int32_t k = 0; k < top_k; ++j) {
    std::uint64_t next = j - kHashes;  // from there on one after the other
    if (j < kHashes) {
      const std::uint64_t x = (token | j) ^ (salt << 40U);
      next = splitmix64_mix(x + kSplitMix64Step) % static_cast<std::uint64_t>(num_experts);
    }
    const auto e = static_cast<std::int32_t>(next);
    bool taken = false;
    for (std::int32_t i = 0; i < k; ++i) taken = taken || expert[i] == e;
    if (!taken) expert[k++] = e;
  }
}

/// ForcedRouter::Load::kUniform: number k is the r-th expert that is not yet taken, r uniform.
SWITCHYARD_HOST_DEVICE void draw_experts(const Draws& draws, std::int32_t num_experts,
                                         std::int64_t token, std::int32_t top_k,
                                         std::int32_t* expert) {
  for (std::int32_t k = 0; k < top_k; ++k) {
    const std::uint64_t word = draws.word(token, static_cast<std::uint32_t>(k));
    auto e = static_cast<std::int32_t>(word * static_cast<std::uint64_t>(num_experts - k) >> 32U);
    std::int32_t place = 0;
    for (; place < k && expert[place] <= e; ++place) ++e;
    for (std::int32_t i = k; i > place; --i) expert[i] = expert[i - 1];  // they stay in order
    expert[place] = e;
  }
}

/// Expert k of a token among those dealt out in turn. @param token  Of all ranks.
[[nodiscard]] SWITCHYARD_HOST_DEVICE std::int32_t expert_in_turn(std::int64_t token, std::int32_t k,
                                                                 std::int32_t top_k,
                                                                 std::int32_t num_experts) {
  return static_cast<std::int32_t>((token * top_k + k) % num_experts);
}

/// Exact loads: the assignments in a row, those of an expert behind each other. Token t has those
/// at places p(t) + k T, p a permutation of the tokens. No expert has more than T of them, so none
/// is a token's twice.
struct DealtPlaces {
  std::uint64_t num_tokens;
  std::uint64_t factor;  ///< Without a divisor in common with num_tokens.
  std::uint64_t offset;

  [[nodiscard]] SWITCHYARD_HOST_DEVICE std::int64_t first_of(std::int64_t token) const {
    return static_cast<std::int64_t>((factor * static_cast<std::uint64_t>(token) + offset) %
                                     num_tokens);
  }
};

/// Whose place it is. @param last  [E] places up to and with each expert's.
template <typename Count>
[[nodiscard]] SWITCHYARD_HOST_DEVICE std::int32_t expert_at(std::int64_t place, const Count* last,
                                                            std::int32_t num_experts) {
  std::int32_t low = 0;
  std::int32_t high = num_experts - 1;
  while (low < high) {
    const std::int32_t middle = (low + high) / 2;
    if (std::int64_t{last[middle]} > place) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace switchyard
