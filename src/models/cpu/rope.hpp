#pragma once

// Queries and keys on their way into attention: normalised where the model does, then turned by
// their positions. Su et al. 2021 (arXiv:2104.09864), in halves as Llama has it: number i of a head
// goes with i + D/2, at the angle position * theta^(-2i/D).

#include <cstdint>
#include <vector>

#include "switchyard/models/config.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::models {

class QueryKeyRows {
 public:
  explicit QueryKeyRows(const ModelConfig& config);

  /// Columns of q and k together, and with v.
  [[nodiscard]] std::int64_t qk_cols() const { return (heads_ + kv_heads_) * dim_; }
  [[nodiscard]] std::int64_t qkv_cols() const { return (heads_ + 2 * kv_heads_) * dim_; }
  /// Scales of a row's norms.
  [[nodiscard]] std::int64_t scales() const {
    return norm_ == QkNorm::kHead ? heads_ + kv_heads_ : norm_ == QkNorm::kWhole ? 2 : 0;
  }

  struct Args {
    std::int64_t batch, positions;
    std::int64_t first;     ///< The first one's position in its sequence.
    const float* qkv;       ///< [B, positions, qkv_cols].
    const float* q_weight;  ///< [D] or [N*D]; null without a norm.
    const float* k_weight;  ///< [D] or [M*D].
    float* turned;          ///< out [B, positions, qk_cols].
    float* scales;          ///< out [B, positions, scales()]; or null.
    ThreadPool* pool;
  };
  void forward(const Args& args) const;

  struct BackwardArgs {
    Args forward;      ///< turned is not read.
    float* dqkv;       ///< q and k in: gradients of `turned` in the places of q and k; out: of qkv.
    float* dq_weight;  ///< out, as the weights; or null.
    float* dk_weight;
    bool accumulate;  ///< Of the weights' gradients.
  };
  void backward(const BackwardArgs& args) const;

 private:
  std::int64_t heads_, kv_heads_, dim_;
  QkNorm norm_;
  float epsilon_;
  std::vector<float> cosine_, sine_;  ///< [S, D/2].
};

}  // namespace switchyard::models
