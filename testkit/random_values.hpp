#pragma once

#include <cstddef>
#include <random>
#include <vector>

namespace switchyard::test {

/// Normal, of that deviation.
inline std::vector<float> random_values(std::size_t count, unsigned seed, float scale = 1.0F) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

}  // namespace switchyard::test
