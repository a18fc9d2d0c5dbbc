#pragma once

// The table of a model's tensors: names, sizes and places follow from the configuration alone.

#include <span>
#include <string>
#include <vector>

#include "core/cpu/memory.hpp"
#include "switchyard/models/model.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::models {

/// Indices into Parameters::tensors(); -1: none.
struct LayerTensors {
  std::int64_t norm1 = -1, qkv = -1, q_norm = -1, k_norm = -1, o = -1, norm2 = -1;
  std::int64_t gate = -1, network = -1, noise_gate = -1, w13 = -1,
               w2 = -1;                   ///< Dense: w13 and w2 alone.
  std::int64_t phi = -1, phi_scale = -1;  ///< Of Soft-MoE, which has no gate.
  std::int64_t shared_w13 = -1, shared_w2 = -1, shared_gate = -1;
  std::int64_t adapters_a = -1, adapters_b = -1, adapters_gate = -1;
  std::int64_t bias = -1, l1 = -1;  ///< Into buffers().
};

/// Experts that a rank has, neighbouring ones.
struct ExpertShare {
  std::int32_t first = 0, count = 0;
};

/// Over ranks: whether its gradient is added up once a step. Layers have added up those of routers
/// and shared experts, and experts are where they are.
[[nodiscard]] inline bool sums_once_a_step(const ParameterTensor& tensor) {
  return tensor.group != Group::kRouter && tensor.group != Group::kExperts;
}

class Parameters {
 public:
  /// @param pool  Who helps to make initial values, now and in reset_routers(); null: nobody.
  Parameters(const ModelConfig& config, std::uint64_t seed, ExpertShare share,
             std::span<const Group> frozen = {}, ThreadPool* pool = nullptr);

  [[nodiscard]] const std::vector<ParameterTensor>& tensors() const { return tensors_; }
  [[nodiscard]] const std::vector<ParameterTensor>& buffers() const { return buffers_; }
  [[nodiscard]] const LayerTensors& layer(std::int64_t l) const {
    return layers_[static_cast<std::size_t>(l)];
  }
  [[nodiscard]] std::int64_t embedding() const { return embedding_; }
  [[nodiscard]] std::int64_t norm() const { return norm_; }
  /// The embedding's where they are tied.
  [[nodiscard]] std::int64_t head() const { return head_; }
  [[nodiscard]] std::int64_t size() const { return size_; }
  /// Null for -1.
  [[nodiscard]] float* value(std::int64_t index) const {
    return index < 0 ? nullptr : tensors_[static_cast<std::size_t>(index)].value;
  }
  /// Likewise, and of what is frozen: where nobody wants a gradient.
  [[nodiscard]] float* gradient(std::int64_t index) const {
    if (index < 0 || tensors_[static_cast<std::size_t>(index)].frozen) return nullptr;
    return tensors_[static_cast<std::size_t>(index)].gradient;
  }
  [[nodiscard]] float* buffer(std::int64_t index) const {
    return index < 0 ? nullptr : buffers_[static_cast<std::size_t>(index)].value;
  }

  /// Of all layers, as with the seed of a constructor: what chooses experts, and all buffers.
  void reset_routers(std::uint64_t seed);

 private:
  struct Start;
  std::int64_t add(const std::string& name, std::vector<std::int64_t> shape, Group group,
                   const Start& start);
  /// An MLP's two tensors of some experts; `part` with "{}" for the expert's number.
  void add_mlp(const std::string& name, const std::string& part, ExpertShare experts,
               std::int64_t inner, Group group, std::int64_t& w13, std::int64_t& w2);
  void add_attention(const std::string& prefix, LayerTensors& layer);
  void add_experts(const std::string& prefix, LayerTensors& layer);
  void add_adapters(const std::string& prefix, LayerTensors& layer);
  /// @returns the first of the tensors of a router's network.
  std::int64_t add_network(const std::string& prefix, const RouterNetwork& network);
  void place();
  void fill(std::uint64_t seed);
  void fill_tensor(std::size_t index, std::uint64_t seed);
  void fill_buffers();

  ModelConfig config_;
  ExpertShare share_;
  ThreadPool* pool_;
  std::vector<ParameterTensor> tensors_, buffers_;
  std::vector<LayerTensors> layers_;
  std::vector<float> starts_;  ///< Of each tensor its deviation; negative: a constant, minus it.
  std::vector<float> buffer_starts_;
  std::int64_t embedding_ = -1, norm_ = -1, head_ = -1, size_ = 0;
  cpu::HugeBuffer values_, gradients_, buffer_values_;
};

}  // namespace switchyard::models
