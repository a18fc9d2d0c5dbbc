#pragma once

// Results that tell by themselves that they have come: before, every word of their places is a NaN
// that is never sent. Whoever reads them makes the places ready for the next time.

#include "comm/device/combine_parts.cuh"

namespace switchyard {

/// Sent in the place of kNoResult: a NaN of every wire type too.
inline constexpr std::uint32_t kOtherNan = 0x7fff7fff;

template <typename T>
__device__ __forceinline__ bool has_come(const Eight<T>& v) {
  bool here = true;
#pragma unroll
  for (int i = 0; i < Eight<T>::kWords; ++i) here = here && v.word[i] != kNoResult;
  return here;
}

template <typename T>
__device__ __forceinline__ void avoid_no_result(Eight<T>& v) {
#pragma unroll
  for (int i = 0; i < Eight<T>::kWords; ++i) {
    if (v.word[i] == kNoResult) v.word[i] = kOtherNan;
  }
}

/// Past the caches that other GPUs' stores do not reach.
__device__ __forceinline__ std::uint32_t load_word(const void* from) {
  std::uint32_t word;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}
template <typename T>
__device__ __forceinline__ Eight<T> load_arriving(const void* from) {
  Eight<T> v;
  if constexpr (Eight<T>::kWords == 2) {
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.word[0]), "=r"(v.word[1])
                 : "l"(from)
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < Eight<T>::kWords; i += 4) {
      asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.word[i]), "=r"(v.word[i + 1]), "=r"(v.word[i + 2]), "=r"(v.word[i + 3])
                   : "l"(static_cast<const std::uint32_t*>(from) + i)
                   : "memory");
    }
  }
  return v;
}

/// When a warp that waits for results gives up.
class Patience {
 public:
  /// All lanes; `missing`: a part that this lane waits for, or -1. False: the deadline has passed,
  /// or another rank has given up.
  __device__ __forceinline__ bool go_on(const DeviceExchangeParams& p, int missing) {
    if (++looks_ % 64 != 0) return true;
    const std::uint64_t now = nanoseconds();
    if (start_ == 0) start_ = now;
    const bool told = load_relaxed_system(p.window[p.rank] + p.places.abort_flag()) != 0;
    if (!__any_sync(0xffffffffU, told || now - start_ > p.timeout_ns)) return true;
    const int from = __reduce_max_sync(0xffffffffU, missing) >> p.group_bits;
    if (threadIdx.x % 32 == 0) give_up(p, told ? 2 : 1, DevicePhase::kResults, from, 1, 0);
    return false;
  }

 private:
  unsigned looks_ = 0;
  std::uint64_t start_ = 0;
};

/// Some vectors of a token's parts; those that are not to come are there from the start.
template <typename Wire, int kParts, int kSteps>
struct Parts {
  Part<Wire> part[kSteps][kParts];
  Wire* values[kParts];          // the lane's first; null: no such part
  std::uint32_t* scale[kParts];  // of those, on an 8-bit wire
  int steps;                     // that this lane has

  __device__ __forceinline__ Parts(const DeviceExchangeParams& p, std::int64_t token,
                                   std::int64_t first) {
    steps = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) steps += first + step * 256 < p.layout.hidden ? 1 : 0;
#pragma unroll
    for (int r = 0; r < kParts; ++r) {
      const int rank = r >> p.group_bits;
      const std::int32_t slot =
          rank < p.layout.num_ranks ? p.slot[token * p.layout.num_ranks + rank] : -1;
      const std::int64_t place =
          ((rank * p.max_tokens + slot) << p.group_bits) + r - (rank << p.group_bits);
      std::byte* const window = p.window[p.rank];
      values[r] =
          slot < 0 ? nullptr : reinterpret_cast<Wire*>(window + p.places.result(place)) + first;
      scale[r] = nullptr;
      if constexpr (kIsFp8<Wire>) {
        scale[r] = reinterpret_cast<std::uint32_t*>(window + p.places.result_scale(place)) +
                   first / kScaleBlock;
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const std::uint32_t word = slot >= 0 && step < steps ? kNoResult : 0;
#pragma unroll
        for (int i = 0; i < Eight<Wire>::kWords; ++i) part[step][r].values.word[i] = word;
        part[step][r].scale = __uint_as_float(word);
      }
    }
  }

  [[nodiscard]] __device__ __forceinline__ bool has(int step, int r) const {
    bool here = has_come(part[step][r].values);
    if constexpr (kIsFp8<Wire>) {
      here = here && __float_as_uint(part[step][r].scale) != kNoResult;
    }
    return here;
  }

  /// All lanes of the warp, until they have what they wait for. `early`: others of the block still
  /// send, so it looks less often. False: leave.
  __device__ __forceinline__ bool wait(const DeviceExchangeParams& p, bool early) {
    Patience patience;
    for (;;) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int r = 0; r < kParts; ++r) {
          if (has(step, r)) continue;
          part[step][r].values = load_arriving<Wire>(values[r] + step * 256);
          if constexpr (kIsFp8<Wire>) {
            part[step][r].scale = __uint_as_float(load_word(scale[r] + step * (256 / kScaleBlock)));
          }
        }
      }
      int missing = -1;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int r = 0; r < kParts; ++r) missing = has(step, r) ? missing : r;
      }
      if (__any_sync(0xffffffffU, missing >= 0) == 0) return true;
      if (!patience.go_on(p, missing)) return false;
      if (early) __nanosleep(250);
    }
  }

  /// Makes the places ready for the next time.
  __device__ __forceinline__ void forget() const {
    Eight<Wire> nothing;
#pragma unroll
    for (int i = 0; i < Eight<Wire>::kWords; ++i) nothing.word[i] = kNoResult;
#pragma unroll
    for (int r = 0; r < kParts; ++r) {
      if (values[r] == nullptr) continue;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step >= steps) continue;
        *reinterpret_cast<Eight<Wire>*>(values[r] + step * 256) = nothing;
        if constexpr (kIsFp8<Wire>) {
          if (threadIdx.x % 16 == 0) scale[r][step * (256 / kScaleBlock)] = kNoResult;
        }
      }
    }
  }
};

}  // namespace switchyard
