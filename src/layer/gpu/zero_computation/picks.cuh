#pragma once

// What the kernels of zero-computation experts share: whose pick is what.

#include <cstdint>

#include "core/gpu/token_pieces.cuh"

namespace switchyard::zero_computation {

struct Picks {
  const std::int32_t* expert;  // [T, K]
  const float* weight;         // [T, K]
  const std::uint8_t* kept;    // [T, K] or null: all
  const float* constants;      // [C, 3, H] or null
  float* of_token;             // [T, K] a1 and
  float* of_constant;          // [T, K] a2 of constant experts, of others 0; null without them
  std::int64_t num_tokens, hidden;
  std::int32_t top_k;
  std::int32_t first, first_copy, first_zero, end;  // ids
};

__device__ __forceinline__ bool is_kept(const Picks& p, std::int64_t i) {
  return p.kept == nullptr || p.kept[i] != 0;
}
__device__ __forceinline__ bool is_one(const Picks& p, std::int32_t id) {
  return id >= p.first && id < p.end;
}
__device__ __forceinline__ bool is_constant(const Picks& p, std::int32_t id) {
  return id >= p.first && id < p.first_copy;
}
/// What pick `i` of an expert that is one counts of its token.
__device__ __forceinline__ float share_of_token(const Picks& p, std::int64_t i, std::int32_t id) {
  if (!is_kept(p, i) || id >= p.first_zero) return 0.0F;
  return id >= p.first_copy ? 1.0F : p.of_token[i];
}
/// Of constant expert `id` rows of W, 0 and 1, or v, 2.
__device__ __forceinline__ const float* constant_row(const Picks& p, std::int32_t id, int part) {
  return p.constants + (static_cast<std::int64_t>(id - p.first) * 3 + part) * p.hidden;
}

__device__ __forceinline__ float sum_of_warp(float sum) {
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, offset);
  return sum;
}

/// <row, a token of T at `at`>, by one warp; the same in all lanes.
template <typename T>
__device__ __forceinline__ float product_with(const float* row, const void* tokens, std::int64_t at,
                                              std::int64_t hidden) {
  float sum = 0.0F;
  for (std::int64_t h = threadIdx.x % 32 * kPack<T>; h < hidden; h += 32 * kPack<T>) {
    float x[kPack<T>], w[kPack<T>];
    load_token_values<T>(tokens, at + h, x);
    load_floats(row + h, w);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) sum = fmaf(x[i], w[i], sum);
  }
  return sum_of_warp(sum);
}

/// Calls work(token) for each token that is this warp's.
template <typename Work>
__device__ __forceinline__ void for_each_token(std::int64_t num_tokens, Work&& work) {
  const std::int64_t warps = std::int64_t{gridDim.x} * (kTokenThreads / 32);
  const std::int64_t warp = std::int64_t{blockIdx.x} * (kTokenThreads / 32) + threadIdx.x / 32;
  for (std::int64_t t = warp; t < num_tokens; t += warps) work(t);
}

/// Calls work(token, first value of this lane, piece) for each piece of each token that is this
/// warp's.
template <typename T, typename Work>
__device__ __forceinline__ void for_each_piece(std::int64_t num_tokens, std::int64_t hidden,
                                               Work&& work) {
  constexpr std::int64_t kValues = 32 * kPack<T>;
  const std::int64_t pieces = (hidden + kValues - 1) / kValues;
  for_each_token(num_tokens * pieces, [&](std::int64_t i) {
    work(i / pieces, i % pieces * kValues + threadIdx.x % 32 * kPack<T>, i % pieces);
  });
}

/// Threads that take 16 bytes each of tokens whose pieces are whole warps'.
inline std::int64_t threads_for_pieces(ConstRawMatrix tokens) {
  return tokens.rows * ((tokens.row_bytes() + 511) / 512) * 32;
}

}  // namespace switchyard::zero_computation
