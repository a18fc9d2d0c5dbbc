#pragma once

#include <optional>
#include <vector>

#include "core/gpu/device_buffer.hpp"
#include "core/gpu/tensor_map.hpp"
#include "layer/gpu/host_staging.hpp"
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
  /// [E, H].
  [[nodiscard]] ConstRawMatrix gate() const { return as_gate(gate_); }
  [[nodiscard]] ConstRawMatrix noise_gate() const { return as_gate(noise_gate_); }
  /// [T, E] of learned noise: tokens * noise gate^T; valid until the next call.
  [[nodiscard]] Matrix<const float> noise_logits(ConstRawMatrix tokens, const Execution& execution);
  [[nodiscard]] RouterCapacity capacity_for(std::int64_t num_tokens) const;
  /// Enqueues the copies of what the last run() decided, through `staging` if there is one.
  void download(RoutingRecord& record, cudaStream_t stream, HostStaging* staging) const;

 private:
  /// The caller's routing: where it lies if that is on the device and may be, else copied.
  void take_given(const ForwardArgs& args, bool may_stay, cudaStream_t stream);
  /// The call's token ids: where they lie if that is on the device, else copied.
  [[nodiscard]] Vector<const std::int32_t> ids_on_device(Vector<const std::int32_t> ids,
                                                         cudaStream_t stream);
  [[nodiscard]] ConstRawMatrix as_gate(const Parameter& gate) const {
    return gate.matrix(config_.num_logits(), gate.size() / config_.num_logits());
  }
  void multiply(ConstRawMatrix tokens, ConstRawMatrix gate, TensorMaps& maps,
                Vector<const float> bias, Matrix<float> logits, const Execution& execution) const;
  /// The logits, still without their noise. @returns [T, E] of learned noise; else empty.
  Matrix<const float> make_logits(ConstRawMatrix tokens, const RouteRequest& request,
                                  Matrix<float> logits, const Execution& execution);
  /// Their noise, the choice and, where that is saved, the sums of the layer's losses.
  void select(Matrix<float> logits, Matrix<const float> noise_logits, const RouteRequest& request,
              const Execution& execution, SavedForward::State* saved);
  void limit(Matrix<std::uint8_t> kept, const Execution& execution);

  RouterConfig config_;
  std::optional<double> capacity_factor_;
  DropPolicy drop_policy_;
  LossConfig losses_;
  DeviceBuffer uploaded_gate_, uploaded_noise_gate_, uploaded_bias_, uploaded_selection_bias_,
      hash_table_;
  bool used_in_place_;  ///< Some are the caller's, who may write them just before a call.
  Parameter gate_, noise_gate_, bias_, selection_bias_;
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
