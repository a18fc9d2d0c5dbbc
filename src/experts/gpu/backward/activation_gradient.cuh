#pragma once

// The activations' derivatives in fp32; experts/gpu/activation.cuh has the activations.

#include "experts/gpu/activation.cuh"

namespace switchyard {

/// activate() of a pre-activation, and its derivatives.
struct ActivationSlopes {
  float value;
  float gate;
  float up;  ///< Gated ones only.
};

/// 1 / (1 + exp(-x)).
__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kLog2E = 1.44269504F;
  return ptx::reciprocal_approx(1.0F + ptx::exp2_approx(-kLog2E * x));
}

/// The nonlinearity of the gate alone: value and derivative. At 0 relu's derivative is 0.
template <Activation kKind>
__device__ __forceinline__ ActivationSlopes gate_slope(float g, const ActivationParams& params) {
  if constexpr (kKind == Activation::kSilu || kKind == Activation::kClampedSwiglu) {
    const float scale = kKind == Activation::kSilu ? 1.0F : params.alpha;
    const float s = sigmoid(scale * g);
    return {g * s, s + g * s * (scale * (1.0F - s)), 0};
  } else if constexpr (kKind == Activation::kGelu) {
    constexpr float kMinusHalfLog2E = -0.72134752F;
    constexpr float kDensityAtZero = 0.39894228F;
    const float cdf = 0.5F * (1.0F + erff(g * 0.70710678F));
    const float density = kDensityAtZero * ptx::exp2_approx(kMinusHalfLog2E * g * g);
    return {g * cdf, cdf + g * density, 0};
  } else if constexpr (kKind == Activation::kGeluTanh) {
    constexpr float kTwoRootTwoOverPi = 1.59576912F;
    const float square = g * g;
    const float s = sigmoid(kTwoRootTwoOverPi * (g + 0.044715F * square * g));
    const float inside = kTwoRootTwoOverPi * (1.0F + 0.134145F * square);
    return {g * s, s + g * s * (1.0F - s) * inside, 0};
  } else if constexpr (kKind == Activation::kRelu) {
    const float floor = relu_floor(params);
    return {ptx::max_nan(g, floor), g > floor ? 1.0F : 0.0F, 0};
  } else {
    static_assert(kKind == Activation::kRelu2);
    const float positive = fmaxf(g, 0.0F);
    return {positive * positive, 2.0F * positive, 0};
  }
}

/// A clamp passes the gradient, ends included.
template <Activation kKind, bool kGated>
__device__ __forceinline__ ActivationSlopes activation_slopes(float gate, float up,
                                                              const ActivationParams& params) {
  if constexpr (kKind == Activation::kClampedSwiglu) {
    const ActivationSlopes of_gate = gate_slope<kKind>(fminf(gate, params.limit), params);
    const float factor = fminf(fmaxf(up, -params.limit), params.limit) + 1.0F;
    return {of_gate.value * factor, gate <= params.limit ? of_gate.gate * factor : 0.0F,
            fabsf(up) <= params.limit ? of_gate.value : 0.0F};
  } else {
    const ActivationSlopes of_gate = gate_slope<kKind>(gate, params);
    if constexpr (!kGated) return of_gate;
    return {of_gate.value * up, of_gate.gate * up, of_gate.value};
  }
}

}  // namespace switchyard
