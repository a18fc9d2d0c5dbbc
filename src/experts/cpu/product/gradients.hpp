#pragma once

// The derivatives of the activations on a vector type V; math.hpp has the activations.

#include <numbers>

#include "experts/cpu/kernels/kernels.hpp"
#include "experts/cpu/product/math.hpp"

namespace switchyard::cpu {

/// A value and its derivative by the gate.
template <class V>
struct Slope {
  typename V::Reg value;
  typename V::Reg slope;
};

/// 1 where x >= 0 or +0, else 0. Neither for NaN.
template <class V>
inline typename V::Reg not_negative(typename V::Reg x) {
  return V::select_negative(x, V::zero(), V::set(1.0F));
}

/// g * sigmoid(scale * g).
template <class V>
inline Slope<V> swish(typename V::Reg g, typename V::Reg scale) {
  const auto s = sigmoid<V>(V::mul(scale, g));
  const auto value = V::mul(g, s);
  const auto rest = V::mul(scale, V::sub(V::set(1.0F), s));
  return {value, V::fma(value, rest, s)};
}

/// The nonlinearity of the gate alone, of kIdentity none. At 0 relu's derivative is 0.
/// kClampedSwiglu is below.
template <class V>
inline Slope<V> activation_slope(Activation kind, typename V::Reg g) {
  const auto one = V::set(1.0F);
  switch (kind) {
    case Activation::kSilu: return swish<V>(g, one);
    case Activation::kGelu: {
      const auto cdf = normal_cdf<V>(g);
      const auto density =
          V::mul(V::set(static_cast<float>(0.5 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi)),
                 exp<V>(V::mul(V::mul(g, g), V::set(-0.5F))));
      return {V::mul(g, cdf), V::fma(g, density, cdf)};
    }
    case Activation::kGeluTanh: {
      // s = sigmoid(2u): value g s, slope s + g s (1 - s) (2u)', u as in math.hpp.
      const auto square = V::mul(g, g);
      const auto twice = V::set(1.59576912F);
      const auto s = sigmoid<V>(V::mul(V::fma(V::mul(square, V::set(0.044715F)), g, g), twice));
      const auto slope = V::mul(twice, V::fma(V::set(0.134145F), square, one));
      const auto value = V::mul(g, s);
      return {value, V::fma(V::mul(value, V::sub(one, s)), slope, s)};
    }
    case Activation::kRelu:
      return {V::max(V::zero(), g), V::select_negative(V::sub(V::zero(), g), one, V::zero())};
    case Activation::kRelu2: {
      const auto positive = V::max(V::zero(), g);
      return {V::mul(positive, positive), V::add(positive, positive)};
    }
    default: return {g, one};
  }
}

/// One row: values of the intermediate times the row's weight, and the gradients of gate and up.
/// Returns <dinner, act(gate, up)>, added in lanes and then over the lanes.
template <class V>
float activation_gradient(const GradientArgs& args) {
  using Reg = typename V::Reg;
  const ExpertConfig& config = *args.config;
  const bool clamped = config.activation == Activation::kClampedSwiglu;
  const Reg weight = V::set(args.weight);
  const std::int64_t spread = args.taking_turns ? 2 : 1;  // panels have two vectors of columns
  Reg dot = V::zero();
  for (std::int64_t i = 0; i < args.count; i += V::kWidth) {
    Reg g = V::load(args.gate + i);
    const Reg dinner = V::load(args.dinner + i);
    const Reg gradient = V::mul(weight, dinner);
    Reg value = V::zero();
    if (clamped) {
      const Reg limit = V::set(config.limit);
      const Reg u = V::load(args.up + i);
      const Reg gate_counts = not_negative<V>(V::sub(limit, g));
      const Reg up_counts = not_negative<V>(V::sub(limit, V::abs(u)));
      g = V::min(limit, g);
      const Reg factor = V::add(V::max(V::set(-config.limit), V::min(limit, u)), V::set(1.0F));
      const Slope<V> gate = swish<V>(g, V::set(config.alpha));
      value = V::mul(gate.value, factor);
      V::store(args.dgate + i * spread,
               V::mul(V::mul(gradient, factor), V::mul(gate.slope, gate_counts)));
      V::store(args.dup + i * spread, V::mul(gradient, V::mul(gate.value, up_counts)));
    } else {
      const Slope<V> gate = activation_slope<V>(config.activation, g);
      if (args.up == nullptr) {
        value = gate.value;
        V::store(args.dgate + i * spread, V::mul(gradient, gate.slope));
      } else {
        const Reg u = V::load(args.up + i);
        value = V::mul(gate.value, u);
        V::store(args.dgate + i * spread, V::mul(V::mul(gradient, u), gate.slope));
        V::store(args.dup + i * spread, V::mul(gradient, gate.value));
      }
    }
    V::store(args.inner + i, V::mul(weight, value));
    dot = V::fma(dinner, value, dot);
  }
  float lanes[V::kWidth];
  V::store(lanes, dot);
  float sum = 0.0F;
  for (const float lane : lanes) sum += lane;
  return sum;
}

}  // namespace switchyard::cpu
