#pragma once

#include "layer/cpu/buffers.hpp"
#include "layer/network_parts.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/parameter.hpp"
#include "switchyard/route.hpp"

namespace switchyard {

/// What a router's logits are made of (RouterNetwork): router_gemm of parameters, and functions of
/// rows between. Of a linear network nothing is done here. Nothing is kept for the backward: what
/// the forward has made is made again, by the same products.
/// Cost: 2*T*M*H operations (Hadamard 4), back three times that, and an erfc for each of the T*M.
class CpuNetwork {
 public:
  CpuNetwork(const RouterNetwork& network, const Parameter& parameters)
      : network_(network), parameters_(parameters) {}

  /// [T, D] f32 of tokens [T, H] as the router sees them; valid until the next call.
  ConstRawMatrix features(ConstRawMatrix tokens, const Execution& execution);
  /// [E, D]: what features are multiplied with; of kCosine made of the gate, and valid until the
  /// next call.
  ConstRawMatrix scaled(ConstRawMatrix gate);
  /// router_gemm_backward() through the network: `args.tokens` and `args.gate` are what the forward
  /// was given. @param dparameters  out [size], or empty; args.accumulate is for it too.
  void backward(const RouterGemmBackwardArgs& args, Vector<float> dparameters);

 private:
  using Kind = RouterNetwork::Kind;

  [[nodiscard]] NetworkParts<const float> values(std::int64_t hidden) const {
    return NetworkParts<const float>::of(network_, hidden, parameters_.floats().data());
  }
  void scale_gate_backward(const RouterGemmBackwardArgs& args, float* dscale);

  RouterNetwork network_;
  Parameter parameters_;
  /// [T, M]: W1 x + b1 or P x, and gelu of it; [T, H]: W2 gelu + b2; and z.
  ArrayBuffer<float> inner_, active_, factor_, features_;
  ArrayBuffer<float> gate_, dgate_, dfeatures_, dfactor_, dinner_, widened_;
};

}  // namespace switchyard
