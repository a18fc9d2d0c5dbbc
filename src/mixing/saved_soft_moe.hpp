#pragma once

#include "core/cpu/memory.hpp"
#include "switchyard/routing/soft_moe.hpp"

namespace switchyard {

/// What a forward has kept, in memory that only grows.
struct SavedSoftMoe::State {
  enum class Use : std::uint8_t { kNothing, kReady, kUsed };

  Recompute recompute = Recompute::kNone;
  Use use = Use::kNothing;
  SoftMoeConfig config{};
  std::int64_t bytes = 0;

  RawMatrix x{};                 ///< [T, H] compute type.
  Matrix<float> logits{};        ///< [T, S], before the scale.
  RawMatrix slots{};             ///< [B*S, H] compute type.
  Matrix<float> slot_outputs{};  ///< [B*S, H].
  RawMatrix preactivation{};     ///< Rows of the experts' layout; empty: made again.

  cpu::HugeBuffer x_memory, logits_memory, slots_memory, outputs_memory, preactivation_memory;
};

}  // namespace switchyard
