#pragma once

// wgmma.mma_async with A in registers: a warpgroup multiplies 64 x 16 of A, which it holds as
// mma.sync's m16n8k16 has it (a warp 16 rows), by 16 x N of B in shared memory, described by
// wgmma_operand(). Sums lie as wgmma.cuh says.

#include <cstdint>

#include "core/gpu/wgmma.cuh"

namespace switchyard::ptx {

// clang-format off
#define SWITCHYARD_F8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
  "+f"(d[i + 6]), "+f"(d[i + 7])
#define SWITCHYARD_A4(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

/// d = a * b (+ d where `accumulate` is not 0) of bf16. What `a` holds must stay until a wait.
/// kTurnedB: b is described by wgmma_turned_operand().
template <int kN, bool kTurnedB = false>
__device__ __forceinline__ void wgmma_bf16_from_registers(float (&d)[kN / 2],
                                                          const std::uint32_t (&a)[4],
                                                          std::uint64_t b,
                                                          std::uint32_t accumulate) {
  static_assert(kN == 16 || kN == 32 || kN == 48 || kN == 64 || kN == 72 || kN == 80);
  static_assert(!kTurnedB || kN == 64);
  if constexpr (kN == 16) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %13, 0; "
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7 "
        "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
        : SWITCHYARD_F8(d, 0)
        : SWITCHYARD_A4(a), "l"(b), "r"(accumulate));
  } else if constexpr (kN == 32) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %21, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 "
        "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
        : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8)
        : SWITCHYARD_A4(a), "l"(b), "r"(accumulate));
  } else if constexpr (kN == 48) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %29, 0; "
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23 "
        "}, {%24, %25, %26, %27}, %28, p, 1, 1, 0;}"
        : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16)
        : SWITCHYARD_A4(a), "l"(b), "r"(accumulate));
  } else if constexpr (kN == 64) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 "
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}"
        : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), SWITCHYARD_F8(d, 24)
        : SWITCHYARD_A4(a), "l"(b), "r"(accumulate), "n"(kTurnedB ? 1 : 0));
  } else if constexpr (kN == 72) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %41, 0; "
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35 "
        "}, {%36, %37, %38, %39}, %40, p, 1, 1, 0;}"
        : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), SWITCHYARD_F8(d, 24),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
        : SWITCHYARD_A4(a), "l"(b), "r"(accumulate));
  } else {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %45, 0; "
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
        "%36, %37, %38, %39 "
        "}, {%40, %41, %42, %43}, %44, p, 1, 1, 0;}"
        : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), SWITCHYARD_F8(d, 24),
          SWITCHYARD_F8(d, 32)
        : SWITCHYARD_A4(a), "l"(b), "r"(accumulate));
  }
}
// clang-format on

#undef SWITCHYARD_A4
#undef SWITCHYARD_F8

}  // namespace switchyard::ptx
