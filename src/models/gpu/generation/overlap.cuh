#pragma once

// How stages of a token step overlap: what does not depend on the stage in front is asked for while
// that one runs.

#include <cuda_runtime_api.h>

#include "core/gpu/ptx.cuh"

namespace switchyard::models::gpu {

/// First of all: the stage behind may begin as soon as there is room for it. Only where that one
/// touches nothing but weights before its own wait.
__device__ __forceinline__ void let_stage_behind_begin() { ptx::let_next_kernel_start(); }
/// Until all stages in front have ended: before anything is touched that they read or write.
__device__ __forceinline__ void wait_for_stages_in_front() { ptx::wait_for_previous_kernel(); }

/// Asks for `packs` of 16 bytes into the L2 cache, by one thread. Loads into registers will not do
/// in front of a wait: the compiler moves them behind it.
__device__ __forceinline__ void ask_into_l2(const void* from, int packs) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (packs > 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(16 * packs)
                 : "memory");
  }
#endif
}

}  // namespace switchyard::models::gpu
