#pragma once

// wgmma.mma_async with A in registers: a warpgroup multiplies 64 rows of A, which it holds as
// mma.sync has them (a warp 16 rows; m16n8k16, of bytes m16n8k32), by N columns of B in shared
// memory, described by wgmma_operand(). Sums lie as wgmma.cuh says.

#include <cstdint>

#include "core/gpu/wgmma.cuh"

namespace switchyard::ptx {

// clang-format off
#define SWITCHYARD_F8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
  "+f"(d[i + 6]), "+f"(d[i + 7])
#define SWITCHYARD_A4(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// TYPE: depth and types; TAIL: which way b lies, where the types admit two.
#define SWITCHYARD_WGMMA_A_N16(TYPE, TAIL, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %13, 0; " \
      "wgmma.mma_async.sync.aligned.m64n16" TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7 " \
      "}, {%8, %9, %10, %11}, %12, p, 1, 1" TAIL ";}" \
      : SWITCHYARD_F8(d, 0) \
      : SWITCHYARD_A4(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_A_N32(TYPE, TAIL, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %21, 0; " \
      "wgmma.mma_async.sync.aligned.m64n32" TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 " \
      "}, {%16, %17, %18, %19}, %20, p, 1, 1" TAIL ";}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8) \
      : SWITCHYARD_A4(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_A_N48(TYPE, TAIL, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %29, 0; " \
      "wgmma.mma_async.sync.aligned.m64n48" TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
      "%18, %19, %20, %21, %22, %23 " \
      "}, {%24, %25, %26, %27}, %28, p, 1, 1" TAIL ";}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16) \
      : SWITCHYARD_A4(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_A_N64(TYPE, TAIL, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %37, 0; " \
      "wgmma.mma_async.sync.aligned.m64n64" TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 " \
      "}, {%32, %33, %34, %35}, %36, p, 1, 1" TAIL ";}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), SWITCHYARD_F8(d, 24) \
      : SWITCHYARD_A4(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_A_N72(TYPE, TAIL, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %41, 0; " \
      "wgmma.mma_async.sync.aligned.m64n72" TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
      "%34, %35 " \
      "}, {%36, %37, %38, %39}, %40, p, 1, 1" TAIL ";}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), SWITCHYARD_F8(d, 24), \
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]) \
      : SWITCHYARD_A4(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_A_N80(TYPE, TAIL, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %45, 0; " \
      "wgmma.mma_async.sync.aligned.m64n80" TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
      "%34, %35, %36, %37, %38, %39 " \
      "}, {%40, %41, %42, %43}, %44, p, 1, 1" TAIL ";}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), SWITCHYARD_F8(d, 24), \
        SWITCHYARD_F8(d, 32) \
      : SWITCHYARD_A4(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_A_N96(TYPE, TAIL, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %53, 0; " \
      "wgmma.mma_async.sync.aligned.m64n96" TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47 " \
      "}, {%48, %49, %50, %51}, %52, p, 1, 1" TAIL ";}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), SWITCHYARD_F8(d, 24), \
        SWITCHYARD_F8(d, 32), SWITCHYARD_F8(d, 40) \
      : SWITCHYARD_A4(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_A_N128(TYPE, TAIL, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %69, 0; " \
      "wgmma.mma_async.sync.aligned.m64n128" TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 " \
      "}, {%64, %65, %66, %67}, %68, p, 1, 1" TAIL ";}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), SWITCHYARD_F8(d, 24), \
        SWITCHYARD_F8(d, 32), SWITCHYARD_F8(d, 40), SWITCHYARD_F8(d, 48), SWITCHYARD_F8(d, 56) \
      : SWITCHYARD_A4(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_A(TYPE, TAIL, d, a, b, accumulate) \
  if constexpr (kN == 16) SWITCHYARD_WGMMA_A_N16(TYPE, TAIL, d, a, b, accumulate); \
  else if constexpr (kN == 32) SWITCHYARD_WGMMA_A_N32(TYPE, TAIL, d, a, b, accumulate); \
  else if constexpr (kN == 48) SWITCHYARD_WGMMA_A_N48(TYPE, TAIL, d, a, b, accumulate); \
  else if constexpr (kN == 64) SWITCHYARD_WGMMA_A_N64(TYPE, TAIL, d, a, b, accumulate); \
  else if constexpr (kN == 72) SWITCHYARD_WGMMA_A_N72(TYPE, TAIL, d, a, b, accumulate); \
  else if constexpr (kN == 80) SWITCHYARD_WGMMA_A_N80(TYPE, TAIL, d, a, b, accumulate); \
  else if constexpr (kN == 96) SWITCHYARD_WGMMA_A_N96(TYPE, TAIL, d, a, b, accumulate); \
  else SWITCHYARD_WGMMA_A_N128(TYPE, TAIL, d, a, b, accumulate)
// clang-format on

template <int kN>
inline constexpr bool kWgmmaFromRegisters =
    kN == 16 || kN == 32 || kN == 48 || kN == 64 || kN == 72 || kN == 80 || kN == 96 || kN == 128;

/// d = a * b (+ d where `accumulate` is not 0) of bf16, 16 deep. What `a` holds must stay until a
/// wait. kTurnedB: b is described by wgmma_turned_operand().
template <int kN, bool kTurnedB = false>
__device__ __forceinline__ void wgmma_bf16_from_registers(float (&d)[kN / 2],
                                                          const std::uint32_t (&a)[4],
                                                          std::uint64_t b,
                                                          std::uint32_t accumulate) {
  static_assert(kWgmmaFromRegisters<kN>);
  if constexpr (kTurnedB) {
    SWITCHYARD_WGMMA_A("k16.f32.bf16.bf16", ", 1", d, a, b, accumulate);
  } else {
    SWITCHYARD_WGMMA_A("k16.f32.bf16.bf16", ", 0", d, a, b, accumulate);
  }
}

/// The same of a in e5m2 and b in e4m3, 32 deep: products are exact, sums keep 14 bits (see
/// reference/fp8.hpp).
template <int kN>
__device__ __forceinline__ void wgmma_e5m2_e4m3_from_registers(float (&d)[kN / 2],
                                                               const std::uint32_t (&a)[4],
                                                               std::uint64_t b,
                                                               std::uint32_t accumulate) {
  static_assert(kWgmmaFromRegisters<kN>);
  SWITCHYARD_WGMMA_A("k32.f32.e5m2.e4m3", "", d, a, b, accumulate);
}

#undef SWITCHYARD_WGMMA_A
#undef SWITCHYARD_WGMMA_A_N128
#undef SWITCHYARD_WGMMA_A_N96
#undef SWITCHYARD_WGMMA_A_N80
#undef SWITCHYARD_WGMMA_A_N72
#undef SWITCHYARD_WGMMA_A_N64
#undef SWITCHYARD_WGMMA_A_N48
#undef SWITCHYARD_WGMMA_A_N32
#undef SWITCHYARD_WGMMA_A_N16
#undef SWITCHYARD_A4
#undef SWITCHYARD_F8

}  // namespace switchyard::ptx
