#pragma once

#include <memory>

#include "layer/cpu/buffers.hpp"
#include "layer/expert_runner.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// The experts that every token meets, as one dense expert, with or without a sigmoid gate of their
/// own (Qwen2-MoE). Each rank computes them for its own tokens.
class SharedExperts {
 public:
  /// @param gate  [H] f32, or none: weight 1.
  SharedExperts(std::unique_ptr<ExpertWeights> weights, Parameter gate);

  /// [T, H] of the tokens [T, H] (compute type); valid until the next call. Reports "shared".
  Matrix<const float> run(ConstRawMatrix tokens, const Execution& execution);

 private:
  [[nodiscard]] float weight_of(const std::byte* token, DType dtype) const;

  std::unique_ptr<ExpertWeights> weights_;
  Parameter gate_;
  ExpertRunner<RawBuffer> runner_;
  Plan plan_;
  ArrayBuffer<std::int32_t> expert_;
  ArrayBuffer<float> weight_;
  RawBuffer sums_;
};

}  // namespace switchyard
