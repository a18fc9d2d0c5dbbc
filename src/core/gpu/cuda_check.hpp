#pragma once

#include <cuda_runtime_api.h>

#include "core/check.hpp"

namespace switchyard {

/// Throws Error{kDevice}, or {kOutOfMemory}, that names the call and has CUDA's own words.
[[noreturn]] inline void throw_cuda_error(cudaError_t status, const char* call) {
  cudaGetLastError();  // clear it, or the next unrelated check would report it again
  const ErrorCode code =
      status == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kDevice;
  fail(code, "{}: {}, {}", call, cudaGetErrorName(status), cudaGetErrorString(status));
}

/// Every CUDA call goes through this, or through a destructor that may not throw.
#define SWITCHYARD_CUDA(call)                                                 \
  do {                                                                        \
    if (const cudaError_t cuda_status = (call); cuda_status != cudaSuccess) { \
      ::switchyard::throw_cuda_error(cuda_status, #call);                     \
    }                                                                         \
  } while (false)

}  // namespace switchyard
