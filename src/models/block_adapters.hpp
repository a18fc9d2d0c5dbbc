#pragma once

// The adapters beside one MoE layer of a model: PerftAdapters on the model's tensors, and how they
// and the layer share a forward and a backward.

#include "models/activations.hpp"
#include "models/parameters.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/perft.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::models {

class BlockAdapters {
 public:
  /// @param config   With adapters.
  /// @param threads  Null: the calling thread alone.
  BlockAdapters(const ModelConfig& config, const ModelOptions& options,
                const Parameters& parameters, const LayerTensors& tensors, ThreadPool* threads);

  /// Embedded ones: a layer's forward has to record its routing.
  [[nodiscard]] bool follow_the_layer() const { return what_.kind == PerftKind::kEmbedded; }
  /// The next call reads A and B again.
  void weights_changed() { stale_ = true; }
  /// Behind the layer's forward: to its output, f32, adds what they make of its tokens.
  void forward(const ForwardArgs& layer);
  /// Before the layer's backward: gradients of A, B and gate, and of the layer's logits where its
  /// weights are theirs too, as `layer.dlogits`.
  /// @param logits  [T, E] that the layer has routed by; empty: it has none.
  void backward(BackwardArgs& layer, Matrix<const float> logits);
  /// Behind it: adds their part to the layer's dtokens, f32.
  void add_to_dtokens(const BackwardArgs& layer);

 private:
  [[nodiscard]] PerftModel perft_model() const;

  PerftConfig what_;
  const Parameters* parameters_;
  LayerTensors tensors_;
  ThreadPool* threads_;
  PerftAdapters adapters_;
  bool stale_ = false;
  SavedForward saved_;
  RouteRequest request_;  ///< The layer's of the forward in training, with its record.
  Floats dtokens_;        ///< [T, H].
  Floats dweight_;        ///< [T, K] of the layer's weights.
  Floats dlogits_;        ///< [T, E].
};

}  // namespace switchyard::models
