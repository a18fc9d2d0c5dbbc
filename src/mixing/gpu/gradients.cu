// The way back through both softmaxes. Bound by memory: each pass reads what it needs of [T, S]
// once. Sums of chunks of tokens, and of blocks of columns, are added up in order by small passes.
#include "core/gpu/cuda_device.hpp"
#include "mixing/gpu/kernels.hpp"
#include "mixing/gpu/passes.cuh"

namespace switchyard::mixing {
namespace {

struct CombineBackwardParams {
  GroupShape shape;
  const float* weights;
  float* gradient;
};

template <int kVector, int kRowThreads>
__global__ void __launch_bounds__(kThreads)
    combine_backward_kernel(const __grid_constant__ CombineBackwardParams p) {
  const RowPlace at(p.shape, kRowThreads);
  if (!at.inside) return;
  const float* const weights = p.weights + at.token * p.shape.slots;
  float* const gradient = p.gradient + at.token * p.shape.slots;
  constexpr int kStep = kRowThreads * kVector;
  if (!reads_slots(p.shape, at.token / p.shape.tokens)) {
    const float zeros[kVector] = {};
    for (std::int64_t s = at.lane * kVector; s < p.shape.slots; s += kStep) {
      store(gradient + s, zeros);
    }
    return;
  }
  float dot = 0.0F;
  for (std::int64_t s = at.lane * kVector; s < p.shape.slots; s += kStep) {
    float c[kVector], g[kVector];
    load(weights + s, c);
    load(gradient + s, g);
#pragma unroll
    for (int i = 0; i < kVector; ++i) dot = fmaf(c[i], g[i], dot);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    dot = __fadd_rn(dot, __shfl_xor_sync(0xffffffffU, dot, offset));
  }
  if constexpr (kRowThreads > 32) {
    __shared__ float of_warp[kRowThreads / 32];
    if (at.lane % 32 == 0) of_warp[at.lane / 32] = dot;
    __syncthreads();
    dot = of_warp[0];
    for (int warp = 1; warp < kRowThreads / 32; ++warp) dot = __fadd_rn(dot, of_warp[warp]);
  }
  for (std::int64_t s = at.lane * kVector; s < p.shape.slots; s += kStep) {
    float c[kVector], g[kVector];
    load(weights + s, c);
    load(gradient + s, g);
#pragma unroll
    for (int i = 0; i < kVector; ++i) g[i] = c[i] * (g[i] - dot);
    store(gradient + s, g);
  }
}

/// Adds the sums of a block's rows in order. True for threads that then hold them.
template <int kVector>
__device__ __forceinline__ bool add_rows(const ColumnTile& at, const ColumnTiles& tiles,
                                         std::int64_t slots, float (&sum)[kVector]) {
  __shared__ __align__(16) float all[kThreads * kVector];
  store(all + threadIdx.x * kVector, sum);
  __syncthreads();
  if (at.row != 0 || at.column >= slots) return false;
  for (int row = 1; row < at.rows; ++row) {
    const int from = (row * tiles.lanes + static_cast<int>(threadIdx.x)) * kVector;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] = __fadd_rn(sum[i], all[from + i]);
  }
  return true;
}

struct ColumnDotParams {
  GroupShape shape;
  ColumnTiles tiles;
  const float* weights;
  const float* gradient;
  float* parts;  // [count * chunks, S]
};

template <int kVector>
__global__ void __launch_bounds__(kThreads)
    column_dot_kernel(const __grid_constant__ ColumnDotParams p) {
  const ColumnTile at(p.shape, p.tiles);
  float sum[kVector] = {};
  if (at.column < p.shape.slots && makes_slots(p.shape, at.group)) {
    for (std::int64_t t = at.first + at.row; t < at.end; t += at.rows) {
      float d[kVector], f[kVector];
      load(p.weights + t * p.shape.slots + at.column, d);
      load(p.gradient + t * p.shape.slots + at.column, f);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] = fmaf(d[i], f[i], sum[i]);
    }
  }
  if (add_rows(at, p.tiles, p.shape.slots, sum)) {
    store(p.parts + at.part * p.shape.slots + at.column, sum);
  }
}

struct AddPartsParams {
  const float* parts;  // [count, chunks, S]
  float* out;          // [count, S]
  std::int64_t count, chunks, slots;
};

/// 32 columns a block, a warp every eighth part.
__global__ void __launch_bounds__(kThreads)
    add_parts_kernel(const __grid_constant__ AddPartsParams p) {
  __shared__ float sums[kWarps][32];
  const ColumnPlace at(p.slots);
  float sum = 0.0F;
  if (at.inside) {
    const float* const parts = p.parts + at.group * p.chunks * p.slots + at.slot;
#pragma unroll 4
    for (std::int64_t i = at.warp; i < p.chunks; i += kWarps) {
      sum = __fadd_rn(sum, parts[i * p.slots]);
    }
  }
  sums[at.warp][at.lane] = sum;
  __syncthreads();
  if (at.warp != 0 || !at.inside) return;
  for (int warp = 1; warp < kWarps; ++warp) sum = __fadd_rn(sum, sums[warp][at.lane]);
  p.out[at.group * p.slots + at.slot] = sum;
}

void add_parts(const AddPartsParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(params.count * blocks_of(params.slots, 32));
  add_parts_kernel<<<blocks, kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

struct DispatchBackwardParams {
  GroupShape shape;
  ColumnTiles tiles;
  DispatchBackwardArgs args;
};

/// Rows of a tile take turns together, as lanes of a warp may have different rows and all of them
/// add up a row's sum.
template <int kVector>
__global__ void __launch_bounds__(kThreads)
    dispatch_backward_kernel(const __grid_constant__ DispatchBackwardParams p) {
  const ColumnTile at(p.shape, p.tiles);
  const bool has_column = at.column < p.shape.slots;
  const bool makes = makes_slots(p.shape, at.group);
  float dots[kVector] = {}, of_slot[kVector] = {}, slot_sums[kVector] = {};
  if (has_column && makes) load(p.args.dots + at.group * p.shape.slots + at.column, dots);
  if (has_column && p.args.of_slot != nullptr) load(p.args.of_slot + at.column, of_slot);
  for (std::int64_t first = at.first; first < at.end; first += at.rows) {
    const std::int64_t t = first + at.row;
    const bool inside = has_column && t < at.end;
    float token_sum = 0.0F;
    if (inside) {
      const std::int64_t place = t * p.shape.slots + at.column;
      float dl[kVector], u[kVector];
      load(p.args.dlogits + place, dl);
      load(p.args.logits + place, u);
      if (makes) {
        float d[kVector], f[kVector];
        load(p.args.dispatch + place, d);
        load(p.args.gradient + place, f);
#pragma unroll
        for (int i = 0; i < kVector; ++i) dl[i] = fmaf(d[i], f[i] - dots[i], dl[i]);
      }
      const float of_token = p.args.of_token == nullptr ? 1.0F : p.args.of_token[t];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        token_sum = fmaf(dl[i], u[i], token_sum);
        slot_sums[i] = fmaf(dl[i], u[i], slot_sums[i]);
        dl[i] *= p.args.scale;
        if (p.args.of_token != nullptr) dl[i] *= of_token * of_slot[i];
      }
      store(p.args.dlogits + place, dl);
    }
    for (int offset = p.tiles.lanes / 2; offset > 0; offset /= 2) {
      token_sum = __fadd_rn(token_sum, __shfl_xor_sync(0xffffffffU, token_sum, offset));
    }
    if (threadIdx.x % p.tiles.lanes == 0 && t < at.end) {
      p.args.token_parts[t * p.tiles.column_blocks + at.column_block] = token_sum;
    }
  }
  if (add_rows(at, p.tiles, p.shape.slots, slot_sums)) {
    store(p.args.slot_parts + at.part * p.shape.slots + at.column, slot_sums);
  }
}

struct AddTokenPartsParams {
  const float* parts;  // [T, column_blocks]
  float* out;          // [T]
  std::int64_t num_tokens;
  std::int32_t column_blocks;
};

__global__ void __launch_bounds__(kThreads)
    add_token_parts_kernel(const __grid_constant__ AddTokenPartsParams p) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kThreads + static_cast<int>(threadIdx.x);
  if (t >= p.num_tokens) return;
  float sum = 0.0F;
  for (int i = 0; i < p.column_blocks; ++i) {
    sum = __fadd_rn(sum, p.parts[t * p.column_blocks + i]);
  }
  p.out[t] = sum;
}

constexpr int kSumThreads = 1024;

struct SumParams {
  const float* values;
  std::int64_t size;
  float* out;
  bool accumulate;
};

/// One block.
__global__ void __launch_bounds__(kSumThreads) sum_kernel(const __grid_constant__ SumParams p) {
  __shared__ double sums[kSumThreads];
  const auto thread = static_cast<int>(threadIdx.x);
  double sum = 0;
  for (std::int64_t i = thread; i < p.size; i += kSumThreads) sum += double{p.values[i]};
  sums[thread] = sum;
  __syncthreads();
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    if (thread < half) sums[thread] += sums[thread + half];
    __syncthreads();
  }
  if (thread != 0) return;
  *p.out = static_cast<float>((p.accumulate ? double{*p.out} : 0.0) + sums[0]);
}

}  // namespace

void combine_weights_backward(const GroupShape& shape, const float* weights, float* gradient,
                              cudaStream_t stream) {
  launch_rows(shape,
              RowKernels<CombineBackwardParams>{
                  combine_backward_kernel<4, 32>, combine_backward_kernel<4, kThreads>,
                  combine_backward_kernel<1, 32>, combine_backward_kernel<1, kThreads>},
              CombineBackwardParams{.shape = shape, .weights = weights, .gradient = gradient},
              stream);
}

void dot_columns(const GroupShape& shape, const ColumnDotArgs& args, cudaStream_t stream) {
  if (shape.num_tokens == 0) return;
  const ColumnTiles tiles = column_tiles(shape);
  const bool whole = tiles.chunks == 1;
  launch_columns(shape, tiles, column_dot_kernel<4>, column_dot_kernel<1>,
                 ColumnDotParams{.shape = shape,
                                 .tiles = tiles,
                                 .weights = args.weights,
                                 .gradient = args.gradient,
                                 .parts = whole ? args.dots : args.chunk_dots},
                 stream);
  if (whole) return;  // they are the sums
  add_parts({.parts = args.chunk_dots,
             .out = args.dots,
             .count = shape.count,
             .chunks = tiles.chunks,
             .slots = shape.slots},
            stream);
}

void dispatch_weights_backward(const GroupShape& shape, const DispatchBackwardArgs& args,
                               cudaStream_t stream) {
  const ColumnTiles tiles = column_tiles(shape);
  if (shape.num_tokens > 0) {
    launch_columns(shape, tiles, dispatch_backward_kernel<4>, dispatch_backward_kernel<1>,
                   DispatchBackwardParams{.shape = shape, .tiles = tiles, .args = args}, stream);
    const AddTokenPartsParams params{.parts = args.token_parts,
                                     .out = args.token_sums,
                                     .num_tokens = shape.num_tokens,
                                     .column_blocks = tiles.column_blocks};
    add_token_parts_kernel<<<blocks_of(shape.num_tokens, kThreads), kThreads, 0, stream>>>(params);
    SWITCHYARD_CUDA(cudaGetLastError());
  }
  // Without tokens there are no parts, and the sums are 0.
  add_parts({.parts = args.slot_parts,
             .out = args.slot_sums,
             .count = 1,
             .chunks = shape.count * tiles.chunks,
             .slots = shape.slots},
            stream);
}

void sum_all(const float* values, std::int64_t size, bool accumulate, float* out,
             cudaStream_t stream) {
  sum_kernel<<<1, kSumThreads, 0, stream>>>(
      SumParams{.values = values, .size = size, .out = out, .accumulate = accumulate});
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard::mixing
