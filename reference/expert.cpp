#include "reference/expert.hpp"

// One expert by its definition. The intermediate is rounded to the compute type as the contract
// has it; the sums in between are exact but for their bounds.

#include <algorithm>
#include <cmath>
#include <numbers>

#include "reference/fp8.hpp"

namespace switchyard::reference {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Largest slopes: silu 1.0999, gelu 1.1289, gelu by tanh 1.1290.
constexpr double kLargestSlope = 1.13;

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

/// The activation of the gate alone.
Bounded activate(const ExpertConfig& config, Bounded gate, double factor_error) {
  if (gate.may_overflow()) return {0, HUGE_VAL};  // silu(-inf) is NaN or -0: by how it is written
  const double g = gate.value;
  const double smooth = kLargestSlope * gate.error + factor_error * std::abs(g) + kFlush;
  switch (config.activation) {
    case Activation::kSilu: return {g * sigmoid(g), smooth};
    case Activation::kGelu: return {g * 0.5 * std::erfc(-g / std::numbers::sqrt2), smooth};
    case Activation::kGeluTanh: {
      const double inner = std::sqrt(2.0 / std::numbers::pi) * (g + 0.044715 * g * g * g);
      return {g * 0.5 * (1.0 + std::tanh(inner)), smooth};
    }
    case Activation::kRelu: return {std::max(g, 0.0), gate.error};
    case Activation::kRelu2: {
      const Bounded relu{std::max(g, 0.0), gate.error};
      return multiply(relu, relu);
    }
    case Activation::kIdentity: return gate;
    case Activation::kClampedSwiglu: {
      const double clamped = std::min(g, double{config.limit});
      return {clamped * sigmoid(double{config.alpha} * clamped),
              smooth + factor_error * std::abs(clamped)};
    }
  }
  return {};
}

}  // namespace

Bounded inner_value(const ExpertConfig& config, Bounded gate, Bounded up, double factor_error) {
  const Bounded activated = activate(config, gate, factor_error);
  if (!config.gated) return activated;
  if (config.activation != Activation::kClampedSwiglu) return multiply(activated, up);
  const double limit = config.limit;
  if (up.may_overflow()) return {0, HUGE_VAL};
  const Bounded clamped{std::clamp(up.value, -limit, limit), up.error};
  return multiply(activated, add(clamped, {1.0, 0}));
}

namespace {

// Values along the sum that share a scale where weights are int8.
constexpr std::int64_t kQ8Group = 32;

/// The least bf16 that is not below a value >= 0.
float bf16_above(float value) {
  int exponent = 0;
  const float fraction = std::frexp(value, &exponent);
  // 8 bits of fraction; fewer where bf16 has no smaller exponent.
  const int bits = std::min(8, 133 + exponent);
  return std::ldexp(std::ceil(std::ldexp(fraction, bits)), exponent - bits);
}

/// int8 times a scale that 32 values along the sum share: the largest magnitude / 127 in fp32, as
/// bf16, rounded up; a value is the nearest whole number of scales, of an fp32 quotient.
void quantise_q8(std::vector<float>& values, std::int64_t cols) {
  for (std::int64_t row = 0; row < std::ssize(values); row += cols) {
    for (std::int64_t first = 0; first < cols; first += kQ8Group) {
      const auto group =
          std::span(values).subspan(at(row + first), at(std::min(kQ8Group, cols - first)));
      float largest = 0;
      for (const float value : group) largest = std::max(largest, std::abs(value));
      const float scale = bf16_above(largest / 127.0F);
      for (float& value : group) {
        value = scale == 0 ? 0.0F : std::nearbyint(value / scale) * scale;
      }
    }
  }
}

/// What the rows that meet int8 weights may lose: they become 15-bit whole numbers with a scale of
/// their own for the same groups, the largest magnitude / 32767. Half a step, and two roundings of
/// up to 32767 steps; magnitudes below 1e-30 may become zero.
void add_row_error(std::span<const double> x, std::vector<double>& error) {
  error.resize(x.size());
  for (std::size_t first = 0; first < x.size(); first += at(kQ8Group)) {
    const std::size_t end = std::min(x.size(), first + at(kQ8Group));
    double largest = 0;
    for (std::size_t i = first; i < end; ++i) {
      largest = std::max(largest, std::abs(x[i]) + error[i]);
    }
    const double step = largest / 32767;
    for (std::size_t i = first; i < end; ++i) {
      error[i] += (0.5 + 4 * 32767 * kUnit) * step + (largest < 2e-30 ? largest : 0);
    }
  }
}

std::vector<double> read_part(const ExpertSource& source, std::int32_t expert, ExpertPart part,
                              std::int64_t rows, std::int64_t cols, const Precision& precision) {
  std::vector<float> values(at(rows * cols));
  source.read(expert, part, 0, rows, DType::kF32, values.data());
  if (!precision.quantize_q8) return as_computed(values, precision.compute);
  quantise_q8(values, cols);
  return {values.begin(), values.end()};
}

/// Half a unit in the last place of a rounded number, as a share of it at most (bf16 has 8 bits of
/// significand, so 2^-8), and a little.
double rounding_of(DType compute) {
  if (compute == DType::kF32) return 1.01 * kUnit;
  return compute == DType::kBF16 ? 1.01 * 0x1p-8 : 1.01 * 0x1p-11;
}

}  // namespace

std::vector<float> read_bias(const ExpertSource& source, std::int32_t expert, ExpertPart part,
                             std::int64_t size) {
  std::vector<float> values(at(size));
  source.read_bias(expert, part, values.data());
  return values;
}

Bounded dot(std::span<const double> matrix, std::int64_t i, std::span<const double> x,
            std::span<const double> x_error, std::span<const float> bias, double matrix_error) {
  const std::size_t n = x.size();
  const double* row = matrix.data() + at(i) * n;
  double sum = bias.empty() ? 0.0 : double{bias[at(i)]};
  double magnitude = std::abs(sum);
  double error = 0;
  for (std::size_t j = 0; j < n; ++j) {
    sum += row[j] * x[j];
    magnitude += std::abs(row[j] * x[j]);
    if (!x_error.empty()) error += std::abs(row[j]) * x_error[j];
    error += matrix_error * std::abs(row[j] * x[j]);
  }
  const auto terms = static_cast<std::int64_t>(n) + 3;
  error += gamma(terms) * (magnitude + error) + kFlush * static_cast<double>(terms);
  return in_range({sum, error}, magnitude + error);
}

std::vector<double> as_computed(std::span<const float> values, DType compute) {
  std::vector<double> result;
  result.reserve(values.size());
  for (const float value : values) result.push_back(round_value(compute, double{value}));
  return result;
}

ExpertMatrices read_expert(const ExpertConfig& config, const ExpertSource& source,
                           std::int32_t expert, const Precision& precision) {
  ExpertMatrices m;
  const std::int64_t hidden = config.hidden;
  const std::int64_t inner = config.inner;
  m.gate = read_part(source, expert, ExpertPart::kGate, inner, hidden, precision);
  if (config.gated) m.up = read_part(source, expert, ExpertPart::kUp, inner, hidden, precision);
  m.down = read_part(source, expert, ExpertPart::kDown, hidden, inner, precision);
  if (config.bias) {
    m.gate_bias = read_bias(source, expert, ExpertPart::kGate, inner);
    if (config.gated) m.up_bias = read_bias(source, expert, ExpertPart::kUp, inner);
    m.down_bias = read_bias(source, expert, ExpertPart::kDown, hidden);
  }
  return m;
}

std::vector<Bounded> expert_row(const ExpertConfig& config, const ExpertMatrices& matrices,
                                std::span<const double> x, const Precision& precision) {
  const double off =
      (precision.may_scale_sums ? rounding_of(precision.compute) : 0) + precision.product_loss();
  std::vector<double> x_error;
  if (precision.quantize_q8) add_row_error(x, x_error);
  const auto sum = [&](std::span<const double> matrix, std::int64_t i, std::span<const double> of,
                       std::span<const double> of_error, std::span<const float> bias) {
    Bounded value = dot(matrix, i, of, of_error, bias, off);
    if (precision.may_split_rows) {
      value.error += loss_of_split(matrix.subspan(at(i) * of.size(), of.size()), of, of_error);
    }
    return value;
  };
  std::vector<double> inner;
  std::vector<double> inner_error;
  for (std::int64_t i = 0; i < config.inner; ++i) {
    const Bounded gate = sum(matrices.gate, i, x, x_error, matrices.gate_bias);
    const Bounded up = config.gated ? sum(matrices.up, i, x, x_error, matrices.up_bias) : Bounded{};
    const Bounded value = convert(precision.compute, inner_value(config, gate, up));
    inner.push_back(value.value);
    inner_error.push_back(value.error);
  }
  if (precision.quantize_q8) add_row_error(inner, inner_error);
  std::vector<Bounded> y;
  for (std::int64_t h = 0; h < config.hidden; ++h) {
    y.push_back(sum(matrices.down, h, inner, inner_error, matrices.down_bias));
  }
  return y;
}

}  // namespace switchyard::reference
