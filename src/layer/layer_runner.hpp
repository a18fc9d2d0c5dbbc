#pragma once

#include <memory>

#include "switchyard/layer.hpp"

namespace switchyard {

/// What runs a layer on one backend: MoeLayer is a handle to one of these.
class LayerRunner {
 public:
  virtual ~LayerRunner() = default;
  virtual void forward(const ForwardArgs& args) = 0;
  virtual void backward(const BackwardArgs& args) = 0;
  virtual void reload_experts() = 0;
  /// Of a chain: whose gate and biases the calls to come route by.
  virtual void use_iteration(std::int32_t /*iteration*/) {}
  /// Throws what the last forward has found wrong since it returned.
  virtual void check() {}
  [[nodiscard]] virtual metrics::Routing stats() = 0;
  /// Of the experts that this rank holds, without the shared ones.
  [[nodiscard]] virtual const ExpertWeights& weights() const = 0;

  LayerConfig config;
  DType compute = DType::kF32;
  ThreadPool* pool = nullptr;  ///< CPU: what its loops run on; null: the calling thread.
  Traffic traffic;
  std::int64_t rows_used = 0;
  std::int64_t rows_executed = 0;
};

/// cpu/layer.cpp
std::unique_ptr<LayerRunner> make_cpu_layer(const LayerModel& model, const LayerOptions& options,
                                            Communicator* communicator);

/// gpu/layer.cpp: this rank on the current device.
std::unique_ptr<LayerRunner> make_cuda_layer(const LayerModel& model, const LayerOptions& options,
                                             Communicator* communicator);

}  // namespace switchyard
