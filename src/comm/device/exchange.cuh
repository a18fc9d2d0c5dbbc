#pragma once

// Parts of the exchange's kernels: flags between GPUs, bounded waits, and rows in pieces of 1024
// values, of which a lane of a warp holds 8 at a time.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "comm/device/exchange.hpp"
#include "core/gpu/cuda_device.hpp"

namespace switchyard {

inline constexpr int kExchangeThreads = 512;
inline constexpr int kExchangeWarps = kExchangeThreads / 32;
inline constexpr int kPieceSteps =
    8;  // vectors of 8 values that a lane holds: 32 registers of bf16
inline constexpr int kPieceValues = kPieceSteps * 32 * 8;

// ---- pieces of rows ----------------------------------------------------------------------------

/// A piece of a token, without a division at each step.
struct Item {
  int token, piece;

  /// `number` counts the pieces of all tokens, `count` those of one.
  __device__ __forceinline__ Item(int number, int count)
      : token(number / count), piece(number % count) {}
  __device__ __forceinline__ void advance(Item by, int count) {
    token += by.token;
    piece += by.piece;
    if (piece >= count) {
      piece -= count;
      ++token;
    }
  }
};

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
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/// What is known to be written to global memory, here or on another GPU, is seen by this thread's
/// bulk copies, and what they have done by others.
__device__ __forceinline__ void fence_bulk_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
#endif
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
    store_release_system(p.window[to] + p.places.abort_flag(), 1);
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
    if (load_relaxed_system(own + p.places.abort_flag()) != 0) {
      give_up(p, 2, phase, from, target, seen);
      return false;
    }
    if (nanoseconds() - start > p.timeout_ns) {
      give_up(p, 1, phase, from, target, seen);
      return false;
    }
  }
}

/// Of id in [0, E). @param args  With the ranks' first experts.
template <typename Params>
__device__ __forceinline__ int owner_of(const Params& args, std::int32_t id) {
  int owner = 0;
#pragma unroll
  for (int r = 1; r < kMaxDeviceRanks; ++r) owner += id >= args.first_expert[r] ? 1 : 0;
  return owner;
}

template <typename Params>
void launch_exchange(void (*kernel)(Params), const ExchangeLaunch& launch, std::size_t shared_bytes,
                     const Params& params) {
  const dim3 blocks(static_cast<unsigned>(launch.ctas));
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  if (launch.overlapped) {
    return launch_overlapped(kernel, blocks, kExchangeThreads, shared_bytes, stream, params);
  }
  kernel<<<blocks, kExchangeThreads, shared_bytes, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
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

/// The largest magnitude of 8 values; a NaN is not looked at.
__device__ __forceinline__ float largest_of(const Eight<float>& v) {
  float largest = 0.0F;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(__uint_as_float(v.word[i])));
  return largest;
}
/// 16-bit values in pairs, before they are widened.
template <typename Pair, typename T>
__device__ __forceinline__ Pair largest_pair(const Eight<T>& v) {
  Pair largest;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t magnitude = v.word[i] & 0x7fff7fffU;
    Pair pair;
    memcpy(&pair, &magnitude, sizeof(pair));
    largest = i == 0 ? pair : __hmax2(largest, pair);
  }
  return largest;
}
__device__ __forceinline__ float largest_of(const Eight<__nv_bfloat16>& v) {
  const float2 both = __bfloat1622float2(largest_pair<__nv_bfloat162>(v));
  return fmaxf(both.x, both.y);
}
__device__ __forceinline__ float largest_of(const Eight<__half>& v) {
  const float2 both = __half22float2(largest_pair<__half2>(v));
  return fmaxf(both.x, both.y);
}

/// From kSteps values a lane to one: lane l of a half warp gets the maximum of value l / 2 of 8
/// over the half's 16 lanes. Each round halves what a lane holds, so 8 maxima cost 8 shuffles.
template <int kSteps>
__device__ __forceinline__ float spread_maximum(const float (&of)[kSteps]) {
  static_assert(kSteps <= 8);
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  float held[8];
#pragma unroll
  for (int step = 0; step < 8; ++step) held[step] = step < kSteps ? of[step] : 0.0F;
#pragma unroll
  for (int width = 4; width > 0; width /= 2) {
    const bool upper = (lane & 2 * width) != 0;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float sent = upper ? held[i] : held[i + width];
      const float kept = upper ? held[i + width] : held[i];
      held[i] = fmaxf(kept, __shfl_xor_sync(0xffffffffU, sent, 2 * width));
    }
  }
  return fmaxf(held[0], __shfl_xor_sync(0xffffffffU, held[0], 1));
}

/// Encodes kSteps vectors a lane for the wire; all lanes of the warp must come here. On an fp8 wire
/// vector s of the 16 lanes of half warp h are the 128 values of block 2 s + h, which share one
/// scale (comm/wire.hpp has the rule): lanes 16 h + 2 s and the next divide for it, and return it.
template <typename Wire, typename In, int kSteps>
__device__ __forceinline__ float encode(const Eight<In> (&in)[kSteps], Eight<Wire> (&out)[kSteps]) {
  float inverse = 1.0F;
  float scale = 1.0F;
  if constexpr (kIsFp8<Wire>) {
    float largest[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) largest[step] = largest_of(in[step]);
    const float of_block = fmaxf(0x1p-100F, spread_maximum(largest));
    inverse = __fdiv_rn(448.0F, of_block);
    scale = __fdiv_rn(of_block, 448.0F);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    float factor = 1.0F;
    if constexpr (kIsFp8<Wire>) {
      const auto half = static_cast<int>(threadIdx.x) & 16;
      factor = __shfl_sync(0xffffffffU, inverse, half + 2 * step);
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float2 v = get_pair(in[step], pair);
      if constexpr (kIsFp8<Wire>) v = {__fmul_rn(v.x, factor), __fmul_rn(v.y, factor)};
      set_pair(out[step], pair, v);
    }
  }
  return scale;
}

/// The block of this lane's scale among those of a piece, or -1: the lane has none to store.
__device__ __forceinline__ int block_of_lane() {
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  return lane % 2 == 0 ? lane % 16 + lane / 16 : -1;
}

}  // namespace switchyard
