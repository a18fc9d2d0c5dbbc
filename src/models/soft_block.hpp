#pragma once

// Soft-MoE as the network behind attention: soft_moe() on the model's tensors.

#include <memory>
#include <optional>

#include "models/activations.hpp"
#include "models/parameters.hpp"
#include "switchyard/routing/soft_moe.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::models {

/// What a cache has of the tokens before those of a call.
struct ReadBefore {
  float* rows = nullptr;  ///< [B, capacity, H], of which `length` are there.
  std::int64_t capacity = 0, length = 0;
};

class SoftBlock {
 public:
  /// @param config   With the router soft-moe.
  /// @param threads  Null: the calling thread alone.
  SoftBlock(const ModelConfig& config, const ModelOptions& options, const Parameters& parameters,
            const LayerTensors& tensors, ThreadPool* threads);

  /// The next call reads the experts again.
  void weights_changed() { stale_ = true; }
  /// out [T, H] of x [T, H], sequences of `positions` tokens, or what follows `before`, where x is
  /// written behind: the experts' rows of the group before are then made again in each call.
  void forward(Matrix<const float> x, std::int64_t positions,
               const std::optional<ReadBefore>& before, bool training, Matrix<float> out);
  /// dx [T, H] of dout [T, H], and the parameters' gradients.
  void backward(Matrix<const float> dout, Matrix<float> dx, bool accumulate);
  /// Rows of each expert in the last forward in training: the slots of the groups that were read.
  [[nodiscard]] std::int64_t rows_of_expert() const;
  [[nodiscard]] std::int64_t num_tokens() const { return sequences_ * positions_; }

 private:
  [[nodiscard]] LoadExpertsArgs load_args(const ExpertSource& source) const;
  void load();
  [[nodiscard]] SoftMoeConfig config_of_call() const;
  /// Of sequences from their begin, or that of a group.
  void mix(const float* x, std::int64_t sequences, std::int64_t positions, bool training,
           float* out);
  void mix_behind(const float* x, std::int64_t sequences, std::int64_t positions,
                  const ReadBefore& before, float* out);
  [[nodiscard]] ConstRawMatrix phi() const;
  /// Sequences of whole groups, zeros behind their ends: nobody reads those slots. Without such
  /// ends `rows` itself.
  const float* in_groups(const float* rows, Floats& room) const;
  void out_of_groups(const float* padded, float* rows) const;
  [[nodiscard]] bool has_ends() const { return padded_ != positions_; }

  SoftMoeConfig what_;
  ExpertConfig experts_;
  DType compute_;
  const Parameters* parameters_;
  LayerTensors tensors_;
  ThreadPool* threads_;
  std::unique_ptr<ExpertWeights> weights_;
  bool stale_ = true;
  SavedSoftMoe saved_;
  std::int64_t hidden_;
  std::int64_t sequences_ = 0, positions_ = 0, padded_ = 0;  ///< Of the last call.
  Floats x_, y_, dx_, read_, made_;
  cpu::HugeBuffer rounded_;
};

}  // namespace switchyard::models
