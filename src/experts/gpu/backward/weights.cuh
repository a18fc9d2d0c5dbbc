#pragma once

// Weights' gradients, for sm_80 and everything later: products that sum over the rows of an expert,
// each operand fetched by its own index. Bound by the tensor cores where experts have some hundred
// rows, by the gradients' memory below. A CTA takes tiles of 128 x 128 of one part of an expert's
// rows, as they come: what it computes depends on the part alone.

#include "experts/gpu/backward/multiply.cuh"
#include "experts/gpu/backward/products.hpp"

namespace switchyard::backward {

/// Some gradients' values, written or added once.
template <typename Out, int kCount>
__device__ __forceinline__ void write_gradient(Out* to, float (&values)[kCount], bool accumulate) {
  if (accumulate) {
    float before[kPack<Out>];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i % kPack<Out> == 0) {
        unpack16(*reinterpret_cast<const int4*>(to + i), before, Out{});
      }
      values[i] += before[i % kPack<Out>];
    }
  }
  store_floats(to, values);
}

template <typename T, int kCount>
__device__ __forceinline__ void write_gradient(const WeightGradient& args, std::int64_t at,
                                               float (&values)[kCount]) {
  if (args.out_is_f32) {
    write_gradient(static_cast<float*>(args.out) + at, values, args.accumulate);
  } else {
    write_gradient(static_cast<T*>(args.out) + at, values, args.accumulate);
  }
}

/// Where one tile of one expert's gradient is.
struct GradientTile {
  std::int64_t expert;
  std::int64_t left;   // first column of the left operand: row of the gradient
  std::int64_t right;  // first column of the right one
};

__device__ __forceinline__ GradientTile tile_at(const WeightGradient& args, std::int64_t expert,
                                                std::int64_t tile) {
  const std::int64_t across = tiles_along(args.right.cols);
  return {expert, tile / across * kTile, tile % across * kTile};
}

/// body(row, column, values): whichever of a tile's chunks the gradient has.
template <typename T, typename Body>
__device__ __forceinline__ void each_inside(const WeightGradient& args, const GradientTile& tile,
                                            const float* sums, Body&& body) {
  TileRows<T>::each(sums, [&](int row, int column, float(&values)[kPack<T>]) {
    const std::int64_t left = tile.left + row;
    const std::int64_t right = tile.right + column;
    if (left < args.left.cols && right < args.right.cols) {
      body((tile.expert * args.left.cols + left) * args.right.cols + right, values);
    }
  });
}

/// The expert that part `part` of all belongs to.
__device__ __forceinline__ std::int32_t expert_of(const RaggedUnits& units, std::int32_t experts,
                                                  std::int32_t part) {
  std::int32_t low = 0;
  std::int32_t high = experts - 1;
  while (low < high) {
    const std::int32_t middle = (low + high + 1) / 2;
    if (__ldg(units.parts_before + middle) <= part) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ __forceinline__ float* split_tile(const WeightGradient& args, std::int64_t part,
                                             std::int64_t tiles, std::int64_t tile) {
  return args.split_tiles + (part * tiles + tile) * (kPartTile * kPartTile);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, Tiles<T>::kIsF32 ? 1 : 2)
    weight_gradient(const __grid_constant__ WeightGradient args) {
  extern __shared__ __align__(128) char shared[];
  __shared__ std::int64_t drawn;
  const std::int64_t tiles = tiles_along(args.left.cols) * tiles_along(args.right.cols);
  const std::int64_t items = __ldg(args.units.parts_before + args.rows.num_experts) * tiles;
  for (std::int64_t item = blockIdx.x; item < items;) {
    const auto in_all = static_cast<std::int32_t>(item / tiles);
    const std::int32_t expert = expert_of(args.units, args.rows.num_experts, in_all);
    const std::int32_t part = in_all - __ldg(args.units.parts_before + expert);
    const std::int32_t rows = __ldg(args.rows.rows + expert);
    const RowRange range = rows_of_part(part, rows, args.units.part_rows);
    const std::int64_t first = __ldg(args.rows.begin + expert) + range.begin;
    const std::int32_t count = range.end - range.begin;
    const GradientTile tile = tile_at(args, expert, item % tiles);
    FlatLoader<T> left(static_cast<const T*>(args.left.rows), args.left.token, first, count,
                       args.left.cols, tile.left);
    FlatLoader<T> right(static_cast<const T*>(args.right.rows), args.right.token, first, count,
                        args.right.cols, tile.right);
    Sums sums = {};
    multiply_tile<T>(sums, ptx::shared_address(shared),
                     (count + Tiles<T>::kTileK - 1) / Tiles<T>::kTileK, left, right);
    if (threadIdx.x == 0) drawn = atomicAdd(args.units.counter, 1);
    auto* const values = reinterpret_cast<float*>(shared);
    TileRows<T>::put(values, sums);
    if (parts_of(rows, args.units.part_rows) == 1) {
      each_inside<T>(args, tile, values, [&](std::int64_t at, float(&chunk)[kPack<T>]) {
        write_gradient<T>(args, at, chunk);
      });
    } else {
      float* const to = split_tile(args, __ldg(args.units.split_parts_before + expert) + part,
                                   tiles, item % tiles);
      TileRows<T>::each(values, [&](int row, int column, const float(&chunk)[kPack<T>]) {
        store_floats(to + row * kTile + column, chunk);
      });
    }
    item = gridDim.x + drawn;
    __syncthreads();  // nobody reads the last tile any more
  }
}

/// Adds the parts of experts with more than one.
template <typename T>
__global__ void __launch_bounds__(kThreads) add_parts(const __grid_constant__ WeightGradient args) {
  const std::int64_t tiles = tiles_along(args.left.cols) * tiles_along(args.right.cols);
  const std::int64_t items = args.rows.num_experts * tiles;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const std::int64_t expert = item / tiles;
    const std::int32_t parts = parts_of(__ldg(args.rows.rows + expert), args.units.part_rows);
    if (parts == 1) continue;
    const std::int64_t first = __ldg(args.units.split_parts_before + expert);
    const GradientTile tile = tile_at(args, expert, item % tiles);
    for (int at = static_cast<int>(threadIdx.x) * kPack<T>; at < kTile * kTile;
         at += kThreads * kPack<T>) {
      const std::int64_t left = tile.left + at / kTile;
      const std::int64_t right = tile.right + at % kTile;
      if (left >= args.left.cols || right >= args.right.cols) continue;
      float sums[kPack<T>] = {};
      for (std::int32_t part = 0; part < parts; ++part) {
        const float* from = split_tile(args, first + part, tiles, item % tiles) + at;
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) sums[i] += from[i];
      }
      write_gradient<T>(args, (expert * args.left.cols + left) * args.right.cols + right, sums);
    }
  }
}

}  // namespace switchyard::backward
