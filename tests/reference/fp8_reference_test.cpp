// The bound of products of e4m3: tensor cores that add as Hopper's do, made up here in whole
// numbers, stay within it, and a wrong scale, row or column does not.
#include "reference/fp8.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <span>
#include <vector>

#include "testkit/sanitized.hpp"

namespace switchyard::reference {
namespace {

/// How a tensor core may add: so many products at once; towards zero, or down.
struct TensorCore {
  std::size_t products;
  bool down;
};
constexpr TensorCore kCores[] = {{32, false}, {32, true}, {16, false}, {16, true}};

constexpr std::int64_t kLength = 400;
constexpr std::int64_t kRows = 150;

struct Operands {
  std::vector<std::uint8_t> x = std::vector<std::uint8_t>(kLength);
  std::vector<float> x_scale = std::vector<float>(4);
  std::vector<std::uint8_t> w = std::vector<std::uint8_t>(kRows * kLength);
  std::vector<float> w_scale = std::vector<float>(2 * 4);

  [[nodiscard]] Fp8Row row() const { return fp8_row(x, x_scale); }
  [[nodiscard]] Fp8Row matrix() const {
    Fp8Row all;
    for (std::size_t i = 0; i < kRows; ++i) {
      const Fp8Row one = fp8_row(std::span(w).subspan(i * kLength, kLength),
                                 std::span(w_scale).subspan(i / 128 * 4, 4));
      all.value.insert(all.value.end(), one.value.begin(), one.value.end());
      all.power.insert(all.power.end(), one.power.begin(), one.power.end());
    }
    return all;
  }
};

enum class Codes : std::uint8_t { kAny, kSmall, kOneSign, kMixed };
constexpr Codes kKinds[] = {Codes::kAny, Codes::kSmall, Codes::kOneSign, Codes::kMixed};

Operands make(Codes kind, unsigned seed) {
  std::mt19937 random(seed);
  const auto code = [&] {
    auto bits = static_cast<std::uint8_t>(random());
    // Exponents of a few binades, down to subnormal ones; one sign, so that all losses add up.
    if (kind == Codes::kSmall) bits &= 0x9f;
    if (kind == Codes::kOneSign) bits = static_cast<std::uint8_t>((bits & 0x0f) | 0x30);
    if (kind == Codes::kMixed && random() % 40 != 0) bits &= 0xa7;
    return (bits & 0x7f) == 0x7f ? std::uint8_t{0} : bits;
  };
  Operands made;
  std::generate(made.x.begin(), made.x.end(), code);
  std::generate(made.w.begin(), made.w.end(), code);
  const auto scale = [&] {
    return std::ldexp(1.0F + static_cast<float>(random() % 1000) / 1000, -9);
  };
  std::generate(made.x_scale.begin(), made.x_scale.end(), scale);
  std::generate(made.w_scale.begin(), made.w_scale.end(), scale);
  return made;
}

/// A factor, and the exponent that its code has.
struct Number {
  double value;
  int exponent;
};
Number number_of(std::uint8_t bits) {
  return {fp8_row(std::vector{bits}, std::vector{1.0F}).value[0], std::max(1, bits >> 3 & 15) - 7};
}
std::vector<Number> numbers_of(std::span<const std::uint8_t> codes) {
  std::vector<Number> numbers;
  std::ranges::transform(codes, std::back_inserter(numbers), number_of);
  return numbers;
}

double cut(double value, double unit, bool down) {
  return (down ? std::floor(value / unit) : std::trunc(value / unit)) * unit;
}

/// What is in the accumulator after `products` more.
double add(double sum, std::span<const Number> w, std::span<const Number> x, bool down) {
  int exponent = sum == 0 ? -100 : std::ilogb(sum);
  for (std::size_t k = 0; k < w.size(); ++k) {
    if (w[k].value * x[k].value != 0) {
      exponent = std::max(exponent, w[k].exponent + x[k].exponent);
    }
  }
  const double unit = std::ldexp(1.0, exponent - 13);
  double all = cut(sum, unit, down);
  for (std::size_t k = 0; k < w.size(); ++k) {
    all += cut(w[k].value * x[k].value, unit, down);
  }
  return all == 0 ? 0 : cut(all, std::ldexp(1.0, std::ilogb(all) - 13), false);
}

/// As the kernel: 128 products in a tensor core, then times both scales into fp32.
float product(const Operands& o, std::size_t row, const TensorCore& core) {
  float total = 0;
  for (std::size_t block = 0; block < kLength; block += 128) {
    double sum = 0;
    const std::size_t end = std::min<std::size_t>(kLength, block + 128);
    for (std::size_t k = block; k < end; k += core.products) {
      const std::size_t count = std::min(core.products, end - k);
      sum = add(sum, numbers_of(std::span(o.w).subspan(row * kLength + k, count)),
                numbers_of(std::span(o.x).subspan(k, count)), core.down);
    }
    const float scale = o.x_scale[block / 128] * o.w_scale[row / 128 * 4 + block / 128];
    total = std::fma(static_cast<float>(sum), scale, total);
  }
  return total;
}

TEST(Fp8Reference, TensorCoresOf13BitsStayWithinTheBound) {
  double most = 0;
  for (const Codes kind : kKinds) {
    for (unsigned seed = 0; seed < 2; ++seed) {
      const Operands o = make(kind, seed);
      const Fp8Row matrix = o.matrix();
      const Fp8Row x = o.row();
      for (std::int64_t i = 0; i < kRows; i += kSanitized ? 4 : 1) {
        const Bounded want = fp8_dot(matrix, i, x, {});
        for (const TensorCore& core : kCores) {
          const double off = std::abs(product(o, static_cast<std::size_t>(i), core) - want.value);
          ASSERT_LE(off, want.error) << "row " << i << ", seed " << seed;
          most = std::max(most, off / want.error);
        }
      }
    }
  }
  EXPECT_GT(most, 0.2) << "the bound is far from what is lost";
}

/// Rows, of all, that are within their bounds although something is wrong.
double share_unseen(const Operands& right, const Operands& wrong, std::int64_t from = 0) {
  const Fp8Row matrix = right.matrix();
  const Fp8Row x = right.row();
  std::int64_t unseen = 0;
  for (std::int64_t i = from; i < kRows; ++i) {
    const Bounded want = fp8_dot(matrix, i, x, {});
    const float got = product(wrong, static_cast<std::size_t>(i), kCores[0]);
    unseen += std::abs(got - want.value) <= want.error ? 1 : 0;
  }
  return static_cast<double>(unseen) / static_cast<double>(kRows - from);
}

TEST(Fp8Reference, AWrongScaleRowOrColumnIsBeyondTheBoundNearlyEverywhere) {
  const Operands right = make(Codes::kAny, 7);
  EXPECT_EQ(share_unseen(right, right), 1.0);
  Operands wrong = right;
  std::swap(wrong.x_scale[1], wrong.x_scale[2]);
  EXPECT_LT(share_unseen(right, wrong), 0.2) << "scales of the row";
  wrong = right;
  std::swap(wrong.w_scale[1], wrong.w_scale[2]);
  EXPECT_LT(share_unseen(right, wrong), 0.2) << "scales of the weights";
  wrong = right;
  std::copy_n(right.w_scale.begin(), 4, wrong.w_scale.begin() + 4);
  EXPECT_LT(share_unseen(right, wrong, 128), 0.2) << "scales of other rows of weights";
  wrong = right;
  std::rotate(wrong.w.begin(), wrong.w.begin() + kLength, wrong.w.end());
  EXPECT_LT(share_unseen(right, wrong), 0.05) << "the next row of weights";
  wrong = right;
  std::rotate(wrong.x.begin(), wrong.x.begin() + 16, wrong.x.begin() + 32);
  EXPECT_LT(share_unseen(right, wrong), 0.2) << "columns that change places";
}

// Rows as two numbers of e4m3 a value, times e2m1 with scales in e5m2, as the kernels for MXFP4
// have them.
struct Split {
  std::vector<double> x, w;
  double scale = 1;  // what the row was divided by

  [[nodiscard]] double product(const TensorCore& core) const {
    double total = 0;
    for (std::size_t block = 0; block < x.size(); block += 128) {
      double sum = 0;
      for (std::size_t unit = block; unit < std::min(x.size(), block + 128); unit += 64) {
        const std::size_t end = std::min(x.size(), unit + 64);
        for (std::size_t step = 0; step < (end - unit) / 32; ++step) {
          sum = add_step(sum, unit, end, end - unit == 64 ? static_cast<int>(step) : -1, core);
        }
      }
      total = static_cast<float>(total + sum);
    }
    return total * scale;
  }

 private:
  [[nodiscard]] double add_step(double sum, std::size_t unit, std::size_t end, int step,
                                const TensorCore& core) const {
    std::vector<Number> weights, first, second;
    for (std::size_t parity = 0; parity < 2; ++parity) {
      for (std::size_t k = unit + parity; k < end; k += 2) {
        if (step >= 0 && static_cast<int>(k % 16 / 8) != step) continue;
        const double value = x[k] / scale;
        const double nearest = round_value(DType::kF8E4M3, value);
        const double rest = round_value(DType::kF8E4M3, value - nearest);
        const auto number = [](double v, int least) {
          return Number{v, v == 0 ? least : std::max(least, std::ilogb(v))};
        };
        weights.push_back(number(w[k], -14));
        first.push_back(number(nearest, -6));
        second.push_back(number(rest, -6));
      }
    }
    for (const std::vector<Number>* rows : {&first, &second}) {
      for (std::size_t k = 0; k < rows->size(); k += core.products) {
        sum = add(sum, std::span(weights).subspan(k, core.products),
                  std::span(*rows).subspan(k, core.products), core.down);
      }
    }
    return sum;
  }
};

Split make_split(Codes kind, std::size_t length, std::mt19937& random) {
  Split made;
  double largest = 0;
  for (std::size_t k = 0; k < length; ++k) {
    double value = std::ldexp(1.0 + static_cast<double>(random() % 128) / 128,
                              -static_cast<int>(random() % (kind == Codes::kAny ? 24 : 3)));
    if (kind == Codes::kMixed && random() % 40 != 0) value = std::ldexp(value, -12);
    if (kind != Codes::kOneSign && random() % 2 == 0) value = -value;
    if (random() % 16 == 0) value = 0;
    made.x.push_back(value);
    largest = std::max(largest, std::abs(value));
    const double codes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const double code = codes[random() % 8];
    const int exponent = 13 - static_cast<int>(random() % (kind == Codes::kSmall ? 27 : 4));
    made.w.push_back(
        std::ldexp(kind != Codes::kOneSign && random() % 2 == 0 ? -code : code, exponent));
  }
  made.scale = std::exp2(std::floor(std::log2(largest)) - 7);
  return made;
}

TEST(Fp8Reference, SplitRowsStayWithinTheirBound) {
  std::mt19937 random(3);
  double most = 0;
  for (const Codes kind : kKinds) {
    for (const std::size_t length : {32U, 64U, 96U, 416U}) {
      for (int i = 0; i < (kSanitized ? 20 : 100); ++i) {
        const Split split = make_split(kind, length, random);
        double want = 0;
        double magnitude = 0;
        for (std::size_t k = 0; k < length; ++k) {
          want += split.w[k] * split.x[k];
          magnitude += std::abs(split.w[k] * split.x[k]);
        }
        // Blocks are added in fp32.
        const double error = loss_of_split(split.w, split.x, {}) + 8 * 0x1p-24 * magnitude;
        for (const TensorCore& core : kCores) {
          const double off = std::abs(split.product(core) - want);
          ASSERT_LE(off, error) << length << " values";
          if (error > 0) most = std::max(most, off / error);
        }
      }
    }
  }
  EXPECT_GT(most, 0.2) << "the bound is far from what is lost";
}

TEST(Fp8Reference, ExactNumbersBecomeExactCodes) {
  const std::vector<Bounded> values{{448, 0}, {-1.0625, 0}, {1.1875, 0}, {0x1p-10, 0}, {0, 0}};
  const Fp8Row row = quantised(values);
  EXPECT_EQ(row.value, (std::vector<double>{448, -1.0, 1.25, 0, 0}));  // ties to even
  EXPECT_EQ(row.error, std::vector<double>(5, 0.0));
  EXPECT_EQ(row.power, (std::vector<double>{256, 1, 1, 0x1p-6, 0x1p-6}));
}

TEST(Fp8Reference, UncertainNumbersCoverAllThatTheyMayBecome) {
  std::mt19937 random(5);
  std::vector<Bounded> values(200);
  std::uniform_real_distribution<double> any(-1, 1);
  for (Bounded& v : values)
    v = {any(random) * std::exp2(-8 * any(random)), 0.01 + 0.01 * any(random)};
  const Fp8Row all = quantised(values);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<Bounded> one = values;
    for (Bounded& v : one) {
      v = {static_cast<double>(static_cast<float>(v.value + v.error * 0.99 * any(random))), 0};
    }
    const Fp8Row became = quantised(one);
    for (std::size_t k = 0; k < one.size(); ++k) {
      ASSERT_LE(std::abs(became.value[k] - all.value[k]), all.error[k] * (1 + 1e-12)) << k;
      ASSERT_LE(became.power[k], all.power[k] * (1 + 1e-12)) << k;
    }
  }
}

TEST(Fp8Reference, WhatMayOverflowMayBecomeAnything) {
  const Fp8Row row = quantised(std::vector<Bounded>{{1, 0}, {1, HUGE_VAL}});
  const Fp8Row matrix = fp8_row(std::vector<std::uint8_t>{0, 0}, std::vector{1.0F});
  EXPECT_EQ(fp8_dot(matrix, 0, row, {}).error, HUGE_VAL);
}

}  // namespace
}  // namespace switchyard::reference
