#pragma once

// Parts of the exchange's kernels: flags between GPUs, bounded waits, and rows in pieces of 1024
// values, of which a lane of a warp holds 8 at a time.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "comm/device_exchange.hpp"

namespace switchyard {

inline constexpr int kExchangeThreads = 512;
inline constexpr int kExchangeWarps = kExchangeThreads / 32;
inline constexpr int kPieceSteps =
    8;  // vectors of 8 values that a lane holds: 32 registers of bf16
inline constexpr int kPieceValues = kPieceSteps * 32 * 8;

// ---- flags -------------------------------------------------------------------------------------

__device__ __forceinline__ std::uint64_t load_acquire_system(const std::byte* flag) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ std::uint64_t load_relaxed_system(const std::byte* flag) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void store_release_system(std::byte* flag, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ void add_release_system(std::byte* flag) {
  asm volatile("red.release.sys.global.add.u64 [%0], 1;" ::"l"(flag) : "memory");
}
__device__ __forceinline__ std::uint64_t nanoseconds() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

/// Makes all ranks leave; the first report of this rank stays.
static __device__ __noinline__ void give_up(const DeviceExchangeParams& p, std::uint32_t set,
                                            DevicePhase phase, int rank, std::uint64_t expected,
                                            std::uint64_t seen) {
  if (atomicCAS(&p.state->reported, 0U, 1U) == 0U) {
    p.failure->phase = phase;
    p.failure->rank = rank;
    p.failure->expected = expected;
    p.failure->seen = seen;
    __threadfence_system();
    *static_cast<volatile std::uint32_t*>(&p.failure->set) = set;
  }
  for (int to = 0; to < p.layout.num_ranks; ++to) {
    store_release_system(p.window[to] + p.layout.abort_flag(), 1);
  }
}

/// One thread waits until the flag at `offset` of its own window is at least `target`. False: the
/// deadline has passed or another rank has given up; then the whole block leaves.
__device__ inline bool wait_for(const DeviceExchangeParams& p, std::int64_t offset,
                                std::uint64_t target, DevicePhase phase, int from) {
  const std::byte* own = p.window[p.rank];
  std::uint64_t seen = load_acquire_system(own + offset);
  if (seen >= target) return true;
  const std::uint64_t start = nanoseconds();
  for (;;) {
#pragma unroll 1
    for (int look = 0; look < 64; ++look) {
      seen = load_acquire_system(own + offset);
      if (seen >= target) return true;
    }
    if (load_relaxed_system(own + p.layout.abort_flag()) != 0) {
      give_up(p, 2, phase, from, target, seen);
      return false;
    }
    if (nanoseconds() - start > p.timeout_ns) {
      give_up(p, 1, phase, from, target, seen);
      return false;
    }
  }
}

// ---- values ------------------------------------------------------------------------------------

template <typename T>
inline constexpr bool kIsFp8 = false;
template <>
inline constexpr bool kIsFp8<__nv_fp8_e4m3> = true;

/// 8 values of a type in registers, as the words that are loaded and stored: kept as 16-bit
/// elements they would be taken apart and packed again even where they are only copied.
template <typename T>
struct alignas(sizeof(T) == 1 ? 8 : 16) Eight {
  static constexpr int kWords = static_cast<int>(sizeof(T)) * 2;
  std::uint32_t word[kWords];
};

/// Values 2 * pair and 2 * pair + 1.
__device__ __forceinline__ float2 get_pair(const Eight<float>& v, int pair) {
  return {__uint_as_float(v.word[2 * pair]), __uint_as_float(v.word[2 * pair + 1])};
}
__device__ __forceinline__ float2 get_pair(const Eight<__nv_bfloat16>& v, int pair) {
  return {__uint_as_float(v.word[pair] << 16), __uint_as_float(v.word[pair] & 0xffff0000U)};
}
__device__ __forceinline__ float2 get_pair(const Eight<__half>& v, int pair) {
  __half2_raw raw;
  raw.x = static_cast<unsigned short>(v.word[pair]);
  raw.y = static_cast<unsigned short>(v.word[pair] >> 16);
  return __half22float2(__half2(raw));
}
__device__ __forceinline__ float2 get_pair(const Eight<__nv_fp8_e4m3>& v, int pair) {
  const auto bits = static_cast<__nv_fp8x2_storage_t>(v.word[pair / 2] >> (pair % 2 * 16));
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(bits, __NV_E4M3)));
}

__device__ __forceinline__ void set_pair(Eight<float>& v, int pair, float2 values) {
  v.word[2 * pair] = __float_as_uint(values.x);
  v.word[2 * pair + 1] = __float_as_uint(values.y);
}
__device__ __forceinline__ void set_pair(Eight<__nv_bfloat16>& v, int pair, float2 values) {
  const __nv_bfloat162_raw raw = __float22bfloat162_rn(values);
  v.word[pair] = raw.x | static_cast<std::uint32_t>(raw.y) << 16;
}
__device__ __forceinline__ void set_pair(Eight<__half>& v, int pair, float2 values) {
  const __half2_raw raw = __float22half2_rn(values);
  v.word[pair] = raw.x | static_cast<std::uint32_t>(raw.y) << 16;
}
/// Pairs in ascending order.
__device__ __forceinline__ void set_pair(Eight<__nv_fp8_e4m3>& v, int pair, float2 values) {
  const std::uint32_t bits = __nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, __NV_E4M3);
  v.word[pair / 2] = pair % 2 == 0 ? bits : v.word[pair / 2] | bits << 16;
}

/// Encodes 8 values for the wire. On an fp8 wire the 16 lanes of a half warp hold the 128 values of
/// one scale (comm/wire.hpp has the rule); all lanes of the warp must come here.
template <typename Wire, typename In>
__device__ __forceinline__ Eight<Wire> encode(const Eight<In>& in, float& scale) {
  Eight<Wire> out;
  float inverse = 1.0F;
  if constexpr (kIsFp8<Wire>) {
    float largest = 0x1p-100F;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float2 v = get_pair(in, pair);
      largest = fmaxf(largest, fmaxf(fabsf(v.x), fabsf(v.y)));
    }
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, distance));
    }
    inverse = __fdiv_rn(448.0F, largest);
    scale = __fdiv_rn(largest, 448.0F);
  }
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float2 v = get_pair(in, pair);
    if constexpr (kIsFp8<Wire>) v = {__fmul_rn(v.x, inverse), __fmul_rn(v.y, inverse)};
    set_pair(out, pair, v);
  }
  return out;
}

}  // namespace switchyard
