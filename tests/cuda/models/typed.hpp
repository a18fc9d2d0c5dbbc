#pragma once

// What the tests of a model's stages on a GPU share: arrays of the compute type, and closeness.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "testkit/gpu/device_array.hpp"
#include "testkit/random_values.hpp"

namespace switchyard::models::gpu {

using Doubles = std::vector<double>;

inline DType type_of(bool bf16) { return bf16 ? DType::kBF16 : DType::kF32; }

/// Numbers on the GPU in the compute type, and on the host as they are there.
class Typed {
 public:
  Typed(bool bf16, std::vector<float> numbers)
      : bf16_(bf16), values_(std::move(numbers)), memory_(stored_as(type_of(bf16), values_)) {
    for (float& value : values_) value = round_to(type_of(bf16), value);
  }
  /// Of NaNs.
  Typed(bool bf16, std::int64_t size)
      : bf16_(bf16), memory_(static_cast<std::size_t>(size * size_of(type_of(bf16)))) {}

  [[nodiscard]] void* data() const { return memory_.data(); }
  [[nodiscard]] double operator[](std::int64_t i) const {
    return values_[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] std::vector<float> get() const {
    return loaded_as_floats(type_of(bf16_), memory_.get());
  }
  [[nodiscard]] std::vector<std::byte> bytes() const { return memory_.get(); }

 private:
  bool bf16_;
  std::vector<float> values_;
  DeviceArray<std::byte> memory_;
};

/// Each within `relative` of the expected number or of the largest one's thousandth.
inline void expect_close(const std::vector<float>& got, const Doubles& want, double relative,
                         const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  double most = 0;
  for (const double x : want) most = std::max(most, std::abs(x));
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double bound = relative * (std::abs(want[i]) + 0.05 * most) + 1e-30;
    ASSERT_LE(std::abs(double{got[i]} - want[i]), bound)
        << what << "[" << i << "] is " << got[i] << ", want " << want[i];
  }
}

/// What rounding to the compute type leaves, and f32 sums.
inline double bound_of(bool bf16) { return bf16 ? 1.0 / 100 : 2e-5; }

}  // namespace switchyard::models::gpu
