#pragma once

#include <cstdint>

#include "capi/capi.hpp"
#include "layer/cpu/buffers.hpp"

namespace switchyard::capi {

/// What sy_experts_run_saved keeps for sy_experts_backward on a CPU.
struct SavedExperts {
  RawBuffer tokens_memory, preactivation_memory;
  ArrayBuffer<std::int32_t> expert_memory;
  Plan plan;
  ConstRawMatrix tokens{}, preactivation{};
  Matrix<const std::int32_t> expert{};
  std::uint64_t owner = 0;        // number of the experts object; 0: nothing is kept
  std::int64_t top_k_on_gpu = 0;  // of a run on a GPU, which sy_saved_t::of_layer has; else 0
  bool ready = false;

  [[nodiscard]] std::int64_t bytes() const;
};

/// What sy_gradients_init() gives.
[[nodiscard]] sy_gradients default_gradients();

/// The gradients of the experts that the C interface was given memory for, checked.
/// @param shared  Those of the shared experts, which are matrices of one expert.
[[nodiscard]] ExpertGradients expert_gradients(const ExpertConfig& config,
                                               const sy_gradients& gradients, bool shared,
                                               Backend where);

/// An optional tensor as an empty or a checked matrix or vector.
[[nodiscard]] RawMatrix optional_raw(const char* name, const sy_tensor* tensor, std::int64_t rows,
                                     std::int64_t cols, Backend where);
[[nodiscard]] Matrix<float> optional_floats(const char* name, const sy_tensor* tensor,
                                            std::int64_t rows, std::int64_t cols, Backend where);

}  // namespace switchyard::capi

struct sy_saved_t {
  explicit sy_saved_t(switchyard::Recompute how) : of_layer(how) {}

  switchyard::SavedForward of_layer;
  switchyard::capi::SavedExperts of_experts;
  switchyard::capi::Calls calls{"the saved forward"};

  [[nodiscard]] bool is_of_layer() const {
    return of_experts.owner == 0 || of_experts.top_k_on_gpu > 0;
  }
};
