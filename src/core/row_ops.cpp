// Conversions and fused multiply-adds along rows. Each body is written once and compiled twice:
// for the baseline, and for AVX2 + FMA + F16C where gcc vectorises it, bf16 for AVX-512 too (by
// integers: its own conversion makes subnormal numbers 0); f16 goes through the hardware's
// conversions there, which round as core/half.hpp does.
#include "core/row_ops.hpp"

#include <algorithm>
#include <cstring>

#include "core/cpu/multi_isa.hpp"
#include "core/half.hpp"

#ifdef SWITCHYARD_X86
#include <immintrin.h>
#endif

namespace switchyard::row_ops {
namespace {

#define SWITCHYARD_INLINE inline __attribute__((always_inline))

SWITCHYARD_INLINE std::uint16_t load_bits(const std::byte* in, std::int64_t i) {
  std::uint16_t bits;
  std::memcpy(&bits, in + 2 * i, sizeof bits);
  return bits;
}

SWITCHYARD_INLINE void widen_bf16(const std::byte* in, float* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = bf16_to_float(load_bits(in, i));
}

SWITCHYARD_INLINE void narrow_bf16(const float* in, std::uint16_t* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = float_to_bf16(in[i]);
}

SWITCHYARD_INLINE void accumulate_f32(float weight, const float* row, float* acc, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) acc[i] = __builtin_fmaf(weight, row[i], acc[i]);
}

SWITCHYARD_INLINE void accumulate_bf16(float weight, const std::uint16_t* row, float* acc,
                                       std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    acc[i] = __builtin_fmaf(weight, bf16_to_float(row[i]), acc[i]);
  }
}

#ifdef SWITCHYARD_X86
#define SWITCHYARD_AVX2 SWITCHYARD_TARGET("avx2,fma,f16c")

SWITCHYARD_AVX2 void widen_avx2(DType dtype, const std::byte* in, float* out, std::int64_t n) {
  if (dtype == DType::kBF16) return widen_bf16(in, out, n);
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 2 * i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(bits));
  }
  for (; i < n; ++i) out[i] = f16_to_float(load_bits(in, i));
}

SWITCHYARD_AVX2 void narrow_avx2(DType dtype, const float* in, std::uint16_t* out, std::int64_t n) {
  if (dtype == DType::kBF16) return narrow_bf16(in, out, n);
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i bits =
        _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), bits);
  }
  for (; i < n; ++i) out[i] = float_to_f16(in[i]);
}

SWITCHYARD_AVX2 void accumulate_avx2(DType dtype, float weight, const void* row, float* acc,
                                     std::int64_t n) {
  if (dtype == DType::kF32) return accumulate_f32(weight, static_cast<const float*>(row), acc, n);
  const auto* in = static_cast<const std::uint16_t*>(row);
  if (dtype == DType::kBF16) return accumulate_bf16(weight, in, acc, n);
  const __m256 factor = _mm256_set1_ps(weight);
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 y = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
    _mm256_storeu_ps(acc + i, _mm256_fmadd_ps(factor, y, _mm256_loadu_ps(acc + i)));
  }
  for (; i < n; ++i) acc[i] = __builtin_fmaf(weight, f16_to_float(in[i]), acc[i]);
}

#define SWITCHYARD_AVX512 SWITCHYARD_TARGET("avx512f,avx512bw,avx512dq,avx512vl")

SWITCHYARD_AVX512 void widen_bf16_avx512(const std::byte* in, float* out, std::int64_t n) {
  widen_bf16(in, out, n);
}

SWITCHYARD_AVX512 void narrow_bf16_avx512(const float* in, std::uint16_t* out, std::int64_t n) {
  narrow_bf16(in, out, n);
}

SWITCHYARD_AVX2 void add_avx2(const float* other, float* acc, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) acc[i] += other[i];
}
#endif

}  // namespace

void widen(DType dtype, const void* in, float* out, std::int64_t n) {
  if (n == 0) return;
  if (dtype == DType::kF32) {
    std::memcpy(out, in, static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  const auto* bytes = static_cast<const std::byte*>(in);
#ifdef SWITCHYARD_X86
  if (dtype == DType::kBF16 && has_avx512_bw_dq()) return widen_bf16_avx512(bytes, out, n);
  if (has_avx2()) return widen_avx2(dtype, bytes, out, n);
#endif
  if (dtype == DType::kBF16) return widen_bf16(bytes, out, n);
  for (std::int64_t i = 0; i < n; ++i) out[i] = f16_to_float(load_bits(bytes, i));
}

void narrow(DType dtype, const float* in, void* out, std::int64_t n) {
  if (dtype == DType::kF32) {
    std::copy_n(in, n, static_cast<float*>(out));
    return;
  }
  auto* bits = static_cast<std::uint16_t*>(out);
#ifdef SWITCHYARD_X86
  if (dtype == DType::kBF16 && has_avx512_bw_dq()) return narrow_bf16_avx512(in, bits, n);
  if (has_avx2()) return narrow_avx2(dtype, in, bits, n);
#endif
  if (dtype == DType::kBF16) return narrow_bf16(in, bits, n);
  for (std::int64_t i = 0; i < n; ++i) bits[i] = float_to_f16(in[i]);
}

void convert(DType from, const void* in, DType to, void* out, std::int64_t n) {
  if (n == 0) return;
  if (from == to) {
    std::memcpy(out, in, static_cast<std::size_t>(n * size_of(to)));
    return;
  }
  if (to == DType::kF32) return widen(from, in, static_cast<float*>(out), n);
  constexpr std::int64_t kBlock = 512;
  float block[kBlock];  // stays in the first cache level between the two steps
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, n - begin);
    widen(from, static_cast<const std::byte*>(in) + begin * size_of(from), block, count);
    narrow(to, block, static_cast<std::byte*>(out) + begin * size_of(to), count);
  }
}

void accumulate(DType dtype, float weight, const void* row, float* acc, std::int64_t n) {
#ifdef SWITCHYARD_X86
  if (has_avx2()) return accumulate_avx2(dtype, weight, row, acc, n);
#endif
  if (dtype == DType::kF32) return accumulate_f32(weight, static_cast<const float*>(row), acc, n);
  const auto* bits = static_cast<const std::uint16_t*>(row);
  if (dtype == DType::kBF16) return accumulate_bf16(weight, bits, acc, n);
  for (std::int64_t i = 0; i < n; ++i)
    acc[i] = __builtin_fmaf(weight, f16_to_float(bits[i]), acc[i]);
}

void add(const float* other, float* acc, std::int64_t n) {
#ifdef SWITCHYARD_X86
  if (has_avx2()) return add_avx2(other, acc, n);
#endif
  for (std::int64_t i = 0; i < n; ++i) acc[i] += other[i];
}

void write_gradient(const float* in, DType dtype, void* out, std::int64_t n, bool accumulate) {
  if (!accumulate) return narrow(dtype, in, out, n);
  if (dtype == DType::kF32) return add(in, static_cast<float*>(out), n);
  constexpr std::int64_t kBlock = 512;
  float sums[kBlock];
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, n - begin);
    std::byte* place = static_cast<std::byte*>(out) + begin * size_of(dtype);
    widen(dtype, place, sums, count);
    add(in + begin, sums, count);
    narrow(dtype, sums, place, count);
  }
}

}  // namespace switchyard::row_ops
