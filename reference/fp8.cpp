#include "reference/fp8.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "reference/expert.hpp"

namespace switchyard::reference {
namespace {

constexpr std::size_t kBlock = 128;  // values of a scale
constexpr std::size_t kStep = 32;    // products of a wgmma
constexpr double kLostOfStep = (kStep + 2 + 2) * 0x1p-13;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
std::size_t blocks_of(std::size_t count) { return (count + kBlock - 1) / kBlock; }

double value_of(std::uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  const double size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

/// 2 to the exponent of a code; of zero and of subnormal ones 2^-6.
double power_of(double code) {
  return code == 0 ? 0x1p-6 : std::max(0x1p-6, std::exp2(std::floor(std::log2(std::abs(code)))));
}

/// All numbers that a block of them may become.
class Block {
 public:
  explicit Block(std::span<const Bounded> values) : values_(values) {
    double low = 0x1p-100;
    double high = 0x1p-100;
    for (const Bounded& v : values) {
      low = std::max(low, std::abs(v.value) - v.error);
      high = std::max(high, std::abs(v.value) + v.error);
      exact_ = exact_ && v.error == 0;
      lost_ = lost_ || v.may_overflow();
    }
    if (exact_) {
      scale_low_ = scale_high_ = f32(high / 448.0);
      inverse_ = f32(448.0 / high);
    } else {
      scale_low_ = low / 448.0 * (1 - 2 * kUnit);
      scale_high_ = high / 448.0 * (1 + 2 * kUnit);
    }
  }

  void append_to(Fp8Row& row) const {
    for (const Bounded& v : values_) {
      if (lost_) {
        row.value.push_back(0);
        row.error.push_back(HUGE_VAL);
        row.power.push_back(HUGE_VAL);
        continue;
      }
      const auto [low, high] = codes(v);
      const double least = std::min(low * scale_low_, low * scale_high_);
      const double most = std::max(high * scale_low_, high * scale_high_);
      row.value.push_back(low == high && exact_ ? most : 0.5 * (least + most));
      row.error.push_back(0.5 * (most - least));
      row.power.push_back(power_of(std::max(std::abs(low), std::abs(high))) * scale_high_);
    }
  }

 private:
  static double f32(double value) { return round_value(DType::kF32, value); }
  static double code(double value) {
    return round_value(DType::kF8E4M3, std::clamp(value, -448.0, 448.0));
  }

  [[nodiscard]] std::pair<double, double> codes(const Bounded& v) const {
    if (exact_) {
      const double nearest = code(f32(v.value * inverse_));
      return {nearest, nearest};
    }
    constexpr double kLoss = 4 * kUnit;
    const double low = std::min(v.low() / scale_low_, v.low() / scale_high_);
    const double high = std::max(v.high() / scale_low_, v.high() / scale_high_);
    return {code(low - kLoss * std::abs(low)), code(high + kLoss * std::abs(high))};
  }

  std::span<const Bounded> values_;
  double scale_low_ = 0, scale_high_ = 0, inverse_ = 0;
  bool exact_ = true, lost_ = false;
};

}  // namespace

Fp8Row fp8_row(std::span<const std::uint8_t> codes, std::span<const float> scales) {
  static const std::array<std::array<double, 2>, 256> known = [] {
    std::array<std::array<double, 2>, 256> all{};
    for (std::size_t code = 0; code < all.size(); ++code) {
      const double value = value_of(static_cast<std::uint8_t>(code));
      all[code] = {value, power_of(value)};
    }
    return all;
  }();
  Fp8Row row;
  for (std::size_t k = 0; k < codes.size(); ++k) {
    row.value.push_back(known[codes[k]][0] * scales[k / kBlock]);
    row.power.push_back(known[codes[k]][1] * scales[k / kBlock]);
  }
  return row;
}

Fp8Row quantised(std::span<const Bounded> values) {
  Fp8Row row;
  for (std::size_t k = 0; k < values.size(); k += kBlock) {
    Block(values.subspan(k, std::min(kBlock, values.size() - k))).append_to(row);
  }
  return row;
}

Fp8Row read_fp8(const ExpertSource& source, std::int32_t expert, ExpertPart part, std::int64_t rows,
                std::int64_t cols) {
  std::vector<std::uint8_t> codes(at(rows * cols));
  const std::size_t blocks = blocks_of(at(cols));
  std::vector<float> scales(blocks_of(at(rows)) * blocks);
  source.read_stored(
      expert, part, 0, rows,
      {reinterpret_cast<std::byte*>(codes.data()), reinterpret_cast<std::byte*>(scales.data())});
  Fp8Row matrix;
  for (std::size_t i = 0; i < at(rows); ++i) {
    const Fp8Row row = fp8_row(std::span(codes).subspan(i * at(cols), at(cols)),
                               std::span(scales).subspan(i / kBlock * blocks, blocks));
    matrix.value.insert(matrix.value.end(), row.value.begin(), row.value.end());
    matrix.power.insert(matrix.power.end(), row.power.begin(), row.power.end());
  }
  return matrix;
}

Bounded fp8_dot(const Fp8Row& matrix, std::int64_t i, const Fp8Row& x,
                std::span<const float> bias) {
  const std::size_t n = x.value.size();
  const double* const w = matrix.value.data() + at(i) * n;
  const double* const w_power = matrix.power.data() + at(i) * n;
  double value = bias.empty() ? 0.0 : double{bias[at(i)]};
  double magnitude = std::abs(value);
  double error = 0;
  for (std::size_t block = 0; block < n; block += kBlock) {
    const std::size_t block_end = std::min(n, block + kBlock);
    double sum = 0;
    double lost = 0;  // of this block's sum, with what x is off by
    for (std::size_t step = block; step < block_end; step += kStep) {
      double power = 0;
      double largest = std::abs(sum);
      for (std::size_t k = step; k < std::min(block_end, step + kStep); ++k) {
        sum += w[k] * x.value[k];
        magnitude += std::abs(w[k] * x.value[k]);
        power = std::max(power, w_power[k] * x.power[k]);
        if (!x.error.empty() && x.error[k] == HUGE_VAL) return {0, HUGE_VAL};
        if (!x.error.empty()) lost += std::abs(w[k]) * x.error[k];
        if ((k - step) % (kStep / 2) == kStep / 2 - 1) largest = std::max(largest, std::abs(sum));
      }
      largest = std::max(largest, std::abs(sum)) + lost;
      lost += kLostOfStep * std::max(power, largest);
    }
    value += sum;
    error += lost;
  }
  // A product of two scales, a product and a sum for each block, and the bias.
  const auto depth = static_cast<std::int64_t>(blocks_of(n)) + 4;
  error += gamma(depth) * (magnitude + error) + kFlush * static_cast<double>(n + 1);
  return in_range({value, error}, magnitude + error);
}

double loss_of_split(std::span<const double> w, std::span<const double> x,
                     std::span<const double> x_error) {
  const std::size_t n = x.size();
  const auto off = [&](std::size_t k) { return x_error.empty() ? 0.0 : x_error[k]; };
  double largest_x = 0;
  for (std::size_t k = 0; k < n; ++k) largest_x = std::max(largest_x, std::abs(x[k]) + off(k));
  constexpr double kShare = 0x1p-4;         // that the second number has of a value at most
  constexpr std::size_t kPair = 2 * kStep;  // values of two steps, which share them
  double error = 0;
  double sum = 0;
  double uncertain = 0;
  for (std::size_t unit = 0; unit < n; unit += kPair) {
    if (unit % kBlock == 0) sum = uncertain = 0;
    const std::size_t unit_end = std::min(n, unit + kPair);
    const std::size_t steps = unit_end - unit == kPair ? 2 : 1;
    for (std::size_t step = 0; step < steps; ++step) {
      double half[2] = {0, 0};
      double power = 0;
      double second = 0;
      for (std::size_t k = unit; k < unit_end; ++k) {
        if (steps == 2 && k % 16 / 8 != step) continue;
        const double size = std::abs(w[k]);
        half[k % 2] += w[k] * x[k];
        second += size * (std::abs(x[k]) + off(k)) * kShare;
        uncertain += size * off(k);
        // Below 2^-13 of the largest value a code's exponent stays where it is.
        power = std::max(
            power, size * std::max((1 + kShare) * (std::abs(x[k]) + off(k)), 0x1p-13 * largest_x));
        error += size * 0x1p-17 * largest_x;
      }
      const double largest =
          std::max({std::abs(sum), std::abs(sum + half[0]), std::abs(sum + half[0] + half[1])});
      sum += half[0] + half[1];
      error += 2 * kLostOfStep * std::max(power, largest + second + uncertain);
    }
  }
  return error;
}

Fp8Expert read_fp8_expert(const ExpertConfig& config, const ExpertSource& source,
                          std::int32_t expert) {
  Fp8Expert e{.gate = read_fp8(source, expert, ExpertPart::kGate, config.inner, config.hidden),
              .up = read_fp8(source, expert, ExpertPart::kUp, config.inner, config.hidden),
              .down = read_fp8(source, expert, ExpertPart::kDown, config.hidden, config.inner)};
  if (config.bias) {
    e.gate_bias = read_bias(source, expert, ExpertPart::kGate, config.inner);
    e.up_bias = read_bias(source, expert, ExpertPart::kUp, config.inner);
    e.down_bias = read_bias(source, expert, ExpertPart::kDown, config.hidden);
  }
  return e;
}

std::vector<Bounded> fp8_expert_row(const ExpertConfig& config, const Fp8Expert& expert,
                                    const Fp8Row& x) {
  std::vector<Bounded> inner;
  for (std::int64_t i = 0; i < config.inner; ++i) {
    inner.push_back(inner_value(config, fp8_dot(expert.gate, i, x, expert.gate_bias),
                                fp8_dot(expert.up, i, x, expert.up_bias), kFp8FactorError));
  }
  const Fp8Row between = quantised(inner);
  std::vector<Bounded> y;
  for (std::int64_t h = 0; h < config.hidden; ++h) {
    y.push_back(fp8_dot(expert.down, h, between, expert.down_bias));
  }
  return y;
}

}  // namespace switchyard::reference
