#pragma once

#include <array>
#include <memory>
#include <optional>

#include "core/gpu/device_wide.hpp"
#include "core/gpu/saved_memory.hpp"
#include "layer/gpu/backward/backward.hpp"
#include "layer/gpu/backward/gradient_exchange.hpp"
#include "layer/gpu/exchange.hpp"
#include "layer/gpu/host_staging.hpp"
#include "layer/gpu/stages.hpp"
#include "layer/layer_runner.hpp"

namespace switchyard {

using DeviceSavedMemory = SavedOnDevice<SavedMemory>;

/// A layer over ranks on GPUs: the tokens go to their experts before the plan, and sums come home
/// after the combine. Collective, as its exchange is.
class ExchangeLayer final : public LayerRunner {
 public:
  ExchangeLayer(const LayerModel& model, const LayerOptions& options, Communicator& communicator);
  ~ExchangeLayer() override { (void)wait_for_device(); }
  ExchangeLayer(const ExchangeLayer&) = delete;
  ExchangeLayer& operator=(const ExchangeLayer&) = delete;

  void forward(const ForwardArgs& args) override;
  void backward(const BackwardArgs& args) override;
  /// Collective: memory is given back and made.
  void reload_experts() override;
  void use_iteration(std::int32_t iteration) override { stages_.use_iteration(iteration); }
  void check() override;
  [[nodiscard]] metrics::Routing stats() override {
    check();
    return stages_.router().stats(num_ranks_);
  }
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
  /// With given routing and token ids where copies of them need no lock.
  [[nodiscard]] ForwardArgs staged(ForwardArgs args);
  /// Rows that have come, in the compute type. Reports "dequantize".
  [[nodiscard]] ConstRawMatrix decoded(const DeviceReceived& received);
  /// As the experts take them: so, or (`fp8`) as e4m3, which those of an fp8 wire are.
  [[nodiscard]] RowsForExperts rows_of(const DeviceReceived& received, bool fp8);

  /// In low latency the dispatch makes the experts' lists, and what they make of a row is summed
  /// while it is sent home: no plan, no combine between.
  void run_by_lists(const TokensForExperts& input, RawMatrix out);
  /// Places without a row have no expert, so the plan takes all places, and the experts gather rows
  /// where they have arrived; what they make of a row is one row of sums, at the same place, in the
  /// window where the tokens' ranks read it.
  void run_by_plan(const TokensForExperts& input, RawMatrix out, SavedForward::State* saved);
  void report(const std::int32_t* used, const DeviceReceived& received);

  struct SavedPiece {
    SavedMemory::Part part;
    std::int64_t bytes;
  };
  /// What a forward of max_tokens keeps.
  [[nodiscard]] std::array<SavedPiece, 13> pieces_of(Recompute recompute);
  /// The state that a forward is to fill. Collective where memory is made for it or for its
  /// backward: at first, for a new SavedForward, and behind a recovery.
  [[nodiscard]] SavedForward::State& begin_saving(const ForwardArgs& args);
  void make_room(Recompute recompute, DeviceSavedMemory& memory);
  /// A copy of the rows that have come, as decoded(): the next dispatch writes over them.
  [[nodiscard]] ConstRawMatrix keep_received(const DeviceReceived& received,
                                             SavedForward::State& saved);
  /// All ranks count alike: a call that fails on one is followed by a recovery.
  void count_forward();

  LayerOptions options_;
  Communicator& communicator_;
  int num_ranks_;
  CudaStages stages_;
  bool by_lists_ = false;
  DeviceBuffer host_tokens_, host_out_, sums_;
  std::optional<HostStaging> staging_;
  CudaLayerBackward backward_;
  const std::uint64_t number_ = next_layer_number();
  std::int64_t reloads_ = 0;
  std::uint64_t forwards_ = 0;            ///< Since the recovery
  std::uint64_t forward_recoveries_ = 0;  ///< of this number.
  std::uint64_t room_recoveries_ = 0;     ///< When all ranks had memory for a way back.
  std::optional<CudaExchange> exchange_;  ///< They end first: all ranks' kernels have left then.
  std::unique_ptr<CudaGradientExchange> gradients_;  ///< From the first forward that saves on.
};

}  // namespace switchyard
