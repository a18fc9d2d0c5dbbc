#pragma once

#include <cuda.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <variant>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// The driver's encoder, asked of the runtime: nothing links against the driver, so the library
/// loads where there is no GPU.
/// @throws Error{kUnsupported}: the driver is too old.
[[nodiscard]] decltype(&cuTensorMapEncodeTiled) tensor_map_encoder();

/// A row-major matrix on the device, as TMA moves it: boxes of `box_rows` x `box_cols`
/// values, in shared memory row after row, swizzled over the 128 (or 64) bytes of a row; zeros are
/// read past the edges and nothing is written there.
struct TensorMapArgs {
  const void* data = nullptr;  ///< 16-byte aligned.
  DType dtype = DType::kBF16;  ///< kBF16, kF16 or kF32.
  std::int64_t rows = 0;
  std::int64_t cols = 0;  ///< 16 bytes or a multiple.
  std::int32_t box_rows = 0;
  std::int32_t box_cols = 64;  ///< 128 or 64 bytes.
  auto operator<=>(const TensorMapArgs&) const = default;
};

/// @throws Error{kInvalidArgument} if the driver refuses the shape, {kUnsupported} if it is too
/// old.
[[nodiscard]] CUtensorMap make_tensor_map(const TensorMapArgs& args);

/// A stack of row-major matrices of any type, read by boxes that lie in shared memory without a
/// gap: `box_matrices` x `box_rows` pieces of `box_bytes`. Zeros are read past the edges.
struct StackMapArgs {
  const void* data = nullptr;  ///< 16-byte aligned.
  std::int64_t matrices = 0;
  std::int64_t rows = 0;
  std::int64_t row_bytes = 0;  ///< A multiple of 16.
  std::int32_t box_matrices = 1;
  std::int32_t box_rows = 0;
  std::int32_t box_bytes = 0;  ///< A multiple of 16, at most 2048.
  auto operator<=>(const StackMapArgs&) const = default;
};

/// Coordinates are (8 bytes along a row, row, matrix). Throws as make_tensor_map.
[[nodiscard]] CUtensorMap make_stack_map(const StackMapArgs& args);

/// Weights [experts, 2, rows, cols] (gate, up) of 16 bits, read by boxes in which eight gate rows
/// and the eight up rows that belong to them take turns, 64 values of each, swizzled as above.
struct GatedMapArgs {
  const void* data = nullptr;  ///< 16-byte aligned.
  DType dtype = DType::kBF16;  ///< kBF16 or kF16.
  std::int64_t experts = 0;
  std::int64_t rows = 0;      ///< A multiple of 8.
  std::int64_t cols = 0;      ///< A multiple of 8.
  std::int32_t box_rows = 0;  ///< Of both together, a multiple of 16.
  auto operator<=>(const GatedMapArgs&) const = default;
};

/// Coordinates are (value of a row, 0, 0, eight rows counted from the first of all). Throws as
/// make_tensor_map.
[[nodiscard]] CUtensorMap make_gated_map(const GatedMapArgs& args);

/// A stack of row-major matrices [matrices, rows, cols] of 16 bits, read by boxes of 64 rows x 64
/// values of one matrix, swizzled as above; zeros are read past its edges.
struct MatricesMapArgs {
  const void* data = nullptr;  ///< 16-byte aligned.
  DType dtype = DType::kBF16;  ///< kBF16 or kF16.
  std::int64_t matrices = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;  ///< A multiple of 8.
  auto operator<=>(const MatricesMapArgs&) const = default;
};

/// Coordinates are (value of a row, row, matrix). Throws as make_tensor_map.
[[nodiscard]] CUtensorMap make_matrices_map(const MatricesMapArgs& args);

using AnyMapArgs = std::variant<TensorMapArgs, StackMapArgs, GatedMapArgs, MatricesMapArgs>;

/// The maps of memory that stays where it is: weights own theirs. Each is made at its first use and
/// kept, what lies in the memory may change. Any thread may ask.
class TensorMaps {
 public:
  /// Throws as what makes it.
  [[nodiscard]] CUtensorMap get(const AnyMapArgs& args);
  /// How many there are.
  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return maps_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::map<AnyMapArgs, CUtensorMap> maps_;
};

/// `owner`'s map; where nobody keeps it (null), one that is made anew.
[[nodiscard]] CUtensorMap tensor_map_of(TensorMaps* owner, const AnyMapArgs& args);

}  // namespace switchyard
