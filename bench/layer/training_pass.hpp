#pragma once

// A layer's way there and back, as training takes it.

#include <cstdint>

#include "bench/measure/stage_memory.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::bench {

/// What of a layer is timed.
enum class Pass : std::uint8_t {
  kForward,       ///< As in inference.
  kForwardTrain,  ///< With all that a backward needs kept.
  kBackward,      ///< Every gradient; the forward before it is not timed.
  kBoth,
};

/// "forward", "forward-train", "backward", "both".
[[nodiscard]] const char* to_string(Pass pass) noexcept;

/// Memory of one rank for that: what is saved, and the gradients of all parameters in the compute
/// type.
class TrainingPass {
 public:
  /// @param num_local  Experts of this rank.
  /// @param routed     The layer routes by itself: then gradients of the router too.
  TrainingPass(const LayerConfig& config, std::int32_t num_local, DType compute,
               Recompute recompute, bool routed, Backend backend);

  [[nodiscard]] SavedForward& saved() { return saved_; }
  /// Of all gradients, that of the tokens too once there was one.
  [[nodiscard]] std::int64_t gradient_bytes() const { return memory_.bytes(); }
  /// All gradients of the last forward that saved; the gradient of its output is `dout`, of the
  /// same size in every call.
  void backward(MoeLayer& layer, ConstRawMatrix dout, StageRecorder* recorder, void* stream);

 private:
  RawMatrix memory_for(DType dtype, std::int64_t rows, std::int64_t cols);

  SavedForward saved_;
  StageMemory memory_;
  BackwardArgs args_;
};

}  // namespace switchyard::bench
