#pragma once

#include <memory>

#include "layer/gpu/scratch.hpp"
#include "plan/gpu/device_plan.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/parameter.hpp"

namespace switchyard {

/// The way back through shared experts on a GPU; see BackwardArgs.
struct CudaSharedBackwardArgs {
  ConstRawMatrix tokens{};         ///< [T, H] compute type.
  ConstRawMatrix dout{};           ///< [T, H] compute type.
  ConstRawMatrix preactivation{};  ///< [T, 2I], or empty: made again.
  ExpertGradients gradients{};
  Vector<float> dgate{};    ///< [H], or empty.
  Vector<float> dlogit{};   ///< out [T] of tokens . gate, or empty: dgate too.
  Matrix<float> dtokens{};  ///< out [T, H] without what comes through the gate, or empty.
  bool accumulate = false;
  Execution execution{};  ///< Its workspace has backward_workspace_bytes().
};

/// The experts that every token meets, on a GPU; as SharedExperts on the CPU.
class CudaSharedExperts {
 public:
  /// @param gate     [H] f32, or none: weight 1. On a GPU it is used where it lies.
  /// @param scratch  Outlives it.
  CudaSharedExperts(std::unique_ptr<ExpertWeights> weights, const Parameter& gate,
                    CudaScratch& scratch);

  /// All memory that calls of so many tokens need.
  void reserve(std::int64_t num_tokens);
  /// And their backwards.
  void reserve_backward(std::int64_t num_tokens) { (void)dweight_.vector<float>(num_tokens); }
  /// [T, H] of the tokens [T, H] (compute type); valid until the next call. Reports "shared".
  /// @param preactivation  out [T, 2I] compute type for backward(), or empty.
  Matrix<const float> run(ConstRawMatrix tokens, RawMatrix preactivation,
                          const Execution& execution);
  /// Reports "shared_backward".
  void backward(const CudaSharedBackwardArgs& args);
  [[nodiscard]] std::int64_t backward_workspace_bytes(std::int64_t num_tokens) const;

  /// Columns of a pre-activation.
  [[nodiscard]] std::int64_t preactivation_cols() const;
  /// [H] on the device, or empty.
  [[nodiscard]] Vector<const float> gate() const { return gate_; }
  /// In the place of the ones before, which are given away first.
  [[nodiscard]] std::unique_ptr<ExpertWeights>& weights() { return weights_; }

 private:
  [[nodiscard]] StageWork work(ConstRawMatrix tokens, double passes) const;

  std::unique_ptr<ExpertWeights> weights_;
  DevicePlan plan_;
  Vector<const float> gate_{};
  CudaScratch& scratch_;
  DeviceBuffer uploaded_gate_, sums_, dweight_;
};

}  // namespace switchyard
