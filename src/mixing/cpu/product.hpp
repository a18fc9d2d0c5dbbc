#pragma once

#include "switchyard/tensor.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::mixing {

struct ProductArgs {
  Matrix<const float> left{};  ///< [M, K], or [K, M] where transposed.
  bool left_transposed = false;
  Matrix<const float> right{};  ///< [K, N], or [N, K] where transposed.
  bool right_transposed = false;
  RawMatrix out{};          ///< [M, N] f32, bf16 or f16: one rounding.
  bool accumulate = false;  ///< Add to what is there, in f32.
  ThreadPool* pool = nullptr;
};

/// out = left right. Each output is one fp32 chain in ascending k, by the experts' kernels for f32:
/// the same bits for any number of threads.
void multiply(const ProductArgs& args);

}  // namespace switchyard::mixing
