#pragma once

// Rows side by side into units of depth: out[k][column] = rows[column][k]. Plain vectors of 16
// bytes that any compiler turns into what the CPU has: the loop is bound by memory with them.

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace switchyard::cpu {

template <class Unit>
struct Vector16 {
  typedef Unit Type __attribute__((vector_size(16)));
  static constexpr int kUnits = 16 / sizeof(Unit);
};

/// kUnits rows of 16 bytes each, in place.
inline void transpose(Vector16<std::uint32_t>::Type (&v)[4]) {
  const auto a = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5);
  const auto b = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5);
  const auto c = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7);
  const auto d = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
  v[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
  v[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
  v[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
  v[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

inline void transpose(Vector16<std::uint16_t>::Type (&v)[8]) {
  using V = Vector16<std::uint16_t>::Type;
  V pairs[8];  // of rows 2i and 2i + 1: their first halves, their second halves
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const V a = v[2 * i];
    const V b = v[2 * i + 1];
    pairs[i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    pairs[4 + i] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const V* p = pairs + 4 * half;
    const V a = __builtin_shufflevector(p[0], p[1], 0, 1, 8, 9, 2, 3, 10, 11);
    const V b = __builtin_shufflevector(p[0], p[1], 4, 5, 12, 13, 6, 7, 14, 15);
    const V c = __builtin_shufflevector(p[2], p[3], 0, 1, 8, 9, 2, 3, 10, 11);
    const V d = __builtin_shufflevector(p[2], p[3], 4, 5, 12, 13, 6, 7, 14, 15);
    v[4 * half] = __builtin_shufflevector(a, c, 0, 1, 2, 3, 8, 9, 10, 11);
    v[4 * half + 1] = __builtin_shufflevector(a, c, 4, 5, 6, 7, 12, 13, 14, 15);
    v[4 * half + 2] = __builtin_shufflevector(b, d, 0, 1, 2, 3, 8, 9, 10, 11);
    v[4 * half + 3] = __builtin_shufflevector(b, d, 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

/// Neighbouring rows and where their units go.
struct TransposeArgs {
  const std::byte* rows;
  std::int64_t row_bytes;  ///< From one row to the next.
  std::byte* out;
  std::int64_t out_bytes;  ///< From one unit of depth to the next.
};

/// A square of kUnits neighbouring rows x kUnits units at unit `k`.
template <class Unit>
inline void transpose_square(const TransposeArgs& args, std::int64_t k) {
  using V = typename Vector16<Unit>::Type;
  constexpr int kUnits = Vector16<Unit>::kUnits;
  V square[kUnits];
#pragma GCC unroll 8
  for (int i = 0; i < kUnits; ++i) {
    std::memcpy(&square[i], args.rows + i * args.row_bytes + k * std::int64_t{sizeof(Unit)}, 16);
  }
  transpose(square);
#pragma GCC unroll 8
  for (int i = 0; i < kUnits; ++i) {
    std::memcpy(args.out + (k + i) * args.out_bytes, &square[i], 16);
  }
}

}  // namespace switchyard::cpu
