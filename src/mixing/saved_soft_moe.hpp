#pragma once

#include <memory>

#include "mixing/slot_groups.hpp"
#include "switchyard/routing/soft_moe.hpp"

namespace switchyard {

/// Memory of what is saved on a backend: a piece for each of its parts, which only grow.
class SavedMixingMemory {
 public:
  static constexpr const char* kWhose = "what Soft-MoE saves";
  enum Part : std::uint8_t { kX, kLogits, kSlots, kSlotOutputs, kPreactivation, kParts };

  virtual ~SavedMixingMemory() = default;
  [[nodiscard]] virtual std::byte* reserve(Part part, std::int64_t bytes) = 0;
};

/// What a forward has kept, in the memory of its backend.
struct SavedSoftMoe::State {
  enum class Use : std::uint8_t { kNothing, kReady, kUsed };

  Recompute recompute = Recompute::kNone;
  Use use = Use::kNothing;
  Backend backend = Backend::kCpu;  ///< Where it lies.
  SoftMoeConfig config{};
  std::int64_t bytes = 0;

  RawMatrix x{};              ///< [T, H] compute type.
  Matrix<float> logits{};     ///< [T, S], before the scale.
  RawMatrix slots{};          ///< [B*S, H] compute type.
  RawMatrix slot_outputs{};   ///< [B*S, H] f32 (CPU), compute type (CUDA).
  RawMatrix preactivation{};  ///< Rows of the experts' layout; empty: made again.

  std::unique_ptr<SavedMixingMemory> memory;

  /// Room in `memory` for what the forward `args` keeps.
  void begin(const SoftMoeArgs& args, const SlotGroups& groups, DType of_outputs);
};

}  // namespace switchyard
