#pragma once

// Attention of a released model's layer, with what surrounds it: projections, norms of queries and
// keys, positions, the cache.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/activations.hpp"
#include "models/cache_state.hpp"
#include "models/released/config.hpp"
#include "models/released/tensors.hpp"

namespace switchyard::models {

/// Memory of one layer's attention, which all layers share.
struct AttentionRooms {
  Floats projected, small, expanded;  ///< What the projections give.
  Floats q, k, v;                     ///< [T, N, D], [T, M, D], [T, M, D].
  Floats mixed;                       ///< [T, N, D].
};

struct ReleasedAttentionArgs {
  std::int64_t batch = 0, positions = 0;
  const float* x = nullptr;  ///< [T, H], normalised.
  float* out = nullptr;      ///< [T, H].
  const RopeAngles* angles = nullptr;
  const Cache::State* cache = nullptr;  ///< Null: sequences begin.
  Cache::State::Layer* kept = nullptr;  ///< This layer's of it.
  AttentionRooms* rooms = nullptr;
};

class ReleasedAttention {
 public:
  /// @param prefix  "model.layers.3.self_attn.".
  ReleasedAttention(const ReleasedConfig& config, std::int32_t layer, const std::string& prefix,
                    DenseTensors& tensors);
  void forward(const ReleasedAttentionArgs& args, ThreadPool* pool) const;

 private:
  void make_rows(const ReleasedAttentionArgs& args, ThreadPool* pool) const;
  void make_latent_rows(const ReleasedAttentionArgs& args, ThreadPool* pool) const;

  const ReleasedConfig* config_;
  std::int64_t window_;
  std::vector<Projection> in_;  ///< To queries, keys and values together, or their small vectors.
  std::optional<Projection> query_, key_value_;  ///< Latent: from the small vectors on.
  Projection out_;
  std::vector<float> q_norm_, k_norm_, sinks_;  ///< Latent: norms of the small vectors.
};

}  // namespace switchyard::models
