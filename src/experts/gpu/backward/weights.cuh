#pragma once

// Weights' gradients, for sm_80 and everything later: products that sum over the rows of an expert,
// each operand fetched by its own index. Bound by the tensor cores where experts have some hundred
// rows, by the gradients' memory below. A CTA takes tiles of 128 x 128 of one part of an expert's
// rows, as they come: what it computes depends on the part alone.

#include "experts/gpu/backward/chunks.cuh"
#include "experts/gpu/backward/multiply.cuh"

namespace switchyard::backward {

template <typename T>
__global__ void __launch_bounds__(kThreads, Tiles<T>::kIsF32 ? 1 : 2)
    weight_gradient(const __grid_constant__ WeightGradient args) {
  extern __shared__ __align__(128) char shared[];
  __shared__ std::int64_t drawn;
  const std::int64_t across = tiles_along(args.right.cols);
  const std::int64_t tiles = tiles_along(args.left.cols) * across;
  const std::int64_t items = __ldg(args.units.parts_before + args.rows.num_experts) * tiles;
  for (std::int64_t item = blockIdx.x; item < items;) {
    const GradientUnit unit = unit_at(args, item, tiles);
    const RowRange range =
        rows_of_part(unit.part, __ldg(args.rows.rows + unit.expert), args.units.part_rows);
    const std::int64_t first = __ldg(args.rows.begin + unit.expert) + range.begin;
    const std::int32_t count = range.end - range.begin;
    const std::int64_t left_column = unit.tile / across * kTile;
    const std::int64_t right_column = unit.tile % across * kTile;
    FlatLoader<T> left(static_cast<const T*>(args.left.rows), args.left.token, first, count,
                       args.left.cols, left_column);
    FlatLoader<T> right(static_cast<const T*>(args.right.rows), args.right.token, first, count,
                        args.right.cols, right_column);
    Sums sums = {};
    multiply_tile<T>(sums, ptx::shared_address(shared),
                     (count + Tiles<T>::kTileK - 1) / Tiles<T>::kTileK, left, right);
    if (threadIdx.x == 0) drawn = atomicAdd(args.units.counter, 1);
    auto* const values = reinterpret_cast<float*>(shared);
    TileRows<T>::put(values, sums);
    TileRows<T>::each(values, [&](int row, int column, float(&chunk)[kPack<T>]) {
      store_chunk<T>(args, unit, left_column + row, right_column + column, chunk);
    });
    item = gridDim.x + drawn;
    __syncthreads();  // nobody reads the last tile any more
  }
}

/// Adds the parts of experts with more than one; a block takes kRowsAtOnce rows of a gradient.
template <typename T>
__global__ void __launch_bounds__(kThreads) add_parts(const __grid_constant__ WeightGradient args) {
  constexpr std::int64_t kRowsAtOnce = 32;
  const std::int64_t blocks = (args.left.cols + kRowsAtOnce - 1) / kRowsAtOnce;
  const std::int64_t items = args.rows.num_experts * blocks;
  const std::int64_t size = args.left.cols * args.right.cols;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const std::int64_t expert = item / blocks;
    const std::int32_t parts = parts_of(__ldg(args.rows.rows + expert), args.units.part_rows);
    if (parts == 1) continue;
    const float* const first =
        args.split_sums + __ldg(args.units.split_parts_before + expert) * size;
    const std::int64_t begin = item % blocks * kRowsAtOnce;
    const std::int64_t end = min(begin + kRowsAtOnce, args.left.cols) * args.right.cols;
    for (std::int64_t at = begin * args.right.cols + threadIdx.x * kPack<T>; at < end;
         at += kThreads * kPack<T>) {
      float sums[kPack<T>] = {};
      for (std::int32_t part = 0; part < parts; ++part) {
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) sums[i] += first[part * size + at + i];
      }
      write_gradient<T>(args, expert * size + at, sums);
    }
  }
}

}  // namespace switchyard::backward
