#pragma once

#include <memory>

#include "layer/cpu/buffers.hpp"
#include "layer/expert_runner.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// The way back through shared experts; see BackwardArgs.
struct SharedBackwardArgs {
  ConstRawMatrix tokens{};         ///< [T, H] compute type.
  ConstRawMatrix dout{};           ///< [T, H] compute type.
  ConstRawMatrix preactivation{};  ///< [T, 2I], or empty: made again.
  ExpertGradients gradients{};
  Vector<float> dgate{};    ///< [H], or empty.
  Matrix<float> dtokens{};  ///< out [T, H], or empty.
  bool accumulate = false;
  Execution execution{};
};

/// The experts that every token meets, as one dense expert, with or without a sigmoid gate of their
/// own (Qwen2-MoE). Each rank computes them for its own tokens.
class SharedExperts {
 public:
  /// @param gate  [H] f32, or none: weight 1.
  SharedExperts(std::unique_ptr<ExpertWeights> weights, Parameter gate);

  /// [T, H] of the tokens [T, H] (compute type); valid until the next call. Reports "shared".
  /// @param preactivation  out [T, 2I] compute type for backward(), or empty.
  Matrix<const float> run(ConstRawMatrix tokens, RawMatrix preactivation,
                          const Execution& execution);
  /// Reports "shared_backward".
  void backward(const SharedBackwardArgs& args);

  [[nodiscard]] ExpertWeights& weights() { return *weights_; }
  /// Columns of a pre-activation.
  [[nodiscard]] std::int64_t preactivation_cols() const {
    return (weights_->config().gated ? 2 : 1) * weights_->config().inner;
  }

 private:
  PlanView make_plan(ConstRawMatrix tokens, const Execution& execution);
  [[nodiscard]] StageWork work(ConstRawMatrix tokens, double passes) const;
  [[nodiscard]] float weight_of(const std::byte* token, DType dtype) const;

  std::unique_ptr<ExpertWeights> weights_;
  Parameter gate_;
  ExpertRunner<RawBuffer> runner_;
  Plan plan_;
  ArrayBuffer<std::int32_t> expert_;
  ArrayBuffer<float> weight_, dweight_;
  RawBuffer sums_;
};

}  // namespace switchyard
