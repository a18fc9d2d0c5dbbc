#pragma once

// wgmma.mma_async of TF32 values: a warpgroup multiplies 64 x 8 of A, from its registers, by 8 x N
// of B in shared memory, K running along 128-byte swizzled rows (wgmma_operand(); 8 values further
// along K: add 2), and adds to fp32 registers. The low 13 bits of each operand are ignored.
//
// Of A, register i of lane (g, t) = (lane / 4, lane % 4) is row 16 * warp + g + 8 * (i % 2), column
// t + 4 * (i / 2). Sums lie as those of wgmma.cuh.

#include <cstdint>

#include "core/gpu/wgmma.cuh"

namespace switchyard::ptx {

// clang-format off
#define SWITCHYARD_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

#define SWITCHYARD_WGMMA_TF32_N8(d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %9, 0; " \
      "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {" \
      "%0, %1, %2, %3 " \
      "}, {%4, %5, %6, %7}, %8, p, 1, 1;}" \
      : SWITCHYARD_F4(d, 0) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_TF32_N16(d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %13, 0; " \
      "wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32 {" \
      "%0, %1, %2, %3, %4, %5, %6, %7 " \
      "}, {%8, %9, %10, %11}, %12, p, 1, 1;}" \
      : SWITCHYARD_F4(d, 0), SWITCHYARD_F4(d, 4) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_TF32_N32(d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %21, 0; " \
      "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 " \
      "}, {%16, %17, %18, %19}, %20, p, 1, 1;}" \
      : SWITCHYARD_F4(d, 0), SWITCHYARD_F4(d, 4), SWITCHYARD_F4(d, 8), \
        SWITCHYARD_F4(d, 12) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_TF32_N48(d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %29, 0; " \
      "wgmma.mma_async.sync.aligned.m64n48k8.f32.tf32.tf32 {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
      "%17, %18, %19, %20, %21, %22, %23 " \
      "}, {%24, %25, %26, %27}, %28, p, 1, 1;}" \
      : SWITCHYARD_F4(d, 0), SWITCHYARD_F4(d, 4), SWITCHYARD_F4(d, 8), \
        SWITCHYARD_F4(d, 12), SWITCHYARD_F4(d, 16), SWITCHYARD_F4(d, 20) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

#define SWITCHYARD_WGMMA_TF32_N64(d, a, b, accumulate) \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %37, 0; " \
      "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 " \
      "}, {%32, %33, %34, %35}, %36, p, 1, 1;}" \
      : SWITCHYARD_F4(d, 0), SWITCHYARD_F4(d, 4), SWITCHYARD_F4(d, 8), \
        SWITCHYARD_F4(d, 12), SWITCHYARD_F4(d, 16), SWITCHYARD_F4(d, 20), \
        SWITCHYARD_F4(d, 24), SWITCHYARD_F4(d, 28) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

// clang-format on

/// d = a * b (+ d where `accumulate` is not 0). kN: columns of b.
template <int kN>
__device__ __forceinline__ void wgmma_tf32(float (&d)[kN / 2], const std::uint32_t (&a)[4],
                                           std::uint64_t b, std::uint32_t accumulate) {
  static_assert(kN == 8 || kN == 16 || kN == 32 || kN == 48 || kN == 64);
  if constexpr (kN == 8) {
    SWITCHYARD_WGMMA_TF32_N8(d, a, b, accumulate);
  } else if constexpr (kN == 16) {
    SWITCHYARD_WGMMA_TF32_N16(d, a, b, accumulate);
  } else if constexpr (kN == 32) {
    SWITCHYARD_WGMMA_TF32_N32(d, a, b, accumulate);
  } else if constexpr (kN == 48) {
    SWITCHYARD_WGMMA_TF32_N48(d, a, b, accumulate);
  } else {
    SWITCHYARD_WGMMA_TF32_N64(d, a, b, accumulate);
  }
}

#undef SWITCHYARD_WGMMA_TF32_N8
#undef SWITCHYARD_WGMMA_TF32_N16
#undef SWITCHYARD_WGMMA_TF32_N32
#undef SWITCHYARD_WGMMA_TF32_N48
#undef SWITCHYARD_WGMMA_TF32_N64
#undef SWITCHYARD_F4

}  // namespace switchyard::ptx
