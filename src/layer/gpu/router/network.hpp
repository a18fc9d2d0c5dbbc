#pragma once

#include <algorithm>

#include "core/gpu/device_buffer.hpp"
#include "core/gpu/tensor_map.hpp"
#include "layer/network_parts.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/parameter.hpp"
#include "switchyard/route.hpp"

namespace switchyard {

/// What a router's logits are made of (RouterNetwork) on a GPU: router_gemm of parameters, and
/// functions of rows between, enqueued in memory that is made once. Of a linear network nothing is
/// done here. Nothing is kept for the backward: what the forward has made is made again, by the
/// same products. Widths that are multiples of 8.
/// Cost: as CpuNetwork.
class CudaRouterNetwork {
 public:
  /// @param parameters  On the device; of a linear network none.
  CudaRouterNetwork(const RouterNetwork& network, std::int64_t hidden, Parameter parameters)
      : network_(network),
        hidden_(hidden),
        width_(network.inner(hidden)),
        parameters_(std::move(parameters)) {}

  /// All memory that calls of so many tokens need, and that of their way back.
  void reserve(std::int64_t num_tokens, std::int64_t num_logits);
  void reserve_backward(std::int64_t num_tokens, std::int64_t num_logits);
  /// Bytes of Execution::workspace: of features(), and of backward().
  [[nodiscard]] std::int64_t workspace_bytes(std::int64_t num_tokens) const;
  [[nodiscard]] std::int64_t backward_workspace_bytes(std::int64_t num_tokens,
                                                      std::int64_t num_logits) const;

  /// [T, D] f32 of tokens [T, H] as the router sees them; valid until the next call.
  [[nodiscard]] ConstRawMatrix features(ConstRawMatrix tokens, const Execution& execution);
  /// [E, D]: what features are multiplied with; of kCosine made of the gate, and valid until the
  /// next call.
  [[nodiscard]] ConstRawMatrix scaled(ConstRawMatrix gate, const Execution& execution);
  /// router_gemm_backward() through the network: `args.tokens` and `args.gate` are what the forward
  /// was given. @param dparameters  out [size], or empty; args.accumulate is for it too.
  /// @param scratch  With the workspace of a forward.
  void backward(const RouterGemmBackwardArgs& args, Vector<float> dparameters,
                const Execution& scratch);

 private:
  using Kind = RouterNetwork::Kind;

  [[nodiscard]] NetworkParts<const float> values() const {
    return NetworkParts<const float>::of(network_, hidden_, parameters_.vector().data);
  }
  [[nodiscard]] bool is_cosine() const { return network_.kind == Kind::kCosine; }
  [[nodiscard]] bool is_hadamard() const { return network_.kind == Kind::kHadamard; }

  RouterNetwork network_;
  std::int64_t hidden_, width_;
  Parameter parameters_;
  TensorMaps maps_;
  /// [T, M]: W1 x + b1 or P x, and gelu of it; [T, H]: W2 gelu + b2; and z.
  DeviceBuffer inner_, active_, factor_, features_;
  DeviceBuffer gate_, dgate_, row_sums_, dfeatures_, dfactor_, dinner_;
};

}  // namespace switchyard
