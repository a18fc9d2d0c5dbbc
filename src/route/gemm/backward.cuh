#pragma once

// Products of dlogits in f32 with tokens or gate on tensor cores, to fp32 accuracy: an f32 operand
// is the sum of three bf16 terms (f16: two), and of the terms' products those are summed that
// count, the smallest first. Products of dlogits with bf16 are exact.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/gpu/pack16.cuh"
#include "core/gpu/ptx.cuh"

namespace switchyard::router_backward {

constexpr int kThreads = 256;
constexpr int kDepth = 32;     // of the sum, in a stage
constexpr int kColumns = 128;  // of H, in a tile
constexpr int kLogitTerms = 3;

template <typename T>
constexpr int kTerms = std::is_same_v<T, __nv_bfloat16> ? 1
                       : std::is_same_v<T, __half>      ? 2
                                                        : 3;

struct ProductParams {
  const float* dlogits;  // [T, E]
  const void* factor;    // [E, H] gate, or [T, H] tokens
  float* out;            // [T, H], or [parts, E, H]
  std::int64_t num_tokens;
  std::int32_t num_experts, hidden;
  std::int32_t part_tokens;  // of dgate: multiple of kDepth
  bool vector_rows;          // of dlogits: whole 16 bytes
};

/// kOfTokens: dtokens, a tile of kRows tokens, summed over experts; else dgate, a tile of kRows
/// experts, summed over tokens. Eight warps, kWarpRows of them along the rows.
template <typename Factor_, int kRows_, bool kOfTokens_>
struct Tile {
  using Factor = Factor_;
  static constexpr int kRows = kRows_;
  static constexpr bool kOfTokens = kOfTokens_;
  static constexpr int kWarpRows = kRows == 16 ? 1 : 2;
  static constexpr int kMmaRows = kRows / kWarpRows / 16;  // of a warp
  static constexpr int kMmaColumns = kColumns / (8 / kWarpRows) / 8;
  // dlogits as they lie in memory.
  static constexpr int kLogitRows = kOfTokens ? kRows : kDepth;
  static constexpr int kLogitColumns = kOfTokens ? kDepth : kRows;
  // 16 bytes more: the rows of an ldmatrix meet no bank twice.
  static constexpr int kLogitStride = kLogitColumns * 2 + 16;  // bytes
  static constexpr int kFactorStride = kColumns * 2 + 16;
  static constexpr int kLogitBytes = kLogitRows * kLogitStride;
  static constexpr int kFactorBytes = kDepth * kFactorStride;
  static constexpr int kStageBytes = kLogitTerms * kLogitBytes + kTerms<Factor> * kFactorBytes;
};

/// Writes kCount floats as bf16 terms, a term's plane `plane_bytes` after the last one's.
template <int kPlanes, int kCount, typename Bytes>
__device__ __forceinline__ void store_terms(std::byte* to, Bytes plane_bytes, float (&x)[kCount]) {
#pragma unroll
  for (int term = 0; term < kPlanes; ++term) {
    std::uint32_t words[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      words[i / 2] = pack_pair(x[i], x[i + 1], __nv_bfloat16{});
      x[i] -= __uint_as_float(words[i / 2] << 16);
      x[i + 1] -= __uint_as_float(words[i / 2] & 0xffff0000U);
    }
    std::byte* const at = to + term * plane_bytes;
    if constexpr (kCount == 8) {
      *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
    }
  }
}

/// A stage's part of dlogits on its way from memory to shared memory.
template <typename Tile>
class LogitPieces {
 public:
  /// Rows below `row_end` from `row` on, columns from `column` on; the rest is 0.
  __device__ __forceinline__ void load(const ProductParams& p, std::int64_t row,
                                       std::int64_t row_end, int column) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = static_cast<int>(threadIdx.x) + i * kThreads;
      const std::int64_t r = row + piece / kPerRow;
      const int c = column + piece % kPerRow * 4;
      x_[i] = make_float4(0, 0, 0, 0);
      if (piece >= kAll || r >= row_end || c >= p.num_experts) continue;
      const float* const from = p.dlogits + r * p.num_experts + c;
      if (p.vector_rows) {
        x_[i] = *reinterpret_cast<const float4*>(from);
        continue;
      }
      x_[i].x = from[0];
      if (c + 1 < p.num_experts) x_[i].y = from[1];
      if (c + 2 < p.num_experts) x_[i].z = from[2];
      if (c + 3 < p.num_experts) x_[i].w = from[3];
    }
  }
  __device__ __forceinline__ void store(std::byte* to) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = static_cast<int>(threadIdx.x) + i * kThreads;
      if (piece >= kAll) continue;
      float x[4] = {x_[i].x, x_[i].y, x_[i].z, x_[i].w};
      store_terms<kLogitTerms>(to + piece / kPerRow * Tile::kLogitStride + piece % kPerRow * 8,
                               Tile::kLogitBytes, x);
    }
  }

 private:
  static constexpr int kPerRow = Tile::kLogitColumns / 4;
  static constexpr int kAll = Tile::kLogitRows * kPerRow;
  static constexpr int kPieces = (kAll + kThreads - 1) / kThreads;
  float4 x_[kPieces];
};

/// The same of tokens or gate: kDepth rows of kColumns.
template <typename Tile>
class FactorPieces {
 public:
  __device__ __forceinline__ void load(const ProductParams& p, std::int64_t row,
                                       std::int64_t row_end, int column) {
    const Factor* const data = static_cast<const Factor*>(p.factor);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = static_cast<int>(threadIdx.x) + i * kThreads;
      const std::int64_t r = row + piece / kPerRow;
      const int c = column + piece % kPerRow * kPack<Factor>;
      const bool inside = r < row_end && c < p.hidden;
      bits_[i] = inside ? *reinterpret_cast<const int4*>(data + r * p.hidden + c) : int4{};
    }
  }
  __device__ __forceinline__ void store(std::byte* to) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = static_cast<int>(threadIdx.x) + i * kThreads;
      std::byte* const at =
          to + piece / kPerRow * Tile::kFactorStride + piece % kPerRow * kPack<Factor> * 2;
      if constexpr (kTerms<Factor> == 1) {
        *reinterpret_cast<int4*>(at) = bits_[i];
      } else {
        float x[kPack<Factor>];
        unpack16(bits_[i], x, Factor{});
        store_terms<kTerms<Factor>>(at, Tile::kFactorBytes, x);
      }
    }
  }

 private:
  using Factor = typename Tile::Factor;
  static constexpr int kPerRow = kColumns / kPack<Factor>;
  static constexpr int kPieces = kDepth * kPerRow / kThreads;
  int4 bits_[kPieces];
};

/// Multiplies one stage.
template <typename Tile>
__device__ __forceinline__ void multiply(std::uint32_t stage, int warp_row, int warp_column,
                                         float (&acc)[Tile::kMmaRows][Tile::kMmaColumns][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Of the four 8 x 8 matrices of an ldmatrix: lanes 8-15 address 8 rows below, 16-31 8 columns on
  // (transposed rows of dlogits: the other way about).
  const int low = lane % 16;
  const int high = lane / 16 * 8;
  const int logit_row = Tile::kOfTokens ? warp_row + low : lane % 8 + high;
  const int logit_column = Tile::kOfTokens ? high : warp_row + lane / 8 % 2 * 8;
  const std::uint32_t logits =
      stage + static_cast<std::uint32_t>(logit_row * Tile::kLogitStride + logit_column * 2);
  const std::uint32_t factors =
      stage + static_cast<std::uint32_t>(kLogitTerms * Tile::kLogitBytes +
                                         low * Tile::kFactorStride + (warp_column + high) * 2);
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
#pragma unroll
    for (int total = kLogitTerms - 1; total >= 0; --total) {  // the smallest products first
#pragma unroll
      for (int term = 0; term < kTerms<typename Tile::Factor>; ++term) {
        if (total - term < 0) continue;
        std::uint32_t b[Tile::kMmaColumns / 2][4];
#pragma unroll
        for (int n = 0; n < Tile::kMmaColumns / 2; ++n) {
          ptx::ldmatrix_x4_transposed(
              b[n], factors + static_cast<std::uint32_t>(term * Tile::kFactorBytes +
                                                         k * Tile::kFactorStride + n * 32));
        }
#pragma unroll
        for (int m = 0; m < Tile::kMmaRows; ++m) {
          const std::uint32_t plane =
              logits + static_cast<std::uint32_t>((total - term) * Tile::kLogitBytes);
          std::uint32_t a[4];
          if constexpr (Tile::kOfTokens) {
            ptx::ldmatrix_x4(
                a, plane + static_cast<std::uint32_t>(m * 16 * Tile::kLogitStride + k * 2));
          } else {
            ptx::ldmatrix_x4_transposed(
                a, plane + static_cast<std::uint32_t>(k * Tile::kLogitStride + m * 32));
          }
#pragma unroll
          for (int n = 0; n < Tile::kMmaColumns; ++n) {
            ptx::mma_bf16(acc[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
          }
        }
      }
    }
  }
}

template <typename Tile>
__global__ void __launch_bounds__(kThreads)
    product_kernel(const __grid_constant__ ProductParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp % Tile::kWarpRows * Tile::kMmaRows * 16;
  const int warp_column = warp / Tile::kWarpRows * Tile::kMmaColumns * 8;
  const int column = static_cast<int>(blockIdx.x) * kColumns;
  const std::int64_t row = std::int64_t{blockIdx.y} * Tile::kRows;
  const std::int64_t rows = Tile::kOfTokens ? p.num_tokens : p.num_experts;
  const std::int64_t part = blockIdx.z;
  const std::int64_t begin = Tile::kOfTokens ? 0 : part * p.part_tokens;
  const std::int64_t end =
      Tile::kOfTokens ? std::int64_t{p.num_experts} : min(p.num_tokens, begin + p.part_tokens);

  LogitPieces<Tile> logits;
  FactorPieces<Tile> factors;
  const auto load = [&](std::int64_t at) {
    if constexpr (Tile::kOfTokens) {
      logits.load(p, row, p.num_tokens, static_cast<int>(at));
    } else {
      logits.load(p, at, end, static_cast<int>(row));
    }
    factors.load(p, at, end, column);
  };
  const auto store = [&](int stage) {
    logits.store(shared + stage * Tile::kStageBytes);
    factors.store(shared + stage * Tile::kStageBytes + kLogitTerms * Tile::kLogitBytes);
  };

  float acc[Tile::kMmaRows][Tile::kMmaColumns][4] = {};
  load(begin);
  store(0);
  int stage = 0;
  for (std::int64_t at = begin; at < end; at += kDepth) {
    __syncthreads();
    const bool more = at + kDepth < end;
    if (more) load(at + kDepth);
    multiply<Tile>(ptx::shared_address(shared + stage * Tile::kStageBytes), warp_row, warp_column,
                   acc);
    stage ^= 1;
    if (more) store(stage);
  }

#pragma unroll
  for (int m = 0; m < Tile::kMmaRows; ++m) {
#pragma unroll
    for (int n = 0; n < Tile::kMmaColumns; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int64_t r = row + warp_row + m * 16 + lane / 4 + half * 8;
        const int c = column + warp_column + n * 8 + lane % 4 * 2;
        if (r >= rows || c >= p.hidden) continue;
        *reinterpret_cast<float2*>(p.out + (part * rows + r) * p.hidden + c) =
            make_float2(acc[m][n][half * 2], acc[m][n][half * 2 + 1]);
      }
    }
  }
}

}  // namespace switchyard::router_backward
