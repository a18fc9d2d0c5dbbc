#pragma once

// The activations on a vector type V. Written once for all instruction sets; a NaN stays a NaN.
// Every file that includes this gives a V of its own (in an unnamed namespace), so that no code
// compiled for one instruction set can be linked into another's.

#include "switchyard/experts.hpp"

namespace switchyard::cpu {

/// e^x to about 1 float ulp; x is kept within [-87, 88].
template <class V>
inline typename V::Reg exp(typename V::Reg x) {
  using Reg = typename V::Reg;
  x = V::max(V::set(-87.0F), V::min(V::set(88.0F), x));  // in this order a NaN passes
  const Reg n = V::round(V::mul(x, V::set(1.44269504F)));
  // ln 2 in two parts: n * 0.693359375 is exact.
  Reg r = V::fma(n, V::set(-0.693359375F), x);
  r = V::fma(n, V::set(2.12194440e-4F), r);
  // (e^r - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2]: least squares at Chebyshev points, error 5e-11.
  Reg p = V::set(0.00019909646F);
  p = V::fma(p, r, V::set(0.0013946446F));
  p = V::fma(p, r, V::set(0.0083332807F));
  p = V::fma(p, r, V::set(0.041666262F));
  p = V::fma(p, r, V::set(0.16666667F));
  p = V::fma(p, r, V::set(0.5F));
  p = V::add(V::set(1.0F), V::fma(V::mul(r, r), p, r));
  return V::mul(p, V::pow2(n));
}

template <class V>
inline typename V::Reg sigmoid(typename V::Reg x) {
  const auto one = V::set(1.0F);
  return V::div(one, V::add(one, exp<V>(V::sub(V::zero(), x))));
}

/// The normal distribution function. Upper tail: e^(-z^2/2) q(1 / (1 + 0.3 z)) for z in [0, 14],
/// q by least squares at Chebyshev points, relative error 2e-7 in float.
template <class V>
inline typename V::Reg normal_cdf(typename V::Reg x) {
  using Reg = typename V::Reg;
  const Reg z = V::min(V::set(14.0F), V::abs(x));
  const Reg t = V::div(V::set(1.0F), V::fma(V::set(0.3F), z, V::set(1.0F)));
  Reg q = V::set(-0.0048288116F);
  q = V::fma(q, t, V::set(0.06341794F));
  q = V::fma(q, t, V::set(-0.22512768F));
  q = V::fma(q, t, V::set(0.29923499F));
  q = V::fma(q, t, V::set(-0.13171674F));
  q = V::fma(q, t, V::set(0.17025214F));
  q = V::fma(q, t, V::set(0.085773885F));
  q = V::fma(q, t, V::set(0.12368564F));
  q = V::fma(q, t, V::set(0.11929229F));
  q = V::fma(q, t, V::set(1.6371758e-5F));
  const Reg tail = V::mul(q, exp<V>(V::mul(V::mul(z, z), V::set(-0.5F))));
  return V::select_negative(x, tail, V::sub(V::set(1.0F), tail));
}

/// The nonlinearity of the gate alone, of kIdentity none. kClampedSwiglu is in gated().
template <class V>
inline typename V::Reg activation(Activation kind, typename V::Reg g) {
  switch (kind) {
    case Activation::kSilu: return V::mul(g, sigmoid<V>(g));
    case Activation::kGelu: return V::mul(g, normal_cdf<V>(g));
    case Activation::kGeluTanh: {
      // (1 + tanh u) / 2 = sigmoid(2u), u = sqrt(2 / pi) (g + 0.044715 g^3).
      const auto inner = V::fma(V::mul(V::mul(g, g), V::set(0.044715F)), g, g);
      return V::mul(g, sigmoid<V>(V::mul(inner, V::set(1.59576912F))));
    }
    case Activation::kRelu: return V::max(V::zero(), g);
    case Activation::kRelu2: {
      const auto positive = V::max(V::zero(), g);
      return V::mul(positive, positive);
    }
    default: return g;
  }
}

template <class V>
inline typename V::Reg gated(const ExpertConfig& config, typename V::Reg g, typename V::Reg u) {
  if (config.activation != Activation::kClampedSwiglu) {
    return V::mul(activation<V>(config.activation, g), u);
  }
  g = V::min(V::set(config.limit), g);
  u = V::max(V::set(-config.limit), V::min(V::set(config.limit), u));
  return V::mul(V::mul(g, sigmoid<V>(V::mul(V::set(config.alpha), g))), V::add(u, V::set(1.0F)));
}

}  // namespace switchyard::cpu
