#pragma once

// The two products on the way back that give rows, for sm_80 and everything later. Bound by the
// tensor cores where experts have some hundred rows. A CTA takes tiles of 128 rows by 128 columns
// by the forward's schedule; the weights lie as the forward has them, the index that is summed over
// across memory.

#include "experts/gpu/backward/activation_gradient.cuh"
#include "experts/gpu/backward/multiply.cuh"
#include "experts/gpu/backward/products.hpp"
#include "experts/gpu/grouped/sm80/load.cuh"

namespace switchyard::backward {

/// Through the activation: one tile of a' [rows, columns of the intermediate] in shared memory.
template <typename T, Activation kKind, bool kGated>
__device__ __forceinline__ void through_activation(const DownGradient& args, const Work& work,
                                                   const float* tile) {
  const std::int64_t z_cols = (kGated ? 2 : 1) * args.inner_cols;
  const std::int64_t tiles = tiles_along(args.inner_cols);
  TileRows<T>::each(tile, [&](int in_tile, int column, const float(&da)[kPack<T>]) {
    float dot = 0;
    const std::int64_t row = std::int64_t{work.tile.row} + in_tile;
    const std::int64_t at = std::int64_t{work.tile.column_tile} * kTile + column;
    const bool exists = in_tile < work.tile.rows;
    if (exists && at < args.inner_cols) {
      const float weight = __ldg(args.rows.weight + row);
      const T* const z = static_cast<const T*>(args.z) + row * z_cols + at;
      T* const dz = static_cast<T*>(args.dz) + row * z_cols + at;
      float gate[kPack<T>];
      float up[kPack<T>] = {};
      unpack16(*reinterpret_cast<const int4*>(z), gate, T{});
      if constexpr (kGated) {
        unpack16(*reinterpret_cast<const int4*>(z + args.inner_cols), up, T{});
      }
      float inner[kPack<T>];
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        const ActivationSlopes slopes =
            activation_slopes<kKind, kGated>(gate[i], up[i], args.activation);
        dot = fmaf(da[i], slopes.value, dot);
        inner[i] = weight * slopes.value;
        gate[i] = weight * da[i] * slopes.gate;
        up[i] = weight * da[i] * slopes.up;
      }
      store_floats(static_cast<T*>(args.inner) + row * args.inner_cols + at, inner);
      store_floats(dz, gate);
      if constexpr (kGated) store_floats(dz + args.inner_cols, up);
    }
#pragma unroll
    for (int distance = 1; distance < TileRows<T>::kChunks; distance *= 2) {
      dot += __shfl_xor_sync(kAllLanes, dot, distance);
    }
    if (exists && column == 0) args.dots[row * tiles + work.tile.column_tile] = dot;
  });
}

template <typename T>
__device__ __forceinline__ void store_tile(const DownGradient& args, const Work& work,
                                           const float* tile) {
  with_activation(args.activation.kind, [&](auto kind) {
    constexpr Activation kKind = decltype(kind)::value;
    if constexpr (kKind == Activation::kClampedSwiglu) {
      through_activation<T, kKind, true>(args, work, tile);
    } else if (args.gated) {
      through_activation<T, kKind, true>(args, work, tile);
    } else {
      through_activation<T, kKind, false>(args, work, tile);
    }
  });
}

template <typename T>
__device__ __forceinline__ void store_tile(const RowsGradient& args, const Work& work,
                                           const float* tile) {
  TileRows<T>::each(tile, [&](int in_tile, int column, const float(&values)[kPack<T>]) {
    const std::int64_t at = std::int64_t{work.tile.column_tile} * kTile + column;
    if (in_tile >= work.tile.rows || at >= args.cols) return;
    store_floats(args.out + (std::int64_t{work.tile.row} + in_tile) * args.cols + at, values);
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
