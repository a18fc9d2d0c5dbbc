#pragma once

// How a block makes the rows that its products read, in shared memory, of the compute type: the
// norm of the residual stream, or what attention's splits add up to. Each block makes them for
// itself.

#include "core/gpu/ptx.cuh"
#include "models/gpu/launch.cuh"

namespace switchyard::models::gpu {

/// Asks the L2 cache for `size` numbers.
template <int kThreads>
__device__ __forceinline__ void prefetch_row(const float* row, int size) {
  constexpr int kOfLine = 32;
  for (int i = kOfLine * static_cast<int>(threadIdx.x); i < size; i += kOfLine * kThreads) {
    ptx::prefetch_l2(row + i);
  }
}

/// Fours of a row that a thread keeps between the sum of squares and the norm.
template <int kRows>
inline constexpr int kNormKept = kRows == 1   ? 1
                                 : kRows <= 4 ? 2
                                              : 4;

/// rows [kRows, size], `stride` numbers apart: of num_rows what `load(row, column, to)` has, four
/// at a time, normalised; zeros behind them. kThreads / kRows threads a row. All of it is there
/// behind a barrier.
template <typename T, int kRows, int kThreads, class Load>
__device__ __forceinline__ void make_normed_rows(const Load& load, int num_rows, int size,
                                                 const float* weight, float epsilon, T* rows,
                                                 int stride, float (&sums)[kThreads / 32]) {
  constexpr int kOfRow = kThreads / kRows, kKept = kNormKept<kRows>;
  const int row = static_cast<int>(threadIdx.x) / kOfRow;
  const int first = 4 * (static_cast<int>(threadIdx.x) % kOfRow);
  const bool inside = row < num_rows;
  float kept[kKept][4] = {}, by[kKept][4];
  float squares = 0;
  const auto add = [&](const float(&v)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) squares += v[j] * v[j];
  };
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int column = first + 4 * j * kOfRow;
    if (column < size) load4(weight + column, by[j]);
    if (inside && column < size) load(row, column, kept[j]);
  }
#pragma unroll
  for (int j = 0; j < kKept; ++j) add(kept[j]);
  for (int column = first + 4 * kKept * kOfRow; inside && column < size; column += 4 * kOfRow) {
    float v[4];
    load(row, column, v);
    add(v);
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kOfRow / 32; ++w) total += sums[row * (kOfRow / 32) + w];
  const float scale = 1.0F / sqrtf(total / static_cast<float>(size) + epsilon);
  const auto put = [&](int column, float(&v)[4], const float(&weights)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] *= weights[j] * scale;
    store4(rows + row * stride + column, v);
  };
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int column = first + 4 * j * kOfRow;
    if (column < size) put(column, kept[j], by[j]);
  }
  for (int column = first + 4 * kKept * kOfRow; column < size; column += 4 * kOfRow) {
    float v[4] = {}, weights[4];
    if (inside) load(row, column, v);
    load4(weight + column, weights);
    put(column, v, weights);
  }
}

__device__ __forceinline__ void load_wide(const float* from, float (&to)[4]) { load4(from, to); }
__device__ __forceinline__ void load_wide(const float* from, float (&to)[1]) { to[0] = *from; }

/// What attend() leaves.
struct Attended {
  const void* mixed = nullptr;  ///< One split: [rows, size] compute type; more:
  const float* parts = nullptr;
  const float* stats = nullptr;
  int splits = 1, heads = 0;
};

/// rows [kRows, size], `stride` numbers apart: of num_rows what attention has left, kWide numbers
/// at a time, which divide a head; zeros behind them.
template <typename T, int kRows, int kThreads, int kWide>
__device__ __forceinline__ void make_attended_rows(const Attended& from, int num_rows, int size,
                                                   T* rows, int stride) {
  const int splits = from.splits, dim = size / from.heads, of_row = size / kWide;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * of_row; i += kThreads) {
    const int row = i / of_row, column = i % of_row * kWide;
    T* const to = rows + row * stride + column;
    float sum[kWide] = {};
    if (row < num_rows && splits == 1) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
        to[j] = static_cast<const T*>(from.mixed)[row * size + column + j];
      }
      continue;
    }
    if (row < num_rows) {
      const int head = row * from.heads + column / dim;  // of all rows
      const float* const stats = from.stats + 2 * head * splits;
      const float* const part = from.parts + head * splits * dim + column % dim;
      float most = -INFINITY, total = 0;
      // A split that is beyond the last position has no weights, and zeros.
#pragma unroll 4
      for (int s = 0; s < splits; ++s) {
        const float2 of = *reinterpret_cast<const float2*>(stats + 2 * s);
        float x[kWide];
        load_wide(part + s * dim, x);
        const float now = fmaxf(most, of.x), keep = exp2f(most - now), share = exp2f(of.x - now);
        most = now;
        total = total * keep + share * of.y;
#pragma unroll
        for (int j = 0; j < kWide; ++j) sum[j] = sum[j] * keep + share * x[j];
      }
      const float share = 1.0F / total;
#pragma unroll
      for (int j = 0; j < kWide; ++j) sum[j] *= share;
    }
#pragma unroll
    for (int j = 0; j < kWide; ++j) store(to + j, sum[j]);
  }
}

/// The same, whatever a head has.
template <typename T, int kRows, int kThreads>
__device__ __forceinline__ void make_attended_rows(const Attended& from, int num_rows, int size,
                                                   T* rows, int stride) {
  if (size / from.heads % 4 == 0) {
    make_attended_rows<T, kRows, kThreads, 4>(from, num_rows, size, rows, stride);
  } else {
    make_attended_rows<T, kRows, kThreads, 1>(from, num_rows, size, rows, stride);
  }
}

}  // namespace switchyard::models::gpu
