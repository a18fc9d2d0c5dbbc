#pragma once

// wgmma.mma_async: a warpgroup multiplies 64 x 16 of A by 16 x N of B, both in shared memory, K
// running along 128-byte swizzled rows, and adds to fp32 registers: wgmma_row() and wgmma_column()
// say of which element of the product a thread holds a value.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/gpu/host_device.hpp"

namespace switchyard::ptx {

/// Row of the 64, of value `value` in [0, N / 2) of thread `thread` of the warpgroup.
SWITCHYARD_HOST_DEVICE constexpr int wgmma_row(int thread, int value) {
  return thread / 32 * 16 + thread % 32 / 4 + value / 2 % 2 * 8;
}
/// Its column of the N.
SWITCHYARD_HOST_DEVICE constexpr int wgmma_column(int thread, int value) {
  return value / 4 * 8 + thread % 4 * 2 + value % 2;
}

/// Describes an operand tile whose rows of 64 values (128 bytes) follow each other, swizzled in
/// groups of 8 rows; it starts at a multiple of 1024 bytes. 16 values further along K: add 2.
__device__ __forceinline__ std::uint64_t wgmma_operand(std::uint32_t address) {
  constexpr std::uint64_t kGroupStride = 1024 >> 4;  // 8 rows
  constexpr std::uint64_t kSwizzle128 = 1;
  return static_cast<std::uint64_t>((address & 0x3FFFFU) >> 4) | (std::uint64_t{1} << 16) |
         (kGroupStride << 32) | (kSwizzle128 << 62);
}

/// Describes an operand tile with K across memory: rows of 64 values (128 bytes) of M or N follow
/// each other, 64 rows of k a box, and boxes of the next 64 of M or N behind them; swizzled alike.
/// 16 values further along K: add kTurnedStep.
__device__ __forceinline__ std::uint64_t wgmma_turned_operand(std::uint32_t address) {
  constexpr std::uint64_t kGroupStride = 1024 >> 4;  // 8 rows
  constexpr std::uint64_t kBoxStride = 64 * 128 >> 4;
  constexpr std::uint64_t kSwizzle128 = 1;
  return static_cast<std::uint64_t>((address & 0x3FFFFU) >> 4) | (kBoxStride << 16) |
         (kGroupStride << 32) | (kSwizzle128 << 62);
}
constexpr std::uint64_t kTurnedStep = 16 * 128 >> 4;

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// clang-format off
#define SWITCHYARD_F8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
  "+f"(d[i + 6]), "+f"(d[i + 7])

#define SWITCHYARD_WGMMA_N64(TYPE, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %34, 0; " \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 " \
      "}, %32, %33, p, 1, 1, 0, 0;}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), \
        SWITCHYARD_F8(d, 24) \
      : "l"(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_N128(TYPE, TURNED, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %66, 0; " \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
      "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 " \
      "}, %64, %65, p, 1, 1, " TURNED ";}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), \
        SWITCHYARD_F8(d, 24), SWITCHYARD_F8(d, 32), SWITCHYARD_F8(d, 40), \
        SWITCHYARD_F8(d, 48), SWITCHYARD_F8(d, 56) \
      : "l"(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_E4M3_N128(d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %66, 0; " \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
      "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 " \
      "}, %64, %65, p, 1, 1;}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), \
        SWITCHYARD_F8(d, 24), SWITCHYARD_F8(d, 32), SWITCHYARD_F8(d, 40), \
        SWITCHYARD_F8(d, 48), SWITCHYARD_F8(d, 56) \
      : "l"(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_N144(TYPE, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %74, 0; " \
      "wgmma.mma_async.sync.aligned.m64n144k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
      "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
      "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71 " \
      "}, %72, %73, p, 1, 1, 0, 0;}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), \
        SWITCHYARD_F8(d, 24), SWITCHYARD_F8(d, 32), SWITCHYARD_F8(d, 40), \
        SWITCHYARD_F8(d, 48), SWITCHYARD_F8(d, 56), SWITCHYARD_F8(d, 64) \
      : "l"(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_N160(TYPE, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %82, 0; " \
      "wgmma.mma_async.sync.aligned.m64n160k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
      "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
      "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, " \
      "%74, %75, %76, %77, %78, %79 " \
      "}, %80, %81, p, 1, 1, 0, 0;}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), \
        SWITCHYARD_F8(d, 24), SWITCHYARD_F8(d, 32), SWITCHYARD_F8(d, 40), \
        SWITCHYARD_F8(d, 48), SWITCHYARD_F8(d, 56), SWITCHYARD_F8(d, 64), \
        SWITCHYARD_F8(d, 72) \
      : "l"(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_N176(TYPE, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %90, 0; " \
      "wgmma.mma_async.sync.aligned.m64n176k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
      "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
      "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, " \
      "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87 " \
      "}, %88, %89, p, 1, 1, 0, 0;}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), \
        SWITCHYARD_F8(d, 24), SWITCHYARD_F8(d, 32), SWITCHYARD_F8(d, 40), \
        SWITCHYARD_F8(d, 48), SWITCHYARD_F8(d, 56), SWITCHYARD_F8(d, 64), \
        SWITCHYARD_F8(d, 72), SWITCHYARD_F8(d, 80) \
      : "l"(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_N192(TYPE, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %98, 0; " \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
      "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, " \
      "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, " \
      "%87, %88, %89, %90, %91, %92, %93, %94, %95 " \
      "}, %96, %97, p, 1, 1, 0, 0;}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), \
        SWITCHYARD_F8(d, 24), SWITCHYARD_F8(d, 32), SWITCHYARD_F8(d, 40), \
        SWITCHYARD_F8(d, 48), SWITCHYARD_F8(d, 56), SWITCHYARD_F8(d, 64), \
        SWITCHYARD_F8(d, 72), SWITCHYARD_F8(d, 80), SWITCHYARD_F8(d, 88) \
      : "l"(a), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_N256(TYPE, TURNED, d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %130, 0; " \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
      "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, " \
      "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, " \
      "%87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, " \
      "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, " \
      "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127 " \
      "}, %128, %129, p, 1, 1, " TURNED ";}" \
      : SWITCHYARD_F8(d, 0), SWITCHYARD_F8(d, 8), SWITCHYARD_F8(d, 16), \
        SWITCHYARD_F8(d, 24), SWITCHYARD_F8(d, 32), SWITCHYARD_F8(d, 40), \
        SWITCHYARD_F8(d, 48), SWITCHYARD_F8(d, 56), SWITCHYARD_F8(d, 64), \
        SWITCHYARD_F8(d, 72), SWITCHYARD_F8(d, 80), SWITCHYARD_F8(d, 88), \
        SWITCHYARD_F8(d, 96), SWITCHYARD_F8(d, 104), SWITCHYARD_F8(d, 112), \
        SWITCHYARD_F8(d, 120) \
      : "l"(a), "l"(b), "r"(accumulate))

// clang-format on

/// Which operands have K across memory: rows are values of k, 64 of M or N (128 bytes) in each.
enum class WgmmaTurned : std::uint8_t { kNone, kB, kBoth };

/// d = a * b (+ d where `accumulate` is not 0). kN: columns of b.
template <typename T, int kN, WgmmaTurned kTurned = WgmmaTurned::kNone>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], std::uint64_t a, std::uint64_t b,
                                      std::uint32_t accumulate) {
  static_assert(kN == 64 || kN == 128 || kN == 256 || (kN >= 144 && kN <= 192 && kN % 16 == 0));
  static_assert(kN == 256 || kTurned == WgmmaTurned::kNone ||
                (kN == 128 && kTurned == WgmmaTurned::kB));
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if constexpr (kN == 64) {
      SWITCHYARD_WGMMA_N64("bf16", d, a, b, accumulate);
    } else if constexpr (kN == 128) {
      if constexpr (kTurned == WgmmaTurned::kB) {
        SWITCHYARD_WGMMA_N128("bf16", "0, 1", d, a, b, accumulate);
      } else {
        SWITCHYARD_WGMMA_N128("bf16", "0, 0", d, a, b, accumulate);
      }
    } else if constexpr (kN == 144) {
      SWITCHYARD_WGMMA_N144("bf16", d, a, b, accumulate);
    } else if constexpr (kN == 160) {
      SWITCHYARD_WGMMA_N160("bf16", d, a, b, accumulate);
    } else if constexpr (kN == 176) {
      SWITCHYARD_WGMMA_N176("bf16", d, a, b, accumulate);
    } else if constexpr (kN == 192) {
      SWITCHYARD_WGMMA_N192("bf16", d, a, b, accumulate);
    } else if constexpr (kTurned == WgmmaTurned::kBoth) {
      SWITCHYARD_WGMMA_N256("bf16", "1, 1", d, a, b, accumulate);
    } else if constexpr (kTurned == WgmmaTurned::kB) {
      SWITCHYARD_WGMMA_N256("bf16", "0, 1", d, a, b, accumulate);
    } else {
      SWITCHYARD_WGMMA_N256("bf16", "0, 0", d, a, b, accumulate);
    }
  } else {
    static_assert(std::is_same_v<T, __half>);
    if constexpr (kN == 64) {
      SWITCHYARD_WGMMA_N64("f16", d, a, b, accumulate);
    } else if constexpr (kN == 128) {
      if constexpr (kTurned == WgmmaTurned::kB) {
        SWITCHYARD_WGMMA_N128("f16", "0, 1", d, a, b, accumulate);
      } else {
        SWITCHYARD_WGMMA_N128("f16", "0, 0", d, a, b, accumulate);
      }
    } else if constexpr (kN == 144) {
      SWITCHYARD_WGMMA_N144("f16", d, a, b, accumulate);
    } else if constexpr (kN == 160) {
      SWITCHYARD_WGMMA_N160("f16", d, a, b, accumulate);
    } else if constexpr (kN == 176) {
      SWITCHYARD_WGMMA_N176("f16", d, a, b, accumulate);
    } else if constexpr (kN == 192) {
      SWITCHYARD_WGMMA_N192("f16", d, a, b, accumulate);
    } else if constexpr (kTurned == WgmmaTurned::kBoth) {
      SWITCHYARD_WGMMA_N256("f16", "1, 1", d, a, b, accumulate);
    } else if constexpr (kTurned == WgmmaTurned::kB) {
      SWITCHYARD_WGMMA_N256("f16", "0, 1", d, a, b, accumulate);
    } else {
      SWITCHYARD_WGMMA_N256("f16", "0, 0", d, a, b, accumulate);
    }
  }
}

/// Describes an operand tile of matrices of 8 rows by 16 bytes, each 128 bytes without a gap or a
/// swizzle: along K they follow each other, the next 8 rows begin `group_bytes` further. 32 values
/// of 8 bits further along K: add kPlainStep.
__device__ __forceinline__ std::uint64_t wgmma_plain_operand(std::uint32_t address,
                                                             std::uint32_t group_bytes) {
  constexpr std::uint64_t kMatrixStride = 128 >> 4;
  return static_cast<std::uint64_t>((address & 0x3FFFFU) >> 4) | (kMatrixStride << 16) |
         (static_cast<std::uint64_t>(group_bytes >> 4) << 32);
}
constexpr std::uint64_t kPlainStep = 2 * 128 >> 4;

/// d = a * b (+ d where `accumulate` is not 0) of e4m3: 64 x 32 by 32 x 128. Inside, the tensor
/// core keeps some 14 bits of its sums.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], std::uint64_t a, std::uint64_t b,
                                           std::uint32_t accumulate) {
  SWITCHYARD_WGMMA_E4M3_N128(d, a, b, accumulate);
}

#undef SWITCHYARD_WGMMA_E4M3_N128
#undef SWITCHYARD_WGMMA_N64
#undef SWITCHYARD_WGMMA_N128
#undef SWITCHYARD_WGMMA_N144
#undef SWITCHYARD_WGMMA_N160
#undef SWITCHYARD_WGMMA_N176
#undef SWITCHYARD_WGMMA_N192
#undef SWITCHYARD_WGMMA_N256
#undef SWITCHYARD_F8

}  // namespace switchyard::ptx
