#pragma once

// The network behind attention on a GPU: a MoeLayer on the model's tensors, as models/moe_block.hpp
// has it on a CPU.

#include <memory>
#include <optional>
#include <vector>

#include "layer/saved_forward.hpp"
#include "models/gpu/device_parameters.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::models::gpu {

/// Device memory of one MoE layer's statistics, part of what a step leaves.
struct BlockRecord {
  double* losses;             ///< [kLossValues].
  std::int64_t* counts;       ///< [E].
  std::int64_t* counts_kept;  ///< [E].
};

/// Memory that the layers of all blocks take turns in. Apart, since graphs hold the training's
/// while evaluation may grow its own.
struct BlockScratch {
  std::shared_ptr<LayerScratch> training = make_layer_scratch();
  std::shared_ptr<LayerScratch> inference = make_layer_scratch();
};

struct BlockCall {
  RawMatrix x{};                      ///< [T, H] compute type; in training it stays.
  RawMatrix out{};                    ///< [T, H] compute type.
  const std::int32_t* ids = nullptr;  ///< [T].
  /// [T, K] a routing that is made already, or null. Not in training.
  const std::int32_t* expert = nullptr;
  const float* share = nullptr;
  std::uint64_t step = 0;
  std::int64_t first_token = 0;
  bool training = false;
  cudaStream_t stream = nullptr;
};

class DeviceBlock {
 public:
  /// @throws Error{kUnsupported}: routers that change on the host between steps.
  /// @param scratch  Of blocks that run one after the other.
  DeviceBlock(const ModelConfig& config, const ModelOptions& options,
              const DeviceParameters& parameters, std::int32_t layer, const BlockScratch& scratch);

  [[nodiscard]] bool is_dense() const { return dense_; }
  [[nodiscard]] std::int32_t layer() const { return layer_; }
  [[nodiscard]] const RouterConfig& router() const { return what_.router; }
  /// Whether a graph may hold a call: nothing that it draws is a function of the step.
  [[nodiscard]] bool may_be_captured(bool training) const;
  /// In training `record` is added to, but for the losses, which are written.
  void forward(const BlockCall& call, const BlockRecord* record);
  /// Over ranks the losses of the record are written here: they are known once a backward has had
  /// the counts of all.
  void backward(RawMatrix dout, RawMatrix dx, double scale, bool accumulate,
                const BlockRecord& record, cudaStream_t stream);
  [[nodiscard]] bool has_bias() const { return !dense_ && tensors_.bias >= 0; }
  /// Moves the selection bias by the step's counts [E], where there is one.
  void update_bias(const std::int64_t* counts, const StepFactors* factors, cudaStream_t stream);
  /// Waits; throws what the layer's kernels found wrong.
  void check();

 private:
  [[nodiscard]] LayerModel layer_model() const;
  [[nodiscard]] LayerOptions layer_options(bool training) const;
  MoeLayer& layer_for(bool training);
  [[nodiscard]] ExpertGradients expert_gradients(std::int64_t w13, std::int64_t w2) const;
  void give_routing(ForwardArgs& args);
  void record_losses(const BlockRecord& record, cudaStream_t stream) const;
  /// Adds the experts of one routing to the record.
  void count(const SavedForward::State& saved, const BlockRecord& record,
             cudaStream_t stream) const;

  ModelConfig config_;
  ModelOptions options_;
  const DeviceParameters* parameters_;
  BlockScratch scratch_;
  LayerTensors tensors_;
  std::int32_t layer_;
  bool dense_;
  Communicator* ranks_;  ///< Null: one rank, or a dense layer, which each has by itself.
  LayerConfig what_;
  /// Without a capacity one layer does both; else the second one drops nothing.
  std::optional<MoeLayer> training_, inference_;
  SavedForward saved_;
  DeviceBuffer one_expert_, one_weight_;  ///< Dense: all tokens' expert 0, with the weight 1.
};

}  // namespace switchyard::models::gpu
