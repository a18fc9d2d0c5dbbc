#pragma once

#include <memory>
#include <vector>

#include "plan/gpu/device_plan.hpp"
#include "switchyard/experts.hpp"

namespace switchyard {

/// The experts that every token meets, on a GPU; as SharedExperts on the CPU.
class CudaSharedExperts {
 public:
  /// @param gate  [H], or empty: weight 1.
  CudaSharedExperts(std::unique_ptr<ExpertWeights> weights, const std::vector<float>& gate);

  /// All memory that calls of so many tokens need.
  void reserve(std::int64_t num_tokens);
  /// [T, H] of the tokens [T, H] (compute type); valid until the next call. Reports "shared".
  Matrix<const float> run(ConstRawMatrix tokens, const Execution& execution);

 private:
  std::unique_ptr<ExpertWeights> weights_;
  DevicePlan plan_;
  DeviceBuffer gate_, workspace_, rows_, sums_;
};

}  // namespace switchyard
