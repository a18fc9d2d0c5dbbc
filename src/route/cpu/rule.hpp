#pragma once

// What the router's rule computes with, there and back.

#include <algorithm>
#include <cmath>

#include "switchyard/route.hpp"

namespace switchyard {

inline float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

/// exp(x - largest) for x <= largest, also where both are the same infinity.
inline float exp_below(float x, float largest) {
  return x == largest ? 1.0F : std::exp(x - largest);
}

/// Score::kSparseMixer: whether x is near a choice's logit. What is infinite is near: its distance
/// is no number.
inline bool is_near(float x, float choice) {
  const float distance = (choice - x) / std::max(std::abs(x), choice);
  return !(distance > kMixerMargin);
}

}  // namespace switchyard
