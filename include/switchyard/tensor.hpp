#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace switchyard {

/// Element types. Stages compute on kF32, kBF16 and kF16; the others appear in files, on the wire,
/// or as indices.
enum class DType : std::uint8_t { kF32, kBF16, kF16, kF8E4M3, kF64, kI64, kI32, kU8 };

/// Bytes of one element.
[[nodiscard]] constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64: return 8;
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kBF16:
    case DType::kF16: return 2;
    case DType::kF8E4M3:
    case DType::kU8: return 1;
  }
  return 0;
}

/// "f32", "bf16", "f16", "fp8", "f64", "i64", "i32", "u8": as the tool spells them.
[[nodiscard]] const char* to_string(DType dtype) noexcept;

/// A non-owning row-major view: pointer plus shape. Passed by value; never frees anything.
///
/// Dimension letters used in every shape comment:
///   T tokens on this rank   E experts in the layer (El: on this rank)   K experts per token
///   H hidden size           I expert width (inner)                      R ranks
///   N rows received (N = T on one rank)                                 S rows after planning
template <typename T, std::size_t kRank>
struct TensorView {
  T* data = nullptr;
  std::array<std::int64_t, kRank> shape{};

  [[nodiscard]] constexpr std::int64_t size() const {
    std::int64_t n = 1;
    for (const std::int64_t extent : shape) n *= extent;
    return n;
  }
  [[nodiscard]] constexpr bool empty() const { return data == nullptr || size() == 0; }
  [[nodiscard]] constexpr T& operator[](std::int64_t i) const requires(kRank == 1) {
    return data[i];
  }
  /// Row `i` of a matrix: the pointer to its first element.
  [[nodiscard]] constexpr T* row(std::int64_t i) const requires(kRank == 2) {
    return data + i * shape[1];
  }
  /// The same memory, read only.
  constexpr operator TensorView<const T, kRank>() const requires(!std::is_const_v<T>) {  // NOLINT
    return {data, shape};
  }
};

template <typename T>
using Vector = TensorView<T, 1>;
template <typename T>
using Matrix = TensorView<T, 2>;

/// A row-major matrix whose element type is known at run time. Rows are contiguous and follow each
/// other without a gap.
template <typename Byte>
struct BasicRawMatrix {
  Byte* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;

  [[nodiscard]] constexpr std::int64_t row_bytes() const { return cols * size_of(dtype); }
  [[nodiscard]] constexpr std::int64_t bytes() const { return rows * row_bytes(); }
  [[nodiscard]] constexpr Byte* row(std::int64_t i) const { return data + i * row_bytes(); }
  constexpr operator BasicRawMatrix<const Byte>() const
      requires(!std::is_const_v<Byte>) {  // NOLINT
    return {data, dtype, rows, cols};
  }
};

using RawMatrix = BasicRawMatrix<std::byte>;
using ConstRawMatrix = BasicRawMatrix<const std::byte>;

}  // namespace switchyard
