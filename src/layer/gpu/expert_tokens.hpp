#pragma once

#include <cuda_runtime_api.h>

#include "core/gpu/device_buffer.hpp"
#include "switchyard/execution.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// What a rank's experts are given, and what is added behind them.
struct ExpertInput {
  ConstRawMatrix x{};            ///< [T, H] compute type.
  Routing routing{};             ///< Without experts that return their input.
  Matrix<const float> around{};  ///< [T, H] what is no expert's of the plan, or empty.
};

/// A rank's tokens on their way to the experts, and around them, on a GPU: as ExpertTokens on the
/// CPU, with its bits. What is returned is valid until the next call.
class CudaExpertTokens {
 public:
  explicit CudaExpertTokens(const LayerConfig& config);

  [[nodiscard]] bool weight_on_input() const { return on_input_; }
  /// All memory that calls of so many tokens need. @param compute  Their type.
  void reserve(std::int64_t num_tokens, DType compute);
  /// LayerConfig::identity_experts: such picks become -1, and their tokens times the sum of their
  /// weights are added to `shared` ([T, H], or empty). LayerConfig::weight_on_input: each token
  /// times its weight, which is then 1. Reports "shared" and "pack"; does nothing where a layer has
  /// neither.
  [[nodiscard]] ExpertInput run(ConstRawMatrix tokens, const Routing& routing,
                                Matrix<const float> shared, const Execution& execution);
  /// What the experts of such a call were given, for the way back: `around` is left out.
  [[nodiscard]] ExpertInput again(ConstRawMatrix tokens, const Routing& routing,
                                  const Execution& execution);

 private:
  void leave_out_identity(ExpertInput& input, float* around, Matrix<const float> shared,
                          const Execution& execution);
  void put_weights_on_input(ExpertInput& input, const Execution& execution);

  std::int32_t first_identity_, num_experts_, top_k_;  ///< The router's experts and choices.
  std::int64_t hidden_;
  bool on_input_;
  DeviceBuffer expert_, around_, weighted_, ones_;
};

/// Experts from `first_identity` on are never full: sets their `kept` [T, K], and `counts_kept` [E]
/// to `counts`.
void keep_identity(Matrix<const std::int32_t> expert, std::int32_t first_identity,
                   Matrix<std::uint8_t> kept, Vector<const std::int64_t> counts,
                   Vector<std::int64_t> counts_kept, cudaStream_t stream);

/// Whose picks return their input: ids [T, K] in [first_identity, num_experts), with their weights.
struct IdentityPicks {
  Matrix<const std::int32_t> expert{};
  Matrix<const float> weight{};
  std::int32_t first_identity = 0, num_experts = 0;
};
/// dtokens [T, H] = the sum of their weights times dout [T, H], added to `rest` ([T, H], or empty).
void identity_tokens_on_gpu(const IdentityPicks& picks, ConstRawMatrix dout,
                            Matrix<const float> rest, Matrix<float> dtokens,
                            const Execution& execution);

}  // namespace switchyard
