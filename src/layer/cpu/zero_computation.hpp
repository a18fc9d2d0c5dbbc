#pragma once

#include "layer/cpu/buffers.hpp"
#include "layer/cpu/router.hpp"

namespace switchyard {

/// What goes back through zero-computation experts.
struct ZeroComputationBackward {
  Assignments chosen{};       ///< Tokens [T, H] compute type, as is, with the routing as chosen.
  ConstRawMatrix dout{};      ///< [T, H].
  Matrix<float> dweight{};    ///< out [T, K], theirs alone; or empty.
  Matrix<float> dtokens{};    ///< out [T, H] what they say of the tokens; or empty.
  Vector<float> dconstant{};  ///< out [C * 3 * H]; or empty.
  bool accumulate = false;    ///< Of dconstant.
};

/// RouterConfig::zero_computation of a layer on a rank's own tokens, with buffers that are kept
/// from call to call. Bound by memory: a pass over the tokens each.
class CpuZeroComputation {
 public:
  explicit CpuZeroComputation(const LayerModel& model);

  [[nodiscard]] bool any() const { return free_.total() > 0; }
  /// `chosen` without their picks, which are -1; itself where there are no such experts. Valid
  /// until the next call, as all that follows is of this one. Reports "shared" where it reads
  /// tokens.
  Assignments without(const Assignments& chosen, const Execution& execution);
  /// [T, H] `shared` (none: +0), and to it what they give, by fma: first the token times the sum of
  /// all that it counts, then constants in ascending k. Reports "shared".
  Matrix<const float> around(const Assignments& chosen, Matrix<const float> shared,
                             const Execution& execution);
  void backward(const ZeroComputationBackward& args, const Execution& execution);

 private:
  /// Of constant expert `i` the rows of W, 0 and 1, and v, 2.
  [[nodiscard]] const float* constant(std::int32_t i, int part) const {
    return constants_.vector().data + (std::int64_t{3} * i + part) * hidden_;
  }
  void weigh(const Assignments& chosen, std::int64_t token, float* x);
  void back_through(const ZeroComputationBackward& args, std::int64_t token, float* x, float* dout);
  void add_up_constants(const ZeroComputationBackward& args, const Execution& execution);

  ZeroComputationExperts free_;
  std::int32_t first_;  ///< Id of the first of them.
  std::int64_t hidden_;
  Parameter constants_;

  ArrayBuffer<std::int32_t> others_buffer_;
  ArrayBuffer<float> counts_buffer_, of_token_buffer_, of_constant_buffer_, slope_buffer_, wide_,
      around_;
  Matrix<std::int32_t> others_{};
  Vector<float> counts_{};  ///< [T] what a token counts in its own output.
  /// [T, K] a1 and a2 of picks of constant experts; of one that was dropped, or is another's, 0.
  Matrix<float> of_token_{}, of_constant_{};
  Matrix<float> slope_{};  ///< [T, K] dL/d(s1 - s2) of the same picks, s the logits of W.
};

}  // namespace switchyard
