#pragma once

// What the kernels of the router product's way back on Hopper share: a ring of slots between the
// warp that loads and those that multiply, and how sums are stored.

#include <cstdint>

#include "core/gpu/pack16.cuh"
#include "core/gpu/ptx.cuh"
#include "core/gpu/wgmma.cuh"

namespace switchyard::router_backward::sm90 {

constexpr int kMultiplyThreads = 256;
constexpr int kThreads = kMultiplyThreads + 32;
constexpr int kBox = 64;  // rows, and values of a row
constexpr int kBoxBytes = kBox * kBox * 2;
constexpr int kWide = 256;  // columns of a warpgroup's product

/// Where a role is in a ring of slots.
struct Place {
  std::uint32_t slot = 0;
  std::uint32_t phase = 0;
  __device__ __forceinline__ void advance(std::uint32_t by, std::uint32_t slots) {
    slot += by;
    while (slot >= slots) {
      slot -= slots;
      phase ^= 1U;
    }
  }
};

/// Slots of shared memory, each with a barrier "full" and one "empty".
struct Ring {
  std::uint32_t data, barriers, slot_bytes, slots;

  [[nodiscard]] __device__ std::uint32_t slot(const Place& p) const {
    return data + p.slot * slot_bytes;
  }
  [[nodiscard]] __device__ std::uint32_t full(const Place& p) const {
    return barriers + p.slot * 16;
  }
  [[nodiscard]] __device__ std::uint32_t empty(const Place& p) const {
    return barriers + p.slot * 16 + 8;
  }
  /// One thread. @param readers  Warps that read a slot.
  __device__ void init(std::uint32_t readers) const {
    for (std::uint32_t i = 0; i < slots; ++i) {
      ptx::mbarrier_init(barriers + i * 16, 1);
      ptx::mbarrier_init(barriers + i * 16 + 8, readers);
    }
  }
  /// The loading thread: the slot is free, and `slot_bytes` will come.
  __device__ __forceinline__ void open(const Place& p) const {
    ptx::mbarrier_wait(empty(p), p.phase ^ 1U);
    ptx::mbarrier_arrive_expect(full(p), slot_bytes);
  }
  /// This warp has read the slot.
  __device__ __forceinline__ void release(const Place& p) const {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty(p));
  }
};

/// 64 x 256 sums of a warpgroup to rows of `stride` floats: those below `rows` and `columns`, a
/// multiple of 8. Neighbouring lanes exchange halves, so that each stores 16 bytes.
__device__ __forceinline__ void store_sums(float* out, std::int64_t stride, int rows, int columns,
                                           const float (&sums)[kWide / 2]) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int row = thread / 32 * 16 + thread % 32 / 4;
  const bool odd = thread % 2 != 0;
  // Even lanes end with four columns of the left block of eight, odd ones with four of the right.
  const int column = (odd ? 8 : 0) + thread % 4 / 2 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + half * 8;
    float* const to = out + r * stride + column;
#pragma unroll
    for (int pair = 0; pair < kWide / 16; ++pair) {
      const float* const left = sums + pair * 8 + half * 2;
      const float* const right = left + 4;
      const float give[2] = {odd ? left[0] : right[0], odd ? left[1] : right[1]};
      const float keep[2] = {odd ? right[0] : left[0], odd ? right[1] : left[1]};
      const float got[2] = {__shfl_xor_sync(0xffffffffU, give[0], 1),
                            __shfl_xor_sync(0xffffffffU, give[1], 1)};
      const float four[4] = {odd ? got[0] : keep[0], odd ? got[1] : keep[1], odd ? keep[0] : got[0],
                             odd ? keep[1] : got[1]};
      if (r < rows && pair * 16 + column < columns) {
        ptx::store_global_16(to + pair * 16, pack16(four, float{}));
      }
    }
  }
}

/// The compiler may not move reads of the sums above the wait for them.
__device__ __forceinline__ void hold(float (&sums)[kWide / 2]) {
#pragma unroll
  for (int i = 0; i < kWide / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

}  // namespace switchyard::router_backward::sm90
