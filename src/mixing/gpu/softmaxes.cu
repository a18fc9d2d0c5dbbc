// Both softmaxes over a group's logits. Bound by memory: each pass reads and writes [T, S] once, a
// thread four columns at a time. Sums along columns are of chunks of tokens, which a second, small
// pass adds up in order; sums along rows stay in a warp, or in a block where rows are long.
#include "mixing/gpu/kernels.hpp"

#include <algorithm>
#include <bit>

#include "core/gpu/cuda_device.hpp"
#include "mixing/gpu/passes.cuh"

namespace switchyard::mixing {
namespace {

/// Adds e^logit to a sum of exponentials over e^largest. A NaN stays one.
__device__ __forceinline__ void add_exponential(float logit, float& largest, float& sum) {
  if (logit > largest) {
    sum = fmaf(sum, expf(largest - logit), 1.0F);
    largest = logit;
  } else {
    sum += expf(logit - largest);
  }
}

/// Adds another such sum. Either order gives the same bits.
__device__ __forceinline__ void add_sums(float other_largest, float other, float& largest,
                                         float& sum) {
  const float most = fmaxf(largest, other_largest);
  // Of no terms: exp(-inf - -inf) would be no number.
  const float mine = largest == -INFINITY ? sum : __fmul_rn(sum, expf(largest - most));
  const float theirs =
      other_largest == -INFINITY ? other : __fmul_rn(other, expf(other_largest - most));
  largest = most;
  sum = __fadd_rn(mine, theirs);
}

struct ColumnSumParams {
  GroupShape shape;
  ColumnTiles tiles;
  float* logits;
  const float* of_token;
  const float* of_slot;
  float scale;
  float* largest;  // [count * chunks, S]
  float* sum;
  DeviceStatus* status;
};

__device__ __noinline__ void report(DeviceStatus* status, std::int64_t token, std::int64_t slot) {
  if (status == nullptr) return;
  const auto place =
      static_cast<unsigned long long>(token) << 32 | static_cast<unsigned long long>(slot);
  atomicMin(reinterpret_cast<unsigned long long*>(&status->nan_logit), place);
}

template <int kVector>
__global__ void __launch_bounds__(kThreads)
    column_sum_kernel(const __grid_constant__ ColumnSumParams p) {
  const ColumnTile at(p.shape, p.tiles);
  float largest[kVector], sum[kVector] = {};
#pragma unroll
  for (int i = 0; i < kVector; ++i) largest[i] = -INFINITY;
  if (at.column < p.shape.slots) {
    float of_slot[kVector] = {};
    if (p.of_slot != nullptr) load(p.of_slot + at.column, of_slot);
    for (std::int64_t t = at.first + at.row; t < at.end; t += at.rows) {
      float* const place = p.logits + t * p.shape.slots + at.column;
      float u[kVector];
      load(place, u);
      if (p.of_token != nullptr) {
        const float of_token = p.of_token[t];
#pragma unroll
        for (int i = 0; i < kVector; ++i) u[i] *= of_token * of_slot[i];
        store(place, u);
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float logit = p.scale * u[i];
        if (!isfinite(logit)) report(p.status, t, at.column + i);
        add_exponential(logit, largest[i], sum[i]);
      }
    }
  }
  __shared__ __align__(16) float all_largest[kThreads * kVector];
  __shared__ __align__(16) float all_sums[kThreads * kVector];
  store(all_largest + threadIdx.x * kVector, largest);
  store(all_sums + threadIdx.x * kVector, sum);
  __syncthreads();
  if (at.row != 0 || at.column >= p.shape.slots) return;
  for (int row = 1; row < at.rows; ++row) {
    const int from = (row * p.tiles.lanes + static_cast<int>(threadIdx.x)) * kVector;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      add_sums(all_largest[from + i], all_sums[from + i], largest[i], sum[i]);
    }
  }
  const std::int64_t to = at.part * p.shape.slots + at.column;
  store(p.largest + to, largest);
  store(p.sum + to, sum);
}

struct AddChunksParams {
  const float* chunk_largest;  // [count, chunks, S]
  const float* chunk_sum;
  float* largest;  // [count, S]
  float* sum;
  std::int64_t chunks, slots;
};

/// 32 columns a block, a warp every eighth chunk.
__global__ void __launch_bounds__(kThreads)
    add_chunks_kernel(const __grid_constant__ AddChunksParams p) {
  __shared__ float all_largest[kWarps][32], all_sums[kWarps][32];
  const ColumnPlace at(p.slots);
  float largest = -INFINITY, sum = 0.0F;
  if (at.inside) {
    const std::int64_t first = at.group * p.chunks * p.slots + at.slot;
#pragma unroll 4
    for (std::int64_t chunk = at.warp; chunk < p.chunks; chunk += kWarps) {
      const std::int64_t from = first + chunk * p.slots;
      add_sums(p.chunk_largest[from], p.chunk_sum[from], largest, sum);
    }
  }
  all_largest[at.warp][at.lane] = largest;
  all_sums[at.warp][at.lane] = sum;
  __syncthreads();
  if (at.warp != 0 || !at.inside) return;
  for (int warp = 1; warp < kWarps; ++warp) {
    add_sums(all_largest[warp][at.lane], all_sums[warp][at.lane], largest, sum);
  }
  p.largest[at.group * p.slots + at.slot] = largest;
  p.sum[at.group * p.slots + at.slot] = sum;
}

void add_chunks(const GroupShape& shape, const ColumnTiles& tiles, const ColumnSums& sums,
                cudaStream_t stream) {
  if (tiles.chunks == 1) return;  // they are the sums
  const AddChunksParams params{.chunk_largest = sums.chunk_largest,
                               .chunk_sum = sums.chunk_sum,
                               .largest = sums.largest,
                               .sum = sums.sum,
                               .chunks = tiles.chunks,
                               .slots = shape.slots};
  const auto blocks = static_cast<unsigned>(shape.count * blocks_of(shape.slots, 32));
  add_chunks_kernel<<<blocks, kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

struct DispatchParams {
  GroupShape shape;
  ColumnTiles tiles;
  const float* logits;
  float scale;
  const float* largest;  // [count, S]
  const float* sum;
  void* out;  // [T, S]
};

template <int kVector, typename Out>
__global__ void __launch_bounds__(kThreads)
    dispatch_kernel(const __grid_constant__ DispatchParams p) {
  const ColumnTile at(p.shape, p.tiles);
  if (at.column >= p.shape.slots) return;
  const bool makes = makes_slots(p.shape, at.group);
  float largest[kVector], factor[kVector];
  load(p.largest + at.group * p.shape.slots + at.column, largest);
  load(p.sum + at.group * p.shape.slots + at.column, factor);
#pragma unroll
  for (int i = 0; i < kVector; ++i) factor[i] = 1.0F / factor[i];
  for (std::int64_t t = at.first + at.row; t < at.end; t += at.rows) {
    const std::int64_t place = t * p.shape.slots + at.column;
    float u[kVector] = {};
    if (makes) {
      load(p.logits + place, u);
#pragma unroll
      for (int i = 0; i < kVector; ++i) u[i] = expf(p.scale * u[i] - largest[i]) * factor[i];
    }
    store(static_cast<Out*>(p.out) + place, u);
  }
}

struct CombineParams {
  GroupShape shape;
  const float* logits;
  float scale;
  void* out;  // [T, S]
};

/// kRowThreads threads a row: a warp, or the block.
template <int kVector, int kRowThreads, typename Out>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CombineParams p) {
  const RowPlace at(p.shape, kRowThreads);
  if (!at.inside) return;
  const float* const logits = p.logits + at.token * p.shape.slots;
  Out* const out = static_cast<Out*>(p.out) + at.token * p.shape.slots;
  constexpr int kStep = kRowThreads * kVector;
  if (!reads_slots(p.shape, at.token / p.shape.tokens)) {
    const float zeros[kVector] = {};
    for (std::int64_t s = at.lane * kVector; s < p.shape.slots; s += kStep) store(out + s, zeros);
    return;
  }
  float largest = -INFINITY, sum = 0.0F;
  for (std::int64_t s = at.lane * kVector; s < p.shape.slots; s += kStep) {
    float u[kVector];
    load(logits + s, u);
#pragma unroll
    for (int i = 0; i < kVector; ++i) add_exponential(p.scale * u[i], largest, sum);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other_largest = __shfl_xor_sync(0xffffffffU, largest, offset);
    add_sums(other_largest, __shfl_xor_sync(0xffffffffU, sum, offset), largest, sum);
  }
  if constexpr (kRowThreads > 32) {
    __shared__ float warp_largest[kRowThreads / 32], warp_sum[kRowThreads / 32];
    if (at.lane % 32 == 0) warp_largest[at.lane / 32] = largest, warp_sum[at.lane / 32] = sum;
    __syncthreads();
    largest = warp_largest[0], sum = warp_sum[0];
    for (int warp = 1; warp < kRowThreads / 32; ++warp) {
      add_sums(warp_largest[warp], warp_sum[warp], largest, sum);
    }
  }
  const float factor = 1.0F / sum;
  for (std::int64_t s = at.lane * kVector; s < p.shape.slots; s += kStep) {
    float u[kVector];
    load(logits + s, u);
#pragma unroll
    for (int i = 0; i < kVector; ++i) u[i] = expf(p.scale * u[i] - largest) * factor;
    store(out + s, u);
  }
}

}  // namespace

ColumnTiles column_tiles(const GroupShape& shape) {
  constexpr std::int64_t kBlocksWanted = 1056;
  constexpr std::int64_t kFewestTurns = 4;  // of a block's rows in a chunk
  ColumnTiles tiles;
  tiles.vector = shape.slots % 4 == 0 ? 4 : 1;
  const std::int64_t pieces = shape.slots / tiles.vector;
  tiles.lanes = static_cast<int>(
      std::min<std::uint64_t>(32, std::bit_ceil(static_cast<std::uint64_t>(pieces))));
  tiles.column_blocks = static_cast<std::int32_t>((pieces + tiles.lanes - 1) / tiles.lanes);
  const std::int64_t rows = kThreads / tiles.lanes;
  const std::int64_t wanted = std::max<std::int64_t>(
      1, kBlocksWanted / (tiles.column_blocks * std::max<std::int64_t>(1, shape.count)));
  const std::int64_t tokens = std::max(kFewestTurns * rows, (shape.tokens + wanted - 1) / wanted);
  tiles.chunk_tokens = static_cast<std::int32_t>((tokens + rows - 1) / rows * rows);
  tiles.chunks = static_cast<std::int32_t>(
      std::max<std::int64_t>(1, (shape.tokens + tiles.chunk_tokens - 1) / tiles.chunk_tokens));
  return tiles;
}

void sum_columns(const GroupShape& shape, const ColumnSumArgs& args, cudaStream_t stream) {
  if (shape.num_tokens == 0) return;
  const ColumnTiles tiles = column_tiles(shape);
  const bool whole = tiles.chunks == 1;
  launch_columns(shape, tiles, column_sum_kernel<4>, column_sum_kernel<1>,
                 ColumnSumParams{.shape = shape,
                                 .tiles = tiles,
                                 .logits = args.logits,
                                 .of_token = args.of_token,
                                 .of_slot = args.of_slot,
                                 .scale = args.scale,
                                 .largest = whole ? args.sums.largest : args.sums.chunk_largest,
                                 .sum = whole ? args.sums.sum : args.sums.chunk_sum,
                                 .status = args.status},
                 stream);
  add_chunks(shape, tiles, args.sums, stream);
}

void dispatch_weights(const GroupShape& shape, const float* logits, float scale,
                      const ColumnSums& sums, WeightsOut out, cudaStream_t stream) {
  if (shape.num_tokens == 0) return;
  const ColumnTiles tiles = column_tiles(shape);
  const DispatchParams params{.shape = shape,
                              .tiles = tiles,
                              .logits = logits,
                              .scale = scale,
                              .largest = sums.largest,
                              .sum = sums.sum,
                              .out = out.data};
  const auto by_four =
      out.dtype == DType::kBF16 ? dispatch_kernel<4, __nv_bfloat16> : dispatch_kernel<4, float>;
  launch_columns(shape, tiles, by_four, dispatch_kernel<1, float>, params, stream);
}

void combine_weights(const GroupShape& shape, const float* logits, float scale, WeightsOut out,
                     cudaStream_t stream) {
  const CombineParams params{.shape = shape, .logits = logits, .scale = scale, .out = out.data};
  RowKernels<CombineParams> kernels{
      combine_kernel<4, 32, float>, combine_kernel<4, kThreads, float>,
      combine_kernel<1, 32, float>, combine_kernel<1, kThreads, float>};
  if (out.dtype == DType::kBF16) {
    kernels.four_warp = combine_kernel<4, 32, __nv_bfloat16>;
    kernels.four_block = combine_kernel<4, kThreads, __nv_bfloat16>;
  }
  launch_rows(shape, kernels, params, stream);
}

}  // namespace switchyard::mixing
