#pragma once

#include <cuda_runtime_api.h>

#include "switchyard/tensor.hpp"

namespace switchyard {

// The functions of rows between the products of a router's network (RouterNetwork) and of a gating
// residual, and their ways back; all arrays on the device, of f32 where nothing is said. Bound by
// memory. Columns are multiples of 4 and rows aligned to 16 bytes, but of the last two.

/// out = gelu of each, by the normal distribution function.
void gelu_on_gpu(Matrix<const float> in, Matrix<float> out, cudaStream_t stream);
/// d *= slope of gelu at each of `in`.
void gelu_backward_on_gpu(Matrix<const float> in, Matrix<float> d, cudaStream_t stream);

/// out = rows over their lengths, sqrt(sum of squares + kCosineEpsilon).
void unit_rows_on_gpu(Matrix<const float> in, Matrix<float> out, cudaStream_t stream);
/// d = gradient of `in` from d, that of its rows over their lengths.
void unit_rows_backward_on_gpu(Matrix<const float> in, Matrix<float> d, cudaStream_t stream);

/// out = e^min(s, ln 100) times the gate's rows over their lengths. @param gate f32, bf16 or f16.
void scale_gate_on_gpu(ConstRawMatrix gate, const float* s, Matrix<float> out, cudaStream_t stream);
struct ScaleGateBackwardArgs {
  ConstRawMatrix gate{};          ///< [E, M] f32, bf16 or f16.
  const float* s = nullptr;       ///< [1]
  Matrix<const float> dscaled{};  ///< [E, M] gradient of what scale_gate_on_gpu() makes.
  RawMatrix dgate{};              ///< out [E, M] f32, bf16 or f16, or empty.
  float* ds = nullptr;            ///< out [1], or null; 0 where s is clamped.
  Vector<float> row_sums{};       ///< [E] scratch.
  bool accumulate = false;
};
/// The sum over the gate's rows is in their order.
void scale_gate_backward_on_gpu(const ScaleGateBackwardArgs& args, cudaStream_t stream);

/// out = x * factor, number by number. @param x  [T, H] f32, bf16 or f16.
void multiply_rows_on_gpu(ConstRawMatrix x, Matrix<const float> factor, Matrix<float> out,
                          cudaStream_t stream);
/// to += a * b, number by number, as one fma.
void multiply_add_on_gpu(Matrix<const float> a, Matrix<const float> b, Matrix<float> to,
                         cudaStream_t stream);

/// to += from.
void add_on_gpu(Matrix<const float> from, Matrix<float> to, cudaStream_t stream);
/// to [rows, cols] = the first columns of `from` [rows, at least cols], or with `accumulate` to +
/// them.
void take_columns_on_gpu(Matrix<const float> from, Matrix<float> to, bool accumulate,
                         cudaStream_t stream);

}  // namespace switchyard
