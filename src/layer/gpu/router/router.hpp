#pragma once

#include <optional>
#include <vector>

#include "core/gpu/device_buffer.hpp"
#include "core/gpu/tensor_map.hpp"
#include "layer/gpu/host_staging.hpp"
#include "layer/gpu/router/network.hpp"
#include "layer/gpu/router/residual.hpp"
#include "layer/saved_forward.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// Copies to device memory, once; nothing for no values.
void upload(const std::vector<float>& values, DeviceBuffer& to);

/// What upload() left: [n], or empty.
[[nodiscard]] Vector<const float> uploaded(const DeviceBuffer& buffer);

/// The router of a layer on one GPU: router_gemm, noise, route and apply_capacity, enqueued on the
/// execution's stream, in memory that is made once.
class CudaRouter {
 public:
  /// @param compute  Type of the tokens; the gate takes it too where that loses nothing.
  CudaRouter(const LayerModel& model, const LayerOptions& options, DType compute);

  /// All memory that calls of so many tokens need.
  void reserve(std::int64_t num_tokens);
  /// What the router, or the routing that `args` gives, makes of the tokens [T, H] (compute type);
  /// in the memory of `saved` where that is given.
  void run(const ForwardArgs& args, ConstRawMatrix tokens, const Execution& execution,
           SavedForward::State* saved = nullptr);
  /// As run() of such tokens, so that all kernels are loaded; of a routing that nobody reads.
  void rehearse(ConstRawMatrix tokens, const Execution& execution);
  /// Of the last run().
  [[nodiscard]] const Routing& routing() const { return routing_; }
  /// [T, K], or empty: all.
  [[nodiscard]] Matrix<const std::uint8_t> kept() const { return kept_view_; }
  /// Of the last run(), once its stream was waited for. @throws Error{kInvalidArgument}: as
  /// MoeLayer::stats().
  [[nodiscard]] metrics::Routing stats(int num_ranks) const;
  [[nodiscard]] const RouterConfig& config() const { return config_; }
  /// Whether a call draws noise of this kind.
  [[nodiscard]] bool draws_noise(const RouteRequest& request, RouterNoise::Kind kind) const {
    return request.training && config_.noise.kind == kind;
  }
  /// The tokens as the router sees them: with their jitter where the call has it; valid until the
  /// next call.
  [[nodiscard]] ConstRawMatrix seen(ConstRawMatrix tokens, const RouteRequest& request,
                                    const Execution& execution);
  /// Gates behind each other: of a chain's iterations, or one.
  [[nodiscard]] std::int32_t num_gates() const { return num_gates_; }
  /// Of a chain: its gate and biases from here on.
  void use_iteration(std::int32_t iteration) { iteration_ = iteration; }
  /// Bytes of Execution::workspace that its products need, there and back.
  [[nodiscard]] std::int64_t workspace_bytes(std::int64_t num_tokens) const;
  [[nodiscard]] std::int64_t backward_workspace_bytes(std::int64_t num_tokens) const;
  /// Memory of the way back.
  void reserve_backward(std::int64_t num_tokens);
  /// router_gemm_backward() through gate() and the network, of `args.tokens` as seen() gives them.
  /// @param scratch  For products of the forward, which are made again.
  void logits_backward(RouterGemmBackwardArgs args, Vector<float> dnetwork,
                       const Execution& scratch);
  /// Of a gating residual: what `dlogits` come to of the logits before, `dprevious` [T, E], and of
  /// the matrix, `dresidual` [E * E]; either may be empty.
  void residual_backward(Matrix<const float> previous, Matrix<const float> dlogits,
                         Matrix<float> dprevious, Vector<float> dresidual, bool accumulate,
                         const Execution& execution) {
    residual_.backward(previous, dlogits, dprevious, dresidual, accumulate, execution);
  }
  [[nodiscard]] ConstRawMatrix noise_gate() const {
    return noise_gate_.matrix(config_.num_logits(), hidden_);
  }
  /// [T, E] of learned noise: tokens * noise gate^T; valid until the next call.
  [[nodiscard]] Matrix<const float> noise_logits(ConstRawMatrix tokens, const Execution& execution);
  [[nodiscard]] RouterCapacity capacity_for(std::int64_t num_tokens) const;
  /// Enqueues the copies of what the last run() decided, through `staging` if there is one.
  void download(RoutingRecord& record, cudaStream_t stream, HostStaging* staging) const;

 private:
  /// The caller's routing: where it lies if that is on the device and may be, else copied.
  void take_given(const ForwardArgs& args, bool may_stay, cudaStream_t stream);
  void keep_previous(const RouteRequest& request, SavedForward::State& saved,
                     cudaStream_t stream) const;
  /// The call's token ids: where they lie if that is on the device, else copied.
  [[nodiscard]] Vector<const std::int32_t> ids_on_device(Vector<const std::int32_t> ids,
                                                         cudaStream_t stream);
  /// [E, H], of a network [E, D]; of a chain the iteration's.
  [[nodiscard]] ConstRawMatrix gate() const {
    const std::int64_t rows = config_.num_logits();
    const std::int64_t cols = config_.network.features(hidden_);
    const ConstRawMatrix gates = gate_.matrix(num_gates_ * rows, cols);
    return {gates.row(iteration_ * rows), gates.dtype, rows, cols};
  }
  /// That of the iteration, of `size`; or none.
  [[nodiscard]] Vector<const float> bias(const Parameter& biases, std::int64_t size) const {
    if (biases.empty()) return {};
    return {biases.vector().data + iteration_ * size, {size}};
  }
  void multiply(ConstRawMatrix tokens, ConstRawMatrix gate, bool fresh, TensorMaps& maps,
                Vector<const float> bias, Matrix<float> logits, const Execution& execution) const;
  /// The logits, still without their noise. @returns [T, E] of learned noise; else empty.
  Matrix<const float> make_logits(ConstRawMatrix tokens, const RouteRequest& request,
                                  Matrix<float> logits, const Execution& execution);
  /// Their noise, the choice and, where that is saved, the sums of the layer's losses.
  void select(Matrix<float> logits, Matrix<const float> noise_logits, const RouteRequest& request,
              const Execution& execution, SavedForward::State* saved);
  void limit(Matrix<std::uint8_t> kept, const Execution& execution);

  RouterConfig config_;
  std::int64_t hidden_;
  std::int32_t num_gates_;
  std::int32_t iteration_ = 0;
  std::optional<double> capacity_factor_;
  DropPolicy drop_policy_;
  LossConfig losses_;
  DeviceBuffer uploaded_gate_, uploaded_noise_gate_, uploaded_bias_, uploaded_selection_bias_,
      uploaded_network_, uploaded_residual_, hash_table_;
  bool used_in_place_;  ///< Some are the caller's, who may write them just before a call.
  Parameter gate_, noise_gate_, bias_, selection_bias_;
  CudaRouterNetwork network_;
  CudaGatingResidual residual_;
  TensorMaps gate_maps_, noise_gate_maps_;

  DeviceBuffer logits_, expert_, weight_, score_, kept_, counts_, counts_kept_, token_ids_,
      jittered_, noise_logits_;
  Routing routing_;
  bool own_ = false;  ///< Of the last run(): routing_ is the router's own and nothing was saved;
  Matrix<const float> own_logits_;  ///< then of a router that has logits; else empty.
  Vector<float> top_score_;  ///< Of the last run(): asked for, or what kBpr goes by; else empty.
  Matrix<std::uint8_t> kept_view_;
};

}  // namespace switchyard
