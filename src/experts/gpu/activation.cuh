#pragma once

// The activations in fp32, for the kernels that apply them to sums still in registers. `kPlain`
// calls pass the one value as gate; the choice of activation is made outside the loop over values.

#include <math_constants.h>

#include <type_traits>

#include "core/gpu/ptx.cuh"
#include "experts/gpu/activation_params.hpp"

namespace switchyard {

/// x * sigmoid(scale * x); right to 3e-7 of the larger of |x| and 1. Coarse, of one approximation
/// in place of two: on Hopper right to 2^-17 of |x|, for what is rounded to fewer bits.
template <bool kCoarse>
__device__ __forceinline__ float sigmoid_weighted(float x, float scale) {
  if constexpr (kCoarse) {
    const float half = 0.5F * x;  // sigmoid(z) = (1 + tanh(z / 2)) / 2
    return fmaf(half, ptx::tanh_approx(scale * half), half);
  } else {
    constexpr float kLog2E = 1.44269504F;
    return x * ptx::reciprocal_approx(1.0F + ptx::exp2_approx(-kLog2E * scale * x));
  }
}

template <bool kCoarse>
__device__ __forceinline__ float gelu_tanh(float x) {
  // tanh(z) = 2 sigmoid(2z) - 1, so gelu is x * sigmoid(2z).
  constexpr float kTwoRootTwoOverPi = 1.59576912F;
  return sigmoid_weighted<kCoarse>(x, kTwoRootTwoOverPi * (1.0F + 0.044715F * x * x));
}

/// kRelu is max(x, floor), which without one is kIdentity: a body of its own for that would cost
/// the grouped kernels, whose sums fill the registers, some more spills.
__device__ __forceinline__ float relu_floor(const ActivationParams& params) {
  return params.kind == Activation::kIdentity ? -CUDART_INF_F : 0.0F;
}

/// kCoarse: sigmoids as sigmoid_weighted() has them.
template <Activation kKind, bool kGated, bool kCoarse = false>
__device__ __forceinline__ float activate(float gate, float up, const ActivationParams& params) {
  if constexpr (kKind == Activation::kClampedSwiglu) {
    const float g = fminf(gate, params.limit);
    const float u = fminf(fmaxf(up, -params.limit), params.limit);
    return sigmoid_weighted<kCoarse>(g, params.alpha) * (u + 1.0F);
  } else {
    float y = gate;
    if constexpr (kKind == Activation::kSilu) {
      y = sigmoid_weighted<kCoarse>(gate, 1.0F);
    } else if constexpr (kKind == Activation::kGelu) {
      y = 0.5F * gate * (1.0F + erff(gate * 0.70710678F));
    } else if constexpr (kKind == Activation::kGeluTanh) {
      y = gelu_tanh<kCoarse>(gate);
    } else if constexpr (kKind == Activation::kRelu) {
      y = ptx::max_nan(gate, relu_floor(params));
    } else {
      static_assert(kKind == Activation::kRelu2);
      y = fmaxf(gate, 0.0F) * fmaxf(gate, 0.0F);
    }
    return kGated ? y * up : y;
  }
}

/// Calls body(std::integral_constant<Activation, kind>), of kIdentity with kRelu.
template <typename Body>
__device__ __forceinline__ void with_activation(Activation kind, Body&& body) {
  using enum Activation;
  switch (kind) {
    case kSilu: body(std::integral_constant<Activation, kSilu>{}); break;
    case kGelu: body(std::integral_constant<Activation, kGelu>{}); break;
    case kGeluTanh: body(std::integral_constant<Activation, kGeluTanh>{}); break;
    case kIdentity:
    case kRelu: body(std::integral_constant<Activation, kRelu>{}); break;
    case kRelu2: body(std::integral_constant<Activation, kRelu2>{}); break;
    case kClampedSwiglu: body(std::integral_constant<Activation, kClampedSwiglu>{}); break;
  }
}

}  // namespace switchyard
