#pragma once

// What the multiplying warps of the grouped products with codes have in common: which weight rows
// are a lane's, and where its sums go.

#include <cuda_bf16.h>

#include <cstdint>

#include "core/gpu/ptx.cuh"
#include "core/gpu/wgmma.cuh"
#include "experts/gpu/activation.cuh"
#include "experts/gpu/grouped/coded/load.cuh"

namespace switchyard {

/// A warpgroup has 64 weight rows of every item as the M side and all its token rows as the N side;
/// a lane has the gate and the up row of a column (plain: rows 8 apart), so that an item is
/// finished where it is summed.
template <typename Shape>
class CodedOutput {
 public:
  __device__ CodedOutput(const CodedRing<Shape>& ring, const CodedParams& params,
                         const unsigned char* shared, int turns)
      : ring_(ring), params_(params), shared_(shared), turns_(turns) {}

 protected:
  static constexpr bool kIsSecond = Shape::kEpilogue == CodedEpilogue::kLinear;
  static constexpr int kMatrices = Shape::kGated ? 2 : 1;
  using Cursor = StageCursor<Shape::kStages>;

  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  /// The first of the two groups of 8 rows of this warp in a stage, and bytes to the other.
  static __device__ __forceinline__ int group() { return Shape::kGated ? warp() : 2 * warp(); }
  static constexpr int kToOther = (Shape::kGated ? Shape::kMultiplyWarps : 1) * Shape::kGroupBytes;
  /// Columns of the output that begin the warp's groups.
  static __device__ __forceinline__ int column(const CodedItem& item, int which) {
    return item.tile * Shape::kColumns + 8 * (Shape::kGated ? warp() : 2 * warp() + which);
  }
  /// Where the warp's first group lies in a stage, which has been waited for.
  __device__ __forceinline__ const unsigned char* find_group(const Cursor& cursor) const {
    return shared_ + cursor.stage * Shape::kStageBytes + group() * Shape::kGroupBytes;
  }

  /// Until all products have been added; the compiler may not move reads of sums above.
  template <int kValues>
  static __device__ __forceinline__ void finish(float (&sums)[kValues]) {
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kValues; ++i) asm volatile("" : "+f"(sums[i])::"memory");
    __syncwarp();
  }

  template <int kN>
  __device__ __forceinline__ void store(const CodedItem& item, const float (&sums)[kN / 2]) const {
    const int upper = column(item, 0) + lane() / 4;
    const int lower = column(item, 1) + lane() / 4;
    float2 bias{};
    if (params_.bias != nullptr) {
      const std::int64_t columns = params_.columns;
      const float* of = params_.bias + (Shape::kGated ? 2 : 1) * columns * item.expert;
      const auto at = [&](int i) { return __ldg(of + min(i, params_.columns - 1)); };
      bias.x = at(upper);
      bias.y = Shape::kGated ? __ldg(of + columns + min(upper, params_.columns - 1)) : at(lower);
    }
    if constexpr (Shape::kEpilogue == CodedEpilogue::kLinear) {
      put_both<kN>(
          item, [&](int i) { return sums[i] + bias.x; },
          [&](int i) { return sums[i + 2] + bias.y; });
    } else {
      with_activation(params_.activation.kind, [&](auto kind) {
        if constexpr (Shape::kGated) {
          put<kN>(item, 0, [&](int i) {
            return activate<kind(), true>(sums[i] + bias.x, sums[i + 2] + bias.y,
                                          params_.activation);
          });
        } else if constexpr (kind() != Activation::kClampedSwiglu) {
          put<kN>(item, 0, [&](int i) {
            return activate<kind(), false>(sums[i] + bias.x, 0, params_.activation);
          });
          put<kN>(item, 1, [&](int i) {
            return activate<kind(), false>(sums[i + 2] + bias.y, 0, params_.activation);
          });
        }
      });
    }
  }

  /// Of 8 rows and a group of 8 columns a lane has two rows of column lane / 4; then two columns of
  /// row lane / 4, from 2 (lane % 4) on.
  template <typename Value>
  static __device__ __forceinline__ std::uint32_t turned(int rows, Value&& value) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(value(4 * rows), value(4 * rows + 1));
    return ptx::transpose_8x8(*reinterpret_cast<const std::uint32_t*>(&pair));
  }
  /// Where the lane's row of the first 8 has `to_column`.
  __device__ __forceinline__ __nv_bfloat16* place_of(const CodedItem& item, int to_column) const {
    return static_cast<__nv_bfloat16*>(params_.out) +
           static_cast<std::int64_t>(item.row + lane() / 4) * params_.columns + to_column;
  }

  /// @param which  Of the warp's groups.
  /// @param value  Of sum i and, of the other row, i + 2.
  template <int kN, typename Value>
  __device__ __forceinline__ void put(const CodedItem& item, int which, Value&& value) const {
    int to_column = column(item, which) + lane() % 4 * 2;
    const bool exists = to_column < params_.columns;
    if constexpr (Shape::kOrdered && !Shape::kSplit && !kIsSecond) {
      to_column = static_cast<int>(coded::ordered_column(to_column));
    }
    __nv_bfloat16* const out = place_of(item, to_column);
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      const std::uint32_t pair = turned(n, value);
      if (exists && 8 * n + lane() / 4 < item.rows) {
        *reinterpret_cast<std::uint32_t*>(out + std::int64_t{8} * n * params_.columns) = pair;
      }
    }
  }

  /// Both groups, which are 16 columns side by side: a lane writes four of a row, so that a warp
  /// writes whole sectors. Of neighbours one takes the first group's columns of both, one the
  /// other's.
  template <int kN, typename First, typename Last>
  __device__ __forceinline__ void put_both(const CodedItem& item, First&& first,
                                           Last&& last) const {
    const bool takes_last = lane() % 2 == 1;
    const int to_column = column(item, takes_last ? 1 : 0) + lane() % 4 / 2 * 4;
    const bool exists = to_column < params_.columns;
    __nv_bfloat16* const out = place_of(item, to_column);
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      const std::uint32_t of_first = turned(n, first);
      const std::uint32_t of_last = turned(n, last);
      const std::uint32_t other = __shfl_xor_sync(~0U, takes_last ? of_first : of_last, 1);
      if (exists && 8 * n + lane() / 4 < item.rows) {
        *reinterpret_cast<uint2*>(out + std::int64_t{8} * n * params_.columns) =
            takes_last ? make_uint2(other, of_last) : make_uint2(of_first, other);
      }
    }
  }

  const CodedRing<Shape>& ring_;
  const CodedParams& params_;
  const unsigned char* shared_;
  int turns_;
  Cursor cursor_;
};

}  // namespace switchyard
