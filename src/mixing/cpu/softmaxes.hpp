#pragma once

#include "switchyard/tensor.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::mixing {

// Both softmaxes of a group's logits u [m, S], and their ways back, in fp32. Columns are added in
// ascending token, rows in ascending slot: the same bits for any number of threads.

struct SoftmaxArgs {
  Matrix<const float> logits{};  ///< [m, S] u.
  float scale = 1.0F;
  Matrix<float> weights{};  ///< out [m, S] softmax of scale * u.
  ThreadPool* pool = nullptr;
};
/// D: over the tokens, column by column.
void softmax_over_tokens(const SoftmaxArgs& args);
/// C: over the slots, row by row.
void softmax_over_slots(const SoftmaxArgs& args);

struct SoftmaxGradientArgs {
  Matrix<const float> weights{};   ///< [m, S] P, of the forward.
  Matrix<const float> gradient{};  ///< [m, S] dL/dP.
  Matrix<float> dlogits{};         ///< [m, S] += P (dL/dP - sum of P dL/dP).
  ThreadPool* pool = nullptr;
};
void softmax_over_tokens_backward(const SoftmaxGradientArgs& args);
void softmax_over_slots_backward(const SoftmaxGradientArgs& args);

}  // namespace switchyard::mixing
