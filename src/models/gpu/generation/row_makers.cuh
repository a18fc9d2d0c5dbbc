#pragma once

// How a block makes the rows that its products read, in shared memory, of the compute type: the
// norm of the residual stream, or what attention's splits add up to. Each block makes them for
// itself.

#include "models/gpu/launch.cuh"

namespace switchyard::models::gpu {

/// Fours of a row that a thread keeps between the sum of squares and the norm.
template <int kRows>
inline constexpr int kNormKept = kRows == 1   ? 1
                                 : kRows <= 4 ? 2
                                              : 4;

/// A thread's weights of a norm: what can be asked for before the rows are there.
template <int kRows, int kThreads>
struct NormWeights {
  static constexpr int kOfRow = kThreads / kRows;
  static constexpr int kKept = kNormKept<kRows>;
  float kept[kKept][4];

  __device__ __forceinline__ void load(const float* weight, int size) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      const int column = 4 * (static_cast<int>(threadIdx.x) % kOfRow + j * kOfRow);
      if (column < size) load4(weight + column, kept[j]);
    }
  }
};

/// rows [kRows, size]: of num_rows what `load(row, column, to)` has, four at a time, normalised;
/// zeros behind them. kThreads / kRows threads a row. All of it is there behind a barrier.
template <typename T, int kRows, int kThreads, class Load>
__device__ __forceinline__ void make_normed_rows(const Load& load, int num_rows, int size,
                                                 const NormWeights<kRows, kThreads>& weights,
                                                 const float* weight, float epsilon, T* rows,
                                                 float (&sums)[kThreads / 32]) {
  constexpr int kOfRow = kThreads / kRows, kKept = kNormKept<kRows>;
  const int row = static_cast<int>(threadIdx.x) / kOfRow;
  const int first = 4 * (static_cast<int>(threadIdx.x) % kOfRow);
  const bool inside = row < num_rows;
  float kept[kKept][4] = {};
  float squares = 0;
  const auto add = [&](const float(&v)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) squares += v[j] * v[j];
  };
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int column = first + 4 * j * kOfRow;
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
  const auto put = [&](int column, float(&v)[4], const float(&by)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] *= by[j] * scale;
    store4(rows + row * size + column, v);
  };
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int column = first + 4 * j * kOfRow;
    if (column < size) put(column, kept[j], weights.kept[j]);
  }
  for (int column = first + 4 * kKept * kOfRow; column < size; column += 4 * kOfRow) {
    float v[4] = {}, by[4];
    if (inside) load(row, column, v);
    load4(weight + column, by);
    put(column, v, by);
  }
}

/// What attend() leaves.
struct Attended {
  const void* mixed = nullptr;  ///< One split: [rows, size] compute type; more:
  const float* parts = nullptr;
  const float* stats = nullptr;
  int splits = 1, heads = 0;
};

/// rows [kRows, size]: of num_rows what attention has left, zeros behind them. `shares`: room for
/// [num_rows, heads, splits] where there are splits.
template <typename T, int kRows, int kThreads>
__device__ __forceinline__ void make_attended_rows(const Attended& from, int num_rows, int size,
                                                   T* rows, float* shares) {
  const int splits = from.splits, count = num_rows * size;
  const int thread = static_cast<int>(threadIdx.x);
  if (splits == 1) {
    const T* const mixed = static_cast<const T*>(from.mixed);
    for (int i = thread; i < kRows * size; i += kThreads) rows[i] = i < count ? mixed[i] : T(0.0F);
    return;
  }
  for (int i = thread; i < num_rows * from.heads; i += kThreads) {
    const float* const stats = from.stats + 2 * i * splits;
    float most = -INFINITY, total = 0;
    for (int s = 0; s < splits; ++s) most = fmaxf(most, stats[2 * s]);
    for (int s = 0; s < splits; ++s) total += exp2f(stats[2 * s] - most) * stats[2 * s + 1];
    for (int s = 0; s < splits; ++s) {
      shares[i * splits + s] = exp2f(stats[2 * s] - most) / total;
    }
  }
  __syncthreads();
  const int dim = size / from.heads;
  for (int i = thread; i < kRows * size; i += kThreads) {
    float sum = 0;
    if (i < count) {
      const int head = i / dim;  // of all rows
      const float* const part = from.parts + head * splits * dim + i % dim;
      // A split that is beyond the last position has the share 0, and zeros.
#pragma unroll 4
      for (int s = 0; s < splits; ++s) sum += shares[head * splits + s] * part[s * dim];
    }
    store(rows + i, sum);
  }
}

}  // namespace switchyard::models::gpu
