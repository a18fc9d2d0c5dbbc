#pragma once

#include <optional>

#include "layer/gpu/exchange.hpp"
#include "layer/gpu/host_staging.hpp"
#include "layer/gpu/stages.hpp"
#include "layer/layer_runner.hpp"

namespace switchyard {

/// A layer over ranks on GPUs: the tokens go to their experts before the plan, and sums come home
/// after the combine. Collective, as its exchange is.
class ExchangeLayer final : public LayerRunner {
 public:
  ExchangeLayer(const LayerModel& model, const LayerOptions& options, Communicator& communicator);
  ~ExchangeLayer() override { cudaDeviceSynchronize(); }
  ExchangeLayer(const ExchangeLayer&) = delete;
  ExchangeLayer& operator=(const ExchangeLayer&) = delete;

  void forward(const ForwardArgs& args) override;
  void check() override;
  [[nodiscard]] const ExpertWeights& weights() const override {
    return stages_.experts().weights();
  }

 private:
  /// What the experts' rank sums up: an exchange itself quantises to fp8.
  [[nodiscard]] DType sums_type() const;
  /// Of tokens, output, given routing and record of one call.
  [[nodiscard]] std::size_t staging_bytes() const;
  /// Runs all stages but the exchange, on no rows: what the driver does at a first launch (loading,
  /// room for stacks) may wait for the device, and so for ranks that wait for this one.
  void rehearse();
  void raise_status();

  [[nodiscard]] ConstRawMatrix to_device(ConstRawMatrix tokens);
  /// With given routing where copies of it need no lock.
  [[nodiscard]] ForwardArgs staged(ForwardArgs args);
  /// Rows that have come, in the type that the experts compute with: there is no fp8 product yet.
  /// Reports "dequantize".
  [[nodiscard]] ConstRawMatrix decoded(const DeviceReceived& received);

  /// In low latency the dispatch makes the experts' lists, and what they make of a row is summed
  /// while it is sent home: no plan, no combine between.
  void run_by_lists(ConstRawMatrix tokens, Matrix<const float> shared, RawMatrix out);
  /// Places without a row have no expert, so the plan takes all places, and the experts gather rows
  /// where they have arrived; what they make of a row is one row of sums, at the same place, in the
  /// window where the tokens' ranks read it.
  void run_by_plan(ConstRawMatrix tokens, Matrix<const float> shared, RawMatrix out);
  void report(const std::int32_t* used, const DeviceReceived& received);

  LayerOptions options_;
  int num_ranks_;
  CudaStages stages_;
  bool by_lists_ = false;
  DeviceBuffer host_tokens_, host_out_, sums_;
  std::optional<HostStaging> staging_;
  std::optional<CudaExchange> exchange_;  ///< Ends first: all ranks' kernels have left then.
};

}  // namespace switchyard
