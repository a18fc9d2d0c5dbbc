#include "reference/backward.hpp"

// Back through one expert by its definition. What the contract rounds to the compute type is
// rounded here: the pre-activation, the weighted activation and the pre-activation's gradient; on a
// GPU the activation's gradient may be.

#include <cmath>
#include <numbers>

namespace switchyard::reference {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// A library's exp, erf, tanh and division in fp32.
constexpr double kFunctionUnits = 8 * kUnit;
// Largest second derivatives: silu 0.5, gelu 0.798, gelu by tanh 0.804; times alpha of a clamp.
constexpr double kLargestBend = 0.81;

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

/// 1 or 0, or either of both where only `possibly`.
Bounded passes(bool certainly, bool possibly) {
  if (certainly) return {1.0, 0};
  return possibly ? Bounded{0.5, 0.5} : Bounded{0, 0};
}

/// A clamp to [low, high] passes the gradient, ends included.
Bounded passes_clamp(Bounded x, double low, double high) {
  return passes(low <= x.low() && x.high() <= high, low <= x.high() && x.low() <= high);
}

/// d/dx x sigmoid(alpha x). 1 - sigmoid cancels: its error is one of 1, times |alpha x|.
Bounded silu_slope(Bounded x, double alpha) {
  const double v = x.value;
  const double s = sigmoid(alpha * v);
  const double bend = kLargestBend * std::max(1.0, alpha);
  return {s + alpha * v * s * (1 - s),
          bend * x.error + kFunctionUnits * (1 + std::abs(alpha * v)) + kFlush};
}

Bounded gelu_slope(Bounded x) {
  const double v = x.value;
  const double density = std::exp(-0.5 * v * v) / std::sqrt(2 * std::numbers::pi);
  return {0.5 * std::erfc(-v / std::numbers::sqrt2) + v * density,
          kLargestBend * x.error + kFunctionUnits * (1 + std::abs(v)) + kFlush};
}

/// 1 - tanh^2 cancels as well, and meets the slope of a cubic.
Bounded gelu_tanh_slope(Bounded x) {
  const double v = x.value;
  const double root = std::sqrt(2.0 / std::numbers::pi);
  const double tanh = std::tanh(root * (v + 0.044715 * v * v * v));
  const double cubic = root * (1 + 3 * 0.044715 * v * v);
  return {0.5 * (1 + tanh) + 0.5 * v * (1 - tanh * tanh) * cubic,
          kLargestBend * x.error + kFunctionUnits * (1 + std::abs(v) * cubic) + kFlush};
}

/// The derivative of what the gate becomes by itself.
Bounded activation_slope(const ExpertConfig& config, Bounded gate) {
  if (gate.may_overflow()) return {0, HUGE_VAL};
  switch (config.activation) {
    case Activation::kSilu: return silu_slope(gate, 1.0);
    case Activation::kGelu: return gelu_slope(gate);
    case Activation::kGeluTanh: return gelu_tanh_slope(gate);
    case Activation::kRelu: return passes(gate.low() > 0, gate.high() > 0);
    case Activation::kRelu2: return {2 * std::max(gate.value, 0.0), 2 * gate.error};
    case Activation::kIdentity: return {1.0, 0};
    case Activation::kClampedSwiglu: {
      const double limit = config.limit;
      const Bounded clamped{std::min(gate.value, limit), gate.error};
      return multiply(passes_clamp(gate, -HUGE_VAL, limit), silu_slope(clamped, config.alpha));
    }
  }
  return {};
}

}  // namespace

InnerSlopes inner_slopes(const ExpertConfig& config, Bounded gate, Bounded up) {
  const Bounded slope = activation_slope(config, gate);
  if (!config.gated) return {.gate = slope};
  ExpertConfig plain = config;
  plain.gated = false;
  const Bounded activated = inner_value(plain, gate, {});
  if (config.activation != Activation::kClampedSwiglu) {
    return {.gate = multiply(slope, up), .up = activated};
  }
  if (up.may_overflow()) return {.gate = {0, HUGE_VAL}, .up = {0, HUGE_VAL}};
  const double limit = config.limit;
  const Bounded clamped{std::clamp(up.value, -limit, limit), up.error};
  return {.gate = multiply(slope, add(clamped, {1.0, 0})),
          .up = multiply(activated, passes_clamp(up, -limit, limit))};
}

ExpertBackward::ExpertBackward(const ExpertConfig& config, const ExpertMatrices& matrices,
                               const Precision& precision)
    : config_(config),
      matrices_(matrices),
      compute_(precision.compute),
      may_round_inner_gradient_(precision.may_round_inner_gradient),
      loss_(precision.product_loss()),
      width_(config.gated ? 2 * config.inner : config.inner),
      w13_(at(width_ * config.hidden), BoundedSum(compute_)),
      w2_(at(config.hidden * config.inner), BoundedSum(compute_)),
      b13_(config.bias ? at(width_) : 0),
      b2_(config.bias ? at(config.hidden) : 0) {}

ExpertBackward::Row ExpertBackward::add(std::span<const double> x, std::span<const double> dout,
                                        Bounded weight) {
  const std::size_t hidden = at(config_.hidden);
  const std::size_t inner = at(config_.inner);
  std::vector<BoundedSum> da(
      inner, BoundedSum(compute_));  // dout W2: of the activation, before the row's weight.
  BoundedSum dweight;
  for (std::size_t h = 0; h < hidden; ++h) {
    for (std::size_t i = 0; i < inner; ++i) {
      da[i].add({dout[h], 0}, {matrices_.down[h * inner + i], 0});
    }
    if (!config_.bias) continue;
    dweight.add({dout[h], 0}, {double{matrices_.down_bias[h]}, 0});
    b2_[h].add({dout[h], 0}, weight);
  }
  std::vector<Bounded> weighted(inner);  // w a, as the second product's weights meet it.
  std::vector<Bounded> dz(at(width_));
  for (std::size_t i = 0; i < inner; ++i) {
    const auto row = static_cast<std::int64_t>(i);
    const auto preactivation = [&](const std::vector<double>& matrix,
                                   const std::vector<float>& bias) {
      return convert(compute_, dot(matrix, row, x, {}, bias, loss_));
    };
    const Bounded gate = preactivation(matrices_.gate, matrices_.gate_bias);
    Bounded up;
    if (config_.gated) up = preactivation(matrices_.up, matrices_.up_bias);
    const Bounded a = inner_value(config_, gate, up);
    const InnerSlopes slopes = inner_slopes(config_, gate, up);
    Bounded of_a = da[i].total();
    if (may_round_inner_gradient_) of_a = perhaps_converted(compute_, of_a);
    dweight.add(of_a, a);
    weighted[i] = convert(compute_, multiply(weight, a));
    const Bounded scaled = multiply(weight, of_a);
    dz[i] = convert(compute_, multiply(scaled, slopes.gate));
    if (config_.gated) dz[inner + i] = convert(compute_, multiply(scaled, slopes.up));
  }
  for (std::size_t h = 0; h < hidden; ++h) {
    for (std::size_t i = 0; i < inner; ++i) w2_[h * inner + i].add({dout[h], 0}, weighted[i]);
  }
  std::vector<BoundedSum> dx(hidden, BoundedSum(compute_));
  for (std::size_t j = 0; j < dz.size(); ++j) {
    const std::vector<double>& matrix = j < inner ? matrices_.gate : matrices_.up;
    const double* const of_row = matrix.data() + (j < inner ? j : j - inner) * hidden;
    for (std::size_t h = 0; h < hidden; ++h) {
      w13_[j * hidden + h].add(dz[j], {x[h], 0});
      dx[h].add(dz[j], {of_row[h], 0});
    }
    if (config_.bias) b13_[j].add(dz[j]);
  }
  return {.weight = dweight.total(), .dx = totals(dx)};
}

ExpertGradient ExpertBackward::gradient() const {
  return {.w13 = totals(w13_), .w2 = totals(w2_), .b13 = totals(b13_), .b2 = totals(b2_)};
}

}  // namespace switchyard::reference
