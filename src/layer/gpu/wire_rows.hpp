#pragma once

#include <cuda_runtime_api.h>

#include "switchyard/tensor.hpp"

namespace switchyard {

// Tokens in the type that they travel in, on a GPU; values as comm/wire.hpp has them. What has come
// is widened for experts that multiply no 8-bit rows, and others become such rows.

/// Rows that have arrived, as the experts take them.
struct WireRows {
  ConstRawMatrix x{};                   ///< [N, H] in the wire type.
  Matrix<const float> scale{};          ///< [N, ceil(H/128)], on an 8-bit wire.
  Matrix<const std::int32_t> expert{};  ///< [N, K]; a row whose ids are all -1 is not there.
};

/// out [N, H] f32, bf16 or f16: rows that are there.
void decode_rows(const WireRows& rows, RawMatrix out, cudaStream_t stream);

/// out [N, H] e4m3 and scale [N, ceil(H/128)] = rows of bf16 as they would travel in fp8.
/// `rows.expert` empty: all rows are there.
void quantise_rows(const WireRows& rows, RawMatrix out, Matrix<float> scale, cudaStream_t stream);

/// Loads the kernels of the other two for these types: where ranks wait for each other a first
/// launch may wait for all that runs.
void load_wire_kernels(DType dtype, DType wire);

/// out [T, H] = what crossing `wire` leaves of `in` [T, H], both of one type.
void cross_wire(ConstRawMatrix in, DType wire, RawMatrix out, cudaStream_t stream);

}  // namespace switchyard
