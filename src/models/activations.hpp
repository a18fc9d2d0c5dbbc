#pragma once

// What a forward leaves for the backward, and rooms that both work in. All f32; grows to the
// largest call and is kept.

#include <vector>

#include "core/cpu/memory.hpp"
#include "switchyard/models/config.hpp"

namespace switchyard::models {

/// Floats that grow. What was there is lost where they do.
class Floats {
 public:
  float* reserve(std::int64_t size) {
    buffer_.reserve(static_cast<std::size_t>(4 * size));
    return data();
  }
  [[nodiscard]] float* data() const { return reinterpret_cast<float*>(buffer_.data()); }

 private:
  cpu::HugeBuffer buffer_;
};

/// Of one layer, for T tokens.
struct LayerActivations {
  Floats x;         ///< [T, H] the residual stream before it.
  Floats norm1;     ///< [T, H] what attention reads.
  Floats scale1;    ///< [T].
  Floats qkv;       ///< [T, (N + 2M) D].
  Floats qk_scale;  ///< [T, scales of the norms].
  Floats turned;    ///< [T, (N + M) D] queries and keys as attention takes them.
  Floats mixed;     ///< [T, N D] attention's output.
  Floats lse;       ///< [B, N, S].
  Floats middle;    ///< [T, H] the residual stream between attention and experts.
  Floats norm2;     ///< [T, H] what the experts read.
  Floats scale2;    ///< [T].
};

struct Activations {
  std::vector<LayerActivations> layers;  ///< L, and the stream behind the last one.
  Floats norm, scale;                    ///< [T, H], [T] of the last norm.
  Floats logits;                         ///< Of some rows at a time.
  Floats block;                          ///< [T, H] the experts' output.
  Floats dstream, dnorm, dmixed, dqkv;   ///< Gradients.
  std::vector<double> nll;               ///< [T].
};

}  // namespace switchyard::models
