#pragma once

#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard {

// Rows between the type that a stage computes on (f32, bf16, f16) and the type that travels (those
// and fp8). On an 8-bit wire each 128 values share a scale: amax / 448, and a value travels as
// e4m3(x * (448 / amax)), with amax at least 2^-100 so that both quotients are finite. Values are
// equal whether a CPU or a GPU converts.

/// `scales`: ceil(n/128) floats, out; used only where `wire` is kF8E4M3.
void encode_row(const std::byte* row, DType type, std::byte* wire_row, DType wire, float* scales,
                std::int64_t n);

void decode_row(const std::byte* wire_row, DType wire, const float* scales, std::byte* row,
                DType type, std::int64_t n);

/// What crossing the wire would leave of a row of f32, in place.
void round_to_wire(DType wire, float* row, std::int64_t n);

}  // namespace switchyard
