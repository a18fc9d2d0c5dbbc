#pragma once

#include "layer/cpu/buffers.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// What a layer on the CPU keeps. Rows of `preactivation` are those of the layout, which is made
/// again from ids and kept.
struct SavedForward::State {
  enum class Use : std::uint8_t { kNothing, kReady, kUsed };

  Recompute recompute = Recompute::kNone;
  Use use = Use::kNothing;
  std::uint64_t layer = 0;   ///< Number of the layer whose forward it was.
  std::int64_t reloads = 0;  ///< Of its experts, until then.
  std::int64_t bytes = 0;
  std::int64_t num_tokens = 0;
  bool routed = false;  ///< By the router; else the routing was given.

  RawMatrix tokens{};  ///< [T, H] compute type.
  Matrix<float> logits{};
  Matrix<std::int32_t> expert{};
  Matrix<float> weight{};
  Matrix<std::uint8_t> kept{};       ///< Empty: all.
  RawMatrix preactivation{};         ///< Empty: made again.
  RawMatrix shared_preactivation{};  ///< Likewise; or no shared experts.

  RawBuffer token_memory, preactivation_memory, shared_memory;
  ArrayBuffer<float> logit_memory, weight_memory;
  ArrayBuffer<std::int32_t> expert_memory;
  ArrayBuffer<std::uint8_t> kept_memory;
};

}  // namespace switchyard
