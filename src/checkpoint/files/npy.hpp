#pragma once

// NumPy's .npy format: a magic string, a version, a header that is a Python dictionary, the data.
// Source: numpy.lib.format, "NPY format" (NEP 1).

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// An array inside a file's bytes; row-major, little endian, at any address.
struct NpyArray {
  DType dtype = DType::kF32;  ///< From f2, f4, f8, i4, i8, u1.
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

/// Versions 1, 2 and 3.
/// @throws Error{kBadFile}: malformed, truncated, or an array that is not little endian, not in C
///         order or of another type; the message says which.
[[nodiscard]] NpyArray parse_npy(std::span<const std::byte> bytes, const std::string& file);

/// Write version 1.0, whole or not at all.
/// @throws Error{kInvalidArgument}: bf16 and fp8, which .npy cannot say, or the path; {kIo}.
void write_npy(const std::filesystem::path& path, DType dtype,
               const std::vector<std::int64_t>& shape, std::span<const std::byte> bytes);

}  // namespace switchyard
