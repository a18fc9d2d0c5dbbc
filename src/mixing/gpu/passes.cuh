#pragma once

// How passes over [T, S] are divided among blocks and threads.

#include <cstdint>

#include "core/gpu/each.cuh"
#include "core/gpu/pack16.cuh"
#include "mixing/gpu/kernels.hpp"

namespace switchyard::mixing {

using each::kThreads;
inline constexpr int kWarps = kThreads / 32;

[[nodiscard]] inline unsigned blocks_of(std::int64_t size, std::int64_t of_block) {
  return static_cast<unsigned>((size + of_block - 1) / of_block);
}

/// Four floats at a multiple of 16 bytes, or one.
template <int kVector>
__device__ __forceinline__ void load(const float* from, float (&x)[kVector]) {
  if constexpr (kVector == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
    static_assert(kVector == 1);
    x[0] = *from;
  }
}

template <int kVector>
__device__ __forceinline__ void store(float* to, const float (&x)[kVector]) {
  if constexpr (kVector == 4) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    static_assert(kVector == 1);
    *to = x[0];
  }
}

/// Four values of bf16 at a multiple of 8 bytes.
__device__ __forceinline__ void store(__nv_bfloat16* to, const float (&x)[4]) {
  store_floats(to, x);
}

__device__ __forceinline__ bool makes_slots(const GroupShape& shape, std::int64_t group) {
  return !shape.causal || group % shape.per_sequence != shape.per_sequence - 1;
}

__device__ __forceinline__ bool reads_slots(const GroupShape& shape, std::int64_t group) {
  return !shape.causal || group % shape.per_sequence != 0;
}

/// Where a thread of a pass along columns works: tokens first + row, then every rows-th up to end.
struct ColumnTile {
  std::int64_t group;
  std::int64_t part;    ///< group * chunks + chunk
  std::int64_t column;  ///< The first of the thread's; beyond S there is nothing for it.
  std::int64_t first, end;
  std::int32_t column_block;
  int row, rows;

  __device__ __forceinline__ ColumnTile(const GroupShape& shape, const ColumnTiles& tiles) {
    const auto thread = static_cast<int>(threadIdx.x);
    column_block = static_cast<std::int32_t>(blockIdx.x % tiles.column_blocks);
    part = blockIdx.x / tiles.column_blocks;
    group = part / tiles.chunks;
    column = (std::int64_t{column_block} * tiles.lanes + thread % tiles.lanes) * tiles.vector;
    row = thread / tiles.lanes;
    rows = kThreads / tiles.lanes;
    const std::int64_t begin = part % tiles.chunks * tiles.chunk_tokens;
    first = group * shape.tokens + begin;
    end = group * shape.tokens + min(shape.tokens, begin + tiles.chunk_tokens);
  }
};

/// Where a thread that adds up parts of [groups, S] works: 32 columns of a group a block.
struct ColumnPlace {
  std::int64_t group, slot;
  int warp, lane;
  bool inside;

  __device__ __forceinline__ explicit ColumnPlace(std::int64_t slots) {
    const std::int64_t blocks = (slots + 31) / 32;
    warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    group = blockIdx.x / blocks;
    slot = blockIdx.x % blocks * 32 + lane;
    inside = slot < slots;
  }
};

/// Where a thread of a pass along rows works.
struct RowPlace {
  std::int64_t token;
  int lane;     ///< Of the threads of its row.
  bool inside;  ///< The same for all of a warp, and of a block where that is a row's.

  __device__ __forceinline__ RowPlace(const GroupShape& shape, int row_threads) {
    const auto thread = static_cast<int>(threadIdx.x);
    token = std::int64_t{blockIdx.x} * (kThreads / row_threads) + thread / row_threads;
    lane = thread % row_threads;
    inside = token < shape.num_tokens;
  }
};

/// @param by_four, by_one  The kernel for columns four at a time, and one.
template <typename Params>
void launch_columns(const GroupShape& shape, const ColumnTiles& tiles, void (*by_four)(Params),
                    void (*by_one)(Params), const Params& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(shape.count * tiles.chunks * tiles.column_blocks);
  const auto chosen = tiles.vector == 4 ? by_four : by_one;
  chosen<<<blocks, kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

/// A kernel of passes along rows: columns four at a time, or one; a warp a row, or a block.
template <typename Params>
struct RowKernels {
  void (*four_warp)(Params);
  void (*four_block)(Params);
  void (*one_warp)(Params);
  void (*one_block)(Params);
};

template <typename Params>
void launch_rows(const GroupShape& shape, const RowKernels<Params>& kernels, const Params& params,
                 cudaStream_t stream) {
  if (shape.num_tokens == 0) return;
  constexpr std::int64_t kLongRow = 1024;
  const bool is_long = shape.slots > kLongRow;
  const auto by_four = is_long ? kernels.four_block : kernels.four_warp;
  const auto by_one = is_long ? kernels.one_block : kernels.one_warp;
  const auto chosen = shape.slots % 4 == 0 ? by_four : by_one;
  const unsigned blocks = blocks_of(shape.num_tokens, is_long ? 1 : kWarps);
  chosen<<<blocks, kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard::mixing
