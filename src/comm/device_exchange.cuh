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
__device__ inline void give_up(const DeviceExchangeParams& p, std::uint32_t set, DevicePhase phase,
                               int rank, std::uint64_t expected, std::uint64_t seen) {
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

/// 8 values of a type in registers.
template <typename T>
struct alignas(sizeof(T) * 8 < 16 ? sizeof(T) * 8 : 16) Eight {
  T value[8];
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_fp8_e4m3 v) { return static_cast<float>(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}

template <typename T>
inline constexpr bool kIsFp8 = false;
template <>
inline constexpr bool kIsFp8<__nv_fp8_e4m3> = true;

/// Encodes 8 values for the wire. On an fp8 wire the 16 lanes of a half warp hold the 128 values of
/// one scale (comm/wire.hpp has the rule); all lanes of the warp must come here.
template <typename Wire, typename In>
__device__ __forceinline__ Eight<Wire> encode(const Eight<In>& in, float& scale) {
  Eight<Wire> out;
  if constexpr (kIsFp8<Wire>) {
    float largest = 0x1p-100F;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(to_float(in.value[i])));
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, distance));
    }
    const float inverse = __fdiv_rn(448.0F, largest);
    scale = __fdiv_rn(largest, 448.0F);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 pair = {__fmul_rn(to_float(in.value[i]), inverse),
                           __fmul_rn(to_float(in.value[i + 1]), inverse)};
      const __nv_fp8x2_storage_t bits = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
      out.value[i].__x = static_cast<__nv_fp8_storage_t>(bits & 0xffU);
      out.value[i + 1].__x = static_cast<__nv_fp8_storage_t>(bits >> 8);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) out.value[i] = from_float<Wire>(to_float(in.value[i]));
  }
  return out;
}
}  // namespace switchyard
