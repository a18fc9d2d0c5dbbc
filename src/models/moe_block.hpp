#pragma once

// The network behind attention: a MoeLayer on the model's tensors, or Soft-MoE. A dense layer is
// one of a single expert that all tokens are given to: one path through the same kernels, forward
// and backward.

#include <memory>
#include <optional>
#include <vector>

#include "models/block_adapters.hpp"
#include "models/parameters.hpp"
#include "models/soft_block.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::models {

/// What a call is, for routers that ask.
struct BlockCall {
  Matrix<const float> x;       ///< [T, H]; in training it stays for the way back.
  const std::int32_t* ids;     ///< [T].
  std::int64_t positions = 0;  ///< Of a sequence, of which the call has whole ones.
  std::uint64_t step = 0;
  std::int64_t first_token = 0;
  bool training = false;               ///< And gone back through.
  const RoutingHook* hook = nullptr;   ///< Not in training; or null.
  std::optional<ReadBefore> before{};  ///< Of a sequence that a cache has the begin of.
};

class MoeBlock {
 public:
  /// @param threads  Of the model; null: the calling thread alone.
  MoeBlock(const ModelConfig& config, const ModelOptions& options, const Parameters& parameters,
           std::int32_t layer, ThreadPool* threads);

  [[nodiscard]] std::int32_t layer() const { return layer_; }
  [[nodiscard]] bool is_dense() const { return dense_; }
  /// The next call reads the weights again.
  void weights_changed();
  /// out [T, H].
  void forward(const BlockCall& call, Matrix<float> out);
  /// dx [T, H] of dout [T, H], and the parameters' gradients.
  void backward(Matrix<const float> dout, Matrix<float> dx, double scale, bool accumulate);
  /// Of the last forward in training, of this rank's tokens: before its backward, over ranks behind
  /// it. Not of a dense layer. @returns what the losses add to L, unscaled.
  double take_stats(RoutingStats& stats);
  /// Behind the optimiser's step.
  void update_router(const RoutingStats& stats);

 private:
  /// Shows the hook what was decided. @returns whether args now have another routing to compute.
  bool ask(const RoutingHook& hook, ForwardArgs& args);
  [[nodiscard]] LayerModel layer_model() const;
  [[nodiscard]] LayerOptions layer_options(bool training) const;
  MoeLayer& layer_for(bool training);

  ModelConfig config_;
  ModelOptions options_;
  const Parameters* parameters_;
  LayerTensors tensors_;
  std::int32_t layer_;
  bool dense_;
  Communicator* ranks_;  ///< Null: one rank.
  LayerConfig what_;
  struct Runner {
    std::optional<MoeLayer> layer;
    bool stale = false;
  };
  /// Without a capacity one layer does both; else the second one drops nothing.
  Runner training_, inference_;
  SavedForward saved_;
  RoutingRecord record_;
  std::optional<SoftBlock> soft_;          ///< Then there is nothing of the rest.
  std::optional<BlockAdapters> adapters_;  ///< None: the model has none, or the layer is dense.
  LayerRouting routing_;                   ///< Of the hook's call.
  std::vector<std::int32_t> one_expert_;   ///< Dense: all tokens' expert 0,
  std::vector<float> one_weight_;          ///< with the weight 1.
  std::vector<float> dlogits_;             ///< Of the ReLU router's penalty.
  double active_ = 0;                      ///< Of the ReLU router: experts a token.
};

}  // namespace switchyard::models
