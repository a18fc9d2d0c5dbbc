#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "core/half.hpp"

namespace switchyard {

/// Normal values of deviation `scale`.
inline std::vector<float> random_floats(std::int64_t count, std::mt19937& random,
                                        float scale = 1.0F) {
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}
inline std::vector<float> random_floats(std::int64_t count, unsigned seed, float scale = 1.0F) {
  std::mt19937 random(seed);
  return random_floats(count, random, scale);
}

/// Values in memory as elements of type `dtype`.
inline std::vector<std::byte> stored_as(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * static_cast<std::size_t>(size_of(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_float(bytes.data(), dtype, static_cast<std::int64_t>(i), values[i]);
  }
  return bytes;
}

/// And back.
inline std::vector<float> loaded_as_floats(DType dtype, const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / static_cast<std::size_t>(size_of(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_float(bytes.data(), dtype, static_cast<std::int64_t>(i));
  }
  return values;
}

}  // namespace switchyard
