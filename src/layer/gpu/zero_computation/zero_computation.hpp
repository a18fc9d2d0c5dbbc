#pragma once

#include "core/gpu/device_buffer.hpp"
#include "layer/saved_forward.hpp"
#include "switchyard/execution.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

namespace zero_computation {
struct Picks;
}

/// A rank's tokens with their routing as chosen, for zero-computation experts.
struct ChosenTokens {
  ConstRawMatrix x{};  ///< [T, H] compute type.
  Routing routing{};
  Matrix<const std::uint8_t> kept{};  ///< [T, K], or empty: all.
};

inline ChosenTokens chosen_of(const SavedForward::State& saved) {
  return {.x = saved.tokens,
          .routing = {.expert = saved.expert, .weight = saved.weight},
          .kept = saved.kept};
}

/// What goes back through them.
struct ZeroComputationBackward {
  ConstRawMatrix dout{};      ///< [T, H] compute type.
  Matrix<float> dweight{};    ///< out [T, K], theirs alone; or empty.
  Vector<float> dconstant{};  ///< out [C * 3 * H]; or empty.
  bool dtokens = false;       ///< tokens_backward() will be called.
  bool accumulate = false;    ///< Of dconstant.
};

/// RouterConfig::zero_computation of a layer on a GPU, as CpuZeroComputation; with the CPU's bits
/// where none of the experts is constant. A warp takes a piece of a token, 16 bytes a lane; logits
/// of W and products of a token with its gradient take a warp a token. Bound by memory: a pass over
/// the tokens each. Nothing waits.
class CudaZeroComputation {
 public:
  explicit CudaZeroComputation(const LayerModel& model);

  [[nodiscard]] bool any() const { return free_.total() > 0; }
  /// All memory that forwards, and that ways back, of so many tokens need.
  void reserve(std::int64_t num_tokens);
  void reserve_backward(std::int64_t num_tokens);

  /// [T, K] ids without those of such experts, which are -1, and for the calls below what picks of
  /// constant ones count. Reports "shared".
  [[nodiscard]] Matrix<std::int32_t> without(const ChosenTokens& chosen,
                                             const Execution& execution);
  /// The same, and [T, H] `around`: `shared` (or +0), and to it what such experts give.
  [[nodiscard]] Matrix<std::int32_t> without(const ChosenTokens& chosen, Matrix<const float> shared,
                                             Matrix<const float>& around,
                                             const Execution& execution);
  /// Behind without() of the same tokens.
  void backward(const ChosenTokens& chosen, const ZeroComputationBackward& args,
                const Execution& execution);
  /// Behind backward(): dtokens [T, H] = what such experts say, added to `rest` ([T, H], or empty).
  void tokens_backward(const ChosenTokens& chosen, ConstRawMatrix dout, Matrix<const float> rest,
                       Matrix<float> dtokens, const Execution& execution);

 private:
  [[nodiscard]] zero_computation::Picks picks(const ChosenTokens& chosen);
  [[nodiscard]] Matrix<std::int32_t> leave_out(const ChosenTokens& chosen,
                                               Matrix<const float> shared, float* around,
                                               const Execution& execution);
  void add_up_constants(const ChosenTokens& chosen, const ZeroComputationBackward& args,
                        const Execution& execution);

  ZeroComputationExperts free_;
  std::int32_t first_, top_k_;  ///< Id of the first of them; K.
  std::int64_t hidden_;
  Parameter constants_;

  DeviceBuffer uploaded_, others_, around_, of_token_, of_constant_, slope_, parts_;
};

}  // namespace switchyard
