#pragma once

// How operands of the products on the way back come to shared memory, by 16-byte cp.async of all
// threads, stages ahead. A *deep* operand has the index that is summed over along memory (rows of
// dout and dz in the products that give rows), a *flat* one across it (all weights there, and both
// operands of a weights' gradient). Rows are padded so that eight rows' chunks meet all banks.

#include "core/gpu/pack16.cuh"
#include "core/gpu/ptx.cuh"

namespace switchyard::backward {

constexpr int kThreads = 256;
constexpr int kTile = 128;  ///< Rows and columns of a product's tile.
constexpr int kStages = 4;

template <typename T>
struct Tiles {
  static constexpr bool kIsF32 = sizeof(T) == 4;
  static constexpr int kTileK = 64 / static_cast<int>(sizeof(T));
  static constexpr int kDeepRowBytes = 64 + 16;
  static constexpr int kDeepBytes = kTile * kDeepRowBytes;
  static constexpr int kFlatRowBytes = kTile * static_cast<int>(sizeof(T)) + (kIsF32 ? 32 : 16);
  static constexpr int kFlatBytes = kTileK * kFlatRowBytes;
  static constexpr int kFlatChunks = kTile / kPack<T>;            // of a row
  static constexpr int kFlatRowsAtOnce = kThreads / kFlatChunks;  // of all threads' copies
  static_assert(2 * kFlatRowsAtOnce == kTileK);
};

/// A thread's copies of a deep operand: rows of `depth` values, `index` (or null) says which.
template <typename T>
class DeepLoader {
 public:
  static constexpr int kBytes = Tiles<T>::kDeepBytes;

  __device__ DeepLoader(const T* rows, const std::int32_t* index, std::int64_t first,
                        std::int32_t count, std::int32_t depth)
      : any_(rows) {
    const int row = static_cast<int>(threadIdx.x) / 4;
    const int column = static_cast<int>(threadIdx.x) % 4 * kPack<T>;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t at = first + row + i * (kTile / 2);
      const bool exists = row + i * (kTile / 2) < count;
      const std::int64_t source = !exists ? 0 : index != nullptr ? __ldg(index + at) : at;
      from_[i] = rows + source * depth + column;
      left_[i] = exists ? depth - column : 0;
    }
    to_ = static_cast<std::uint32_t>(row * Tiles<T>::kDeepRowBytes) + threadIdx.x % 4 * 16;
  }

  /// The next kTileK values of every row; zeros past the end.
  __device__ __forceinline__ void load(std::uint32_t to) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool inside = left_[i] > 0;
      ptx::cp_async_16(to + to_ + static_cast<std::uint32_t>(i * kBytes / 2),
                       inside ? from_[i] : any_, inside ? 16 : 0);
      from_[i] += Tiles<T>::kTileK;
      left_[i] -= Tiles<T>::kTileK;
    }
  }

 private:
  const T* any_;
  const T* from_[2];
  std::int32_t left_[2];
  std::uint32_t to_;
};

/// A thread's copies of a flat operand: kTile columns from `column` on of `count` rows of `cols`.
template <typename T>
class FlatLoader {
 public:
  static constexpr int kBytes = Tiles<T>::kFlatBytes;

  __device__ FlatLoader(const T* rows, const std::int32_t* index, std::int64_t first,
                        std::int32_t count, std::int64_t cols, std::int64_t column)
      : any_(rows), index_(index), first_(first), cols_(cols) {
    const int chunk = static_cast<int>(threadIdx.x) % Tiles<T>::kFlatChunks;
    row_ = static_cast<int>(threadIdx.x) / Tiles<T>::kFlatChunks;
    from_ = rows + column + chunk * kPack<T>;
    count_ = column + chunk * kPack<T> < cols ? count : 0;
    to_ = static_cast<std::uint32_t>(row_ * Tiles<T>::kFlatRowBytes + chunk * 16);
    fetch();
  }

  /// The next kTileK rows; zeros past the end.
  __device__ __forceinline__ void load(std::uint32_t to) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool inside = row_ + i * Tiles<T>::kFlatRowsAtOnce < count_;
      ptx::cp_async_16(to + to_ + static_cast<std::uint32_t>(i * kBytes / 2),
                       inside ? from_ + source_[i] * cols_ : any_, inside ? 16 : 0);
    }
    row_ += Tiles<T>::kTileK;
    fetch();
  }

 private:
  /// Where the next rows are: asked for a step before their copies.
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int32_t row = row_ + i * Tiles<T>::kFlatRowsAtOnce;
      if (index_ == nullptr) {
        source_[i] = first_ + row;
      } else {
        source_[i] = row < count_ ? __ldg(index_ + first_ + row) : 0;
      }
    }
  }

  const T* any_;
  const T* from_;
  const std::int32_t* index_;
  std::int64_t first_;
  std::int64_t cols_;
  std::int64_t source_[2];
  std::int32_t row_;
  std::int32_t count_;
  std::uint32_t to_;
};

}  // namespace switchyard::backward
