#pragma once

#include "layer/gpu/stages.hpp"
#include "layer/layer_runner.hpp"

namespace switchyard {

/// A layer on one GPU that holds all experts: route, plan, experts, combine, shared experts,
/// enqueued on the call's stream.
class LocalLayer final : public LayerRunner {
 public:
  LocalLayer(const LayerModel& model, const LayerOptions& options);
  ~LocalLayer() override { cudaDeviceSynchronize(); }
  LocalLayer(const LocalLayer&) = delete;
  LocalLayer& operator=(const LocalLayer&) = delete;

  void forward(const ForwardArgs& args) override;
  void check() override;
  [[nodiscard]] const ExpertWeights& weights() const override {
    return stages_.experts().weights();
  }

 private:
  void reserve(std::int64_t num_tokens);
  [[nodiscard]] DType sums_type() const;
  [[nodiscard]] ConstRawMatrix to_device(ConstRawMatrix tokens);
  /// What a dispatch leaves of the tokens where there is one. Reports "dequantize".
  [[nodiscard]] ConstRawMatrix crossed(ConstRawMatrix tokens);
  /// Weighted sums of the experts' outputs, and the report of the call, which comes last.
  void run_experts(ConstRawMatrix tokens, Matrix<const float> shared, RawMatrix out);

  LayerOptions options_;
  CudaStages stages_;
  DeviceBuffer host_tokens_, host_out_, sums_;
};

}  // namespace switchyard
