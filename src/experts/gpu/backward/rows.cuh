#pragma once

// The two products on the way back that give rows, for sm_80 and everything later. Bound by the
// tensor cores where experts have some hundred rows. A CTA takes tiles of 128 rows by 128 columns
// by the forward's schedule; the weights lie as the forward has them, the index that is summed over
// across memory.

#include "experts/gpu/backward/chunks.cuh"
#include "experts/gpu/backward/multiply.cuh"
#include "experts/gpu/grouped/sm80/load.cuh"

namespace switchyard::backward {

/// A call: inlined, its registers would be taken from the products' loop (64 TFLOP/s on an H200).
template <typename T>
__device__ __noinline__ void store_tile(const DownGradient& args, const Work& work,
                                        const float* tile) {
  const std::int64_t tiles = tiles_along(args.inner_cols);
  with_kind(args, [&](auto kind, auto gated) {
    TileRows<T>::each(tile, [&](int in_tile, int in_row, const float(&da)[kPack<T>]) {
      const std::int64_t row = std::int64_t{work.tile.row} + in_tile;
      const std::int64_t column = std::int64_t{work.tile.column_tile} * kTile + in_row;
      const bool exists = in_tile < work.tile.rows;
      float dot = 0;
      if (exists) {
        dot = store_chunk<T, decltype(kind)::value, decltype(gated)::value>(
            args, load_before<T>(args, row, column), row, column, da);
      }
#pragma unroll
      for (int distance = 1; distance < TileRows<T>::kChunks; distance *= 2) {
        dot += __shfl_xor_sync(kAllLanes, dot, distance);
      }
      if (exists && in_row == 0) args.dots[row * tiles + work.tile.column_tile] = dot;
    });
  });
}

template <typename T>
__device__ __forceinline__ void store_tile(const RowsGradient& args, const Work& work,
                                           const float* tile) {
  TileRows<T>::each(tile, [&](int in_tile, int in_row, const float(&values)[kPack<T>]) {
    if (in_tile >= work.tile.rows) return;
    store_chunk<T>(args, std::int64_t{work.tile.row} + in_tile,
                   std::int64_t{work.tile.column_tile} * kTile + in_row, values);
  });
}

/// What the two products differ in before their stores.
template <typename T>
struct RowsOperands {
  const T* rows;
  const std::int32_t* token;  // of a row; null: itself
  const T* weights;           // [E, depth, cols]
  std::int64_t depth;
  std::int64_t cols;
};
template <typename T>
__device__ __forceinline__ RowsOperands<T> operands_of(const DownGradient& args) {
  return {static_cast<const T*>(args.dout), args.rows.token, static_cast<const T*>(args.w2),
          args.hidden, args.inner_cols};
}
template <typename T>
__device__ __forceinline__ RowsOperands<T> operands_of(const RowsGradient& args) {
  return {static_cast<const T*>(args.in), nullptr, static_cast<const T*>(args.weights), args.depth,
          args.cols};
}

template <typename T, typename Args>
__global__ void __launch_bounds__(kThreads, Tiles<T>::kIsF32 ? 1 : 2)
    rows_gradient(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) char shared[];
  __shared__ int4 ring[kRingSlots];
  const RowsOperands<T> operands = operands_of<T>(args);
  const ScheduleParams schedule{args.rows.begin, args.rows.rows, args.rows.num_experts,
                                static_cast<std::int32_t>(tiles_along(operands.cols)), nullptr};
  const int steps = static_cast<int>((operands.depth + Tiles<T>::kTileK - 1) / Tiles<T>::kTileK);
  UnitWalk<2> walk(schedule, static_cast<std::int32_t>(blockIdx.x),
                   static_cast<std::int32_t>(gridDim.x));
  for (std::uint32_t index = 0;; ++index) {
    if (threadIdx.x < 32) write_work(walk, ring, index);
    __syncthreads();  // also: nobody reads the last tile any more
    const Work work = read_work(ring, index);
    if (work.expert < 0) return;
    DeepLoader<T> left(operands.rows, operands.token, work.tile.row, work.tile.rows,
                       static_cast<std::int32_t>(operands.depth));
    FlatLoader<T> right(operands.weights, nullptr, work.expert * operands.depth,
                        static_cast<std::int32_t>(operands.depth), operands.cols,
                        std::int64_t{work.tile.column_tile} * kTile);
    Sums sums = {};
    multiply_tile<T>(sums, ptx::shared_address(shared), steps, left, right);
    auto* const tile = reinterpret_cast<float*>(shared);
    TileRows<T>::put(tile, sums);
    store_tile<T>(args, work, tile);
  }
}

}  // namespace switchyard::backward
