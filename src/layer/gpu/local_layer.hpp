#pragma once

#include "core/gpu/device_wide.hpp"
#include "layer/gpu/backward/backward.hpp"
#include "layer/gpu/stages.hpp"
#include "layer/layer_runner.hpp"

namespace switchyard {

/// A layer on one GPU that holds all experts: route, plan, experts, combine, shared experts,
/// enqueued on the call's stream.
class LocalLayer final : public LayerRunner {
 public:
  LocalLayer(const LayerModel& model, const LayerOptions& options);
  ~LocalLayer() override { (void)wait_for_device(); }
  LocalLayer(const LocalLayer&) = delete;
  LocalLayer& operator=(const LocalLayer&) = delete;

  void forward(const ForwardArgs& args) override;
  void backward(const BackwardArgs& args) override;
  void reload_experts() override;
  void use_iteration(std::int32_t iteration) override { stages_.use_iteration(iteration); }
  void check() override;
  [[nodiscard]] metrics::Routing stats() override {
    check();
    return stages_.router().stats(1);
  }
  [[nodiscard]] const ExpertWeights& weights() const override {
    return stages_.experts().weights();
  }

 private:
  void reserve(std::int64_t num_tokens);
  [[nodiscard]] DType sums_type() const;
  [[nodiscard]] ConstRawMatrix to_device(ConstRawMatrix tokens);
  /// What a dispatch leaves of the tokens where there is one. Reports "dequantize".
  [[nodiscard]] ConstRawMatrix crossed(ConstRawMatrix tokens);
  /// The state that a forward is to fill; memory for it and for its backward.
  [[nodiscard]] SavedForward::State& begin_saving(const ForwardArgs& args);
  /// Weighted sums of the experts' outputs, and the report of the call, which comes last.
  void run_experts(const TokensForExperts& input, RawMatrix out, SavedForward::State* saved);

  LayerOptions options_;
  CudaStages stages_;
  DeviceBuffer host_tokens_, host_out_, sums_;
  CudaLayerBackward backward_;
  const std::uint64_t number_ = next_layer_number();
  std::int64_t reloads_ = 0;
};

}  // namespace switchyard
