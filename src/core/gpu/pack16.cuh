#pragma once

// Sixteen bytes of f32, bf16 or f16 as floats and back: what memory-bound kernels move at a time.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard {

template <DType kType>
struct ElementOf;
template <>
struct ElementOf<DType::kF32> {
  using Type = float;
};
template <>
struct ElementOf<DType::kBF16> {
  using Type = __nv_bfloat16;
};
template <>
struct ElementOf<DType::kF16> {
  using Type = __half;
};
template <DType kType>
using Element = typename ElementOf<kType>::Type;

/// Elements in 16 bytes.
template <typename T>
inline constexpr int kPack = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ void unpack16(const int4& bits, float (&x)[4], float /*type*/) {
  x[0] = __int_as_float(bits.x);
  x[1] = __int_as_float(bits.y);
  x[2] = __int_as_float(bits.z);
  x[3] = __int_as_float(bits.w);
}

__device__ __forceinline__ void unpack16(const int4& bits, float (&x)[8], __nv_bfloat16 /*type*/) {
  const int words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __int_as_float(words[i] << 16);
    x[2 * i + 1] = __int_as_float(words[i] & static_cast<int>(0xffff0000U));
  }
}

__device__ __forceinline__ void unpack16(const int4& bits, float (&x)[8], __half /*type*/) {
  const int words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

/// Two floats as one word of 16-bit values, rounded to nearest even; `a` is the lower half.
__device__ __forceinline__ std::uint32_t pack_pair(float a, float b, __nv_bfloat16 /*type*/) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

__device__ __forceinline__ std::uint32_t pack_pair(float a, float b, __half /*type*/) {
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

/// The floats of sixteen bytes, rounded to T.
__device__ __forceinline__ int4 pack16(const float (&x)[4], float /*type*/) {
  return make_int4(__float_as_int(x[0]), __float_as_int(x[1]), __float_as_int(x[2]),
                   __float_as_int(x[3]));
}

template <typename T>
__device__ __forceinline__ int4 pack16(const float (&x)[8], T type) {
  return make_int4(
      static_cast<int>(pack_pair(x[0], x[1], type)), static_cast<int>(pack_pair(x[2], x[3], type)),
      static_cast<int>(pack_pair(x[4], x[5], type)), static_cast<int>(pack_pair(x[6], x[7], type)));
}

/// Reads kCount (4 or 8) floats from an address that is a multiple of 16 bytes.
template <int kCount>
__device__ __forceinline__ void load_floats(const float* from, float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}

/// Four values of 16 bits as floats, from a multiple of 8 bytes.
__device__ __forceinline__ void load_floats(const __nv_bfloat16* from, float (&x)[4]) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  x[0] = __uint_as_float(words.x << 16), x[1] = __uint_as_float(words.x & 0xffff0000U);
  x[2] = __uint_as_float(words.y << 16), x[3] = __uint_as_float(words.y & 0xffff0000U);
}
__device__ __forceinline__ void load_floats(const __half* from, float (&x)[4]) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&words.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&words.y));
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

/// Writes kCount (4 or 8) floats as T to `to`, aligned to what they take, at most 16 bytes.
template <int kCount>
__device__ __forceinline__ void store_floats(float* to, const float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void store_floats(T* to, const float (&x)[kCount]) {
  std::uint32_t words[kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) words[i] = pack_pair(x[2 * i], x[2 * i + 1], T{});
  if constexpr (kCount == 8) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
}

}  // namespace switchyard
