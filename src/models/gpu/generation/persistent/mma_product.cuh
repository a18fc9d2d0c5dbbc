#pragma once

// A product of several bf16 rows in a kernel that stays, by mma.sync: a block has some rows of
// weights, which its warps share by columns; what they have they add up in shared memory.

#include "models/gpu/generation/persistent/products.cuh"

namespace switchyard::models::gpu {

/// Rows of weights of a tile, tiles of a round, and blocks of 32 columns of a warp under way.
inline constexpr int kMmaRows = 16, kMmaTiles = 1, kMmaBlocks = 2;

/// What warps leave of a round; two rounds take turns.
struct MmaParts {
  float sum[2][kStepWarps][kMmaTiles][kMmaRows * kRowsOfStep];
};

/// As RowProduct.
class MmaProduct {
 public:
  __device__ __forceinline__ MmaProduct(const void* w, int in, int out, int num_rows,
                                        MmaParts& parts)
      : w_(static_cast<const int4*>(w)),
        parts_(parts),
        packs_(in / kPack<Bf16>),
        num_rows_(num_rows),
        own_(out) {}

  template <class Add>
  __device__ __forceinline__ void begin(const Add& add) {
    load(0, 0, ahead_);
    added_ = asked(0, add);
  }

  template <class Add, class Put>
  __device__ __forceinline__ void run(const Bf16* rows, const Add& add, const Put& put) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int4* const x =
        reinterpret_cast<const int4*>(rows) + lane / 4 * padded_packs(packs_) + lane % 4;
    int parity = 0;
#pragma unroll 1
    for (int base = 0; base < own_.count; base += kOfRound) {
      float sum[kMmaTiles][4] = {};
#pragma unroll 1
      for (int chunk = 0; chunk < packs_; chunk += kOfChunk) {
        Weights next;
        const bool last = chunk + kOfChunk >= packs_;
        load(last ? base + kOfRound : base, last ? 0 : chunk + kOfChunk, next);
#pragma unroll
        for (int b = 0; b < kMmaBlocks; ++b) {
          const int pack = pack_of(chunk, b);
          if (pack >= packs_) continue;  // of the whole warp
          const int4 of_x = x[pack + lane % 4 < packs_ ? pack : 0];
#pragma unroll
          for (int t = 0; t < kMmaTiles; ++t) {
            multiply_block(ahead_.w[t][b][0], ahead_.w[t][b][1], of_x, sum[t]);
          }
        }
        ahead_ = next;
      }
      auto& room = parts_.sum[parity];
      parity ^= 1;
#pragma unroll
      for (int t = 0; t < kMmaTiles; ++t) {
        float* const to = room[warp][t] + lane / 4 * kRowsOfStep + 2 * (lane % 4);
        *reinterpret_cast<float2*>(to) = {sum[t][0], sum[t][1]};
        *reinterpret_cast<float2*>(to + 8 * kRowsOfStep) = {sum[t][2], sum[t][3]};
      }
      __syncthreads();
      const int thread = static_cast<int>(threadIdx.x);
      if (is_own(base)) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < kStepWarps; ++w) total += (&room[w][0][0])[thread];
        put(thread % kRowsOfStep, own_.first + base + thread / kRowsOfStep, total + added_);
      }
      added_ = asked(base + kOfRound, add);
    }
  }

 private:
  static constexpr int kOfRound = kMmaTiles * kMmaRows;         ///< Rows of weights.
  static constexpr int kOfChunk = 4 * kMmaBlocks * kStepWarps;  ///< Packs.
  static_assert(kOfRound * kRowsOfStep <= kStepThreads);
  struct Weights {
    int4 w[kMmaTiles][kMmaBlocks][2];
  };

  /// First pack of a block: neighbouring ones are of neighbouring warps.
  static __device__ __forceinline__ int pack_of(int chunk, int b) {
    return chunk + 4 * (b * kStepWarps + static_cast<int>(threadIdx.x) / 32);
  }
  /// Whether this thread adds up a sum of the round from row `base` of the block's on.
  [[nodiscard]] __device__ __forceinline__ bool is_own(int base) const {
    const int thread = static_cast<int>(threadIdx.x);
    return thread < kOfRound * kRowsOfStep && thread % kRowsOfStep < num_rows_ &&
           base + thread / kRowsOfStep < own_.count;
  }
  template <class Add>
  [[nodiscard]] __device__ __forceinline__ float asked(int base, const Add& add) const {
    const int thread = static_cast<int>(threadIdx.x);
    return is_own(base) ? add(thread % kRowsOfStep, own_.first + base + thread / kRowsOfStep)
                        : 0.0F;
  }
  __device__ __forceinline__ void load(int base, int chunk, Weights& to) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int t = 0; t < kMmaTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = base + t * kMmaRows + 8 * half + lane / 4;
        const int4* const from = w_ + std::int64_t{own_.first + row} * packs_ + lane % 4;
#pragma unroll
        for (int b = 0; b < kMmaBlocks; ++b) {
          const int pack = pack_of(chunk, b);
          const bool there = row < own_.count && pack + lane % 4 < packs_;
          to.w[t][b][half] = there ? ptx::load_constant_16(from + pack) : int4{};
        }
      }
    }
  }

  const int4* w_;
  MmaParts& parts_;
  int packs_, num_rows_;
  OwnOutputs own_;
  float added_ = 0;
  Weights ahead_;
};

}  // namespace switchyard::models::gpu
