#pragma once

#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// Element-wise work on contiguous rows by the widest instructions that the machine has. The bits
/// are those of the plain loop with std::fma and core/half.hpp, on every machine (NaNs stay NaNs).
/// All dtypes: f32, bf16, f16. `n` is a number of elements.
namespace row_ops {

/// out = float(in). `in` may lie at any address.
void widen(DType dtype, const void* in, float* out, std::int64_t n);
/// out = in, rounded to `dtype`.
void narrow(DType dtype, const float* in, void* out, std::int64_t n);
/// out = in, through float, rounded once. `in` may lie at any address.
void convert(DType from, const void* in, DType to, void* out, std::int64_t n);
/// acc = fma(weight, float(row), acc).
void accumulate(DType dtype, float weight, const void* row, float* acc, std::int64_t n);
/// acc = acc + other.
void add(const float* other, float* acc, std::int64_t n);
/// out = in, or with `accumulate` out + in, summed in float and rounded once.
void write_gradient(const float* in, DType dtype, void* out, std::int64_t n, bool accumulate);

}  // namespace row_ops
}  // namespace switchyard
