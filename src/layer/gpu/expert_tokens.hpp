#pragma once

#include <cuda_runtime_api.h>

#include "core/gpu/device_buffer.hpp"
#include "layer/gpu/zero_computation/zero_computation.hpp"

namespace switchyard {

/// What a rank's experts are given, and what is added behind them.
struct TokensForExperts {
  ConstRawMatrix x{};            ///< [T, H] compute type.
  Routing routing{};             ///< Without zero-computation experts.
  Matrix<const float> around{};  ///< [T, H] what is no expert's of the plan, or empty.
};

/// A rank's tokens on their way to the experts, and around them, on a GPU: as ExpertTokens on the
/// CPU, with its bits. What is returned is valid until the next call.
class CudaExpertTokens {
 public:
  explicit CudaExpertTokens(const LayerModel& model);

  [[nodiscard]] bool weight_on_input() const { return on_input_; }
  [[nodiscard]] CudaZeroComputation& zero_computation() { return zero_computation_; }
  /// All memory that calls of so many tokens need. @param compute  Their type.
  void reserve(std::int64_t num_tokens, std::int64_t hidden, DType compute);
  /// Picks of zero-computation experts become -1, and what they give is added to `shared` ([T, H],
  /// or empty). LayerConfig::weight_on_input: each token times its weight, which is then 1. Reports
  /// "shared" and "pack"; does nothing where a layer has neither.
  [[nodiscard]] TokensForExperts run(const ChosenTokens& chosen, Matrix<const float> shared,
                                     const Execution& execution);
  /// What the experts of such a call were given, for the way back: `around` is left out.
  [[nodiscard]] TokensForExperts again(const ChosenTokens& chosen, const Execution& execution);

 private:
  void put_weights_on_input(TokensForExperts& input, const Execution& execution);

  CudaZeroComputation zero_computation_;
  bool on_input_;
  DeviceBuffer weighted_, ones_;
};

}  // namespace switchyard
