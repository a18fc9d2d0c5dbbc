#pragma once

// The random numbers of routers: each is a function of (seed, step, layer, what for, token, index),
// whatever rank, thread or device draws it, and again in the backward. A CPU and a GPU draw the
// same bits.

#include "core/philox.hpp"
#include "route/exact_math.hpp"
#include "switchyard/route.hpp"

namespace switchyard {

class Draws {
 public:
  /// Numbers for one purpose have nothing to do with those for another.
  enum class For : std::uint32_t { kJitter, kLogits, kSecond, kKeepSecond, kUniform, kShares };

  /// All that a call has in common goes into one key, so a token's counter has room for any token
  /// and index.
  Draws(const RouteRequest& request, For purpose) : first_token_(request.first_token) {
    const PhiloxWords words = philox4x32(
        {{low_word(request.step), high_word(request.step),
          static_cast<std::uint32_t>(request.layer), static_cast<std::uint32_t>(purpose)}},
        {low_word(request.seed), high_word(request.seed)});
    key_ = {words.word[0], words.word[1]};
  }

  /// Numbers 4 * block to 4 * block + 3 of token first_token + t.
  [[nodiscard]] SWITCHYARD_HOST_DEVICE PhiloxWords words(std::int64_t t,
                                                         std::uint32_t block) const {
    const auto token = static_cast<std::uint64_t>(first_token_ + t);
    return philox4x32({{block, low_word(token), high_word(token), 0}}, key_);
  }
  /// Number `index` of token first_token + t: 32 bits,
  [[nodiscard]] SWITCHYARD_HOST_DEVICE std::uint32_t word(std::int64_t t,
                                                          std::uint32_t index) const {
    return words(t, index / 4).word[index % 4];
  }
  /// or uniform in [0, 1).
  [[nodiscard]] SWITCHYARD_HOST_DEVICE float unit(std::int64_t t, std::uint32_t index) const {
    return unit_of(word(t, index));
  }

 private:
  friend class PreparedDraws;
  PhiloxKey key_;
  std::int64_t first_token_;
};

/// The same numbers from the keys of the generator's rounds: for kernels, whose parameters these
/// are.
class PreparedDraws {
 public:
  explicit PreparedDraws(const Draws& draws)
      : rounds_(draws.key_), first_token_(draws.first_token_) {}

  /// As Draws::words().
  [[nodiscard]] SWITCHYARD_HOST_DEVICE PhiloxWords words(std::int64_t t,
                                                         std::uint32_t block) const {
    const auto token = static_cast<std::uint64_t>(first_token_ + t);
    return philox4x32({{block, low_word(token), high_word(token), 0}}, rounds_);
  }

 private:
  PhiloxRounds rounds_;
  std::int64_t first_token_;
};

/// -log(-log u): the largest of logits plus such numbers is a draw by their softmax.
SWITCHYARD_HOST_DEVICE float gumbel_of(float unit) {
  return static_cast<float>(-exact::log(-exact::log(double{unit} + 0x1p-25)));
}

}  // namespace switchyard
