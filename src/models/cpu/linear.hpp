#pragma once

// y = x W^T by the kernels of the experts: each number of y is one chain in ascending order of the
// summed index, whatever the other rows and the threads. f32, or of bf16 operands: what comes in is
// rounded, sums and what comes out are f32.

#include <cstdint>

#include "core/cpu/memory.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::models {

/// The kernels of a model's products of f32 or bf16 operands: those of the instruction set in use.
/// Of f32 blocks of rows are [depth][rows], panels [depth][panel_cols].
[[nodiscard]] const cpu::Kernels& product_kernels(DType dtype);

class Linear {
 public:
  /// `dtype`: of the operands, f32 or bf16.
  Linear(std::int64_t in, std::int64_t out, DType dtype = DType::kF32)
      : kernels_(&product_kernels(dtype)), in_(in), out_(out) {}

  [[nodiscard]] std::int64_t in() const { return in_; }
  [[nodiscard]] std::int64_t out() const { return out_; }

  /// Brings W [out, in] into the kernels' order; after each change of it.
  void pack(const float* weights, ThreadPool* pool);
  /// And for backward_input(), W^T.
  void pack_backward(const float* weights, ThreadPool* pool);

  /// y [rows, out] = x W^T, or with `add` y + x W^T.
  void forward(const float* x, std::int64_t rows, float* y, bool add, ThreadPool* pool) const;
  /// dx [rows, in] = dy W.
  void backward_input(const float* dy, std::int64_t rows, float* dx, ThreadPool* pool) const;
  /// dw [out, in] = dy^T x, or with `accumulate` added to what is there. Rows are summed in pieces
  /// of a fixed number, these in order. Null: nothing.
  void backward_weights(const float* dy, const float* x, std::int64_t rows, float* dw,
                        bool accumulate, ThreadPool* pool) const;

 private:
  const cpu::Kernels* kernels_;
  std::int64_t in_;
  std::int64_t out_;
  cpu::HugeBuffer panels_;
  cpu::HugeBuffer backward_panels_;
};

}  // namespace switchyard::models
