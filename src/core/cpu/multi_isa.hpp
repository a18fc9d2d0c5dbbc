#pragma once

// Which vector instructions this machine has. A function that uses more than the build's baseline
// carries SWITCHYARD_TARGET and is called only where the question below says yes; its portable twin
// gives the same bits.

#if defined(__x86_64__)
#include <cpuid.h>
#define SWITCHYARD_X86 1
#define SWITCHYARD_TARGET(features) __attribute__((target(features)))
#endif

namespace switchyard {

#ifdef SWITCHYARD_X86
/// Asked of the CPU itself: clang 14 does not know the name for __builtin_cpu_supports.
[[nodiscard]] inline bool has_f16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

/// AVX2 with FMA and F16C: every x86 server of the last ten years.
[[nodiscard]] inline bool has_avx2() {
#ifdef SWITCHYARD_X86
  static const bool answer =
      __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 && has_f16c();
  return answer;
#else
  return false;
#endif
}

[[nodiscard]] inline bool has_avx512() {
#ifdef SWITCHYARD_X86
  static const bool answer = has_avx2() && __builtin_cpu_supports("avx512f") != 0 &&
                             __builtin_cpu_supports("avx512vl") != 0;
  return answer;
#else
  return false;
#endif
}

/// And its instructions for bytes, words and 64-bit integers.
[[nodiscard]] inline bool has_avx512_bw_dq() {
#ifdef SWITCHYARD_X86
  static const bool answer = has_avx512() && __builtin_cpu_supports("avx512bw") != 0 &&
                             __builtin_cpu_supports("avx512dq") != 0;
  return answer;
#else
  return false;
#endif
}

}  // namespace switchyard
