#pragma once

// Tokens, outputs and routings as files: .npy or .safetensors, by the ending.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// A matrix read from a file; view() points into the mapping where its alignment allows.
class MatrixFile {
 public:
  /// @param spec  "FILE.npy", "FILE.safetensors" (then it has one tensor) or
  ///              "FILE.safetensors:TENSOR".
  /// @throws Error{kInvalidArgument}: the ending or the use of ":TENSOR"; {kBadFile}: no such file
  ///         or tensor, malformed, not of rank 2, not f32, bf16 or f16; {kIo}.
  static MatrixFile read(std::string_view spec);

  /// Valid as long as this object.
  [[nodiscard]] ConstRawMatrix view() const& { return view_; }
  ConstRawMatrix view() const&& = delete;

 private:
  std::shared_ptr<const void> storage_;
  ConstRawMatrix view_;
};

/// The file of such a spec, with or without ":TENSOR".
[[nodiscard]] std::string matrix_path(std::string_view spec);

/// @throws Error{kInvalidArgument}: the name ends neither in .npy nor in .safetensors, or .npy
///         cannot hold `dtype`. To be called before the work whose result goes there.
void check_matrix_path(const std::filesystem::path& path, DType dtype);

/// Write a matrix whole or not at all, in .safetensors under the name `tensor`.
/// @throws Error{kInvalidArgument}: as above, or the place cannot be written to; {kIo}.
void write_matrix(const std::filesystem::path& path, ConstRawMatrix matrix,
                  std::string_view tensor = "output");

/// Whom each token goes to: the part of a routing file that replaces the router.
struct RoutingInput {
  std::int64_t num_tokens = 0;       ///< T.
  std::int64_t top_k = 0;            ///< K.
  std::vector<std::int32_t> expert;  ///< [T, K]; -1 where unused.
  std::vector<float> weight;         ///< [T, K].
};

/// Read `expert` I32 [T, K] and `weight` F32 [T, K] from a .safetensors file; other tensors are
/// ignored, so that what write_routing() wrote can be read.
/// @throws Error{kBadFile}: missing, of another dtype or shape, an id below -1; {kIo}.
[[nodiscard]] RoutingInput read_routing(const std::filesystem::path& path);

/// A routing with the plan that follows from it, in the compact layout.
struct RoutingOutput {
  Matrix<const std::int32_t> expert;        ///< [T, K].
  Matrix<const float> weight;               ///< [T, K].
  Matrix<const std::uint8_t> kept;          ///< [T, K].
  Vector<const std::int64_t> counts;        ///< [E] before capacity.
  Vector<const std::int64_t> counts_kept;   ///< [E] after.
  Vector<const std::int64_t> expert_begin;  ///< [E+1].
  Vector<const std::int32_t> row_token;     ///< [S].
  Vector<const float> row_weight;           ///< [S].
};

/// Write them under their names to a .safetensors file, whole or not at all.
/// @throws Error{kInvalidArgument}: the place cannot be written to; {kIo}.
void write_routing(const std::filesystem::path& path, const RoutingOutput& routing);

}  // namespace switchyard
