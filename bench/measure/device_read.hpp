#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace switchyard::bench {

/// How many threads read at once.
struct ReadShape {
  int blocks = 1;  ///< A multiprocessor.
  int threads = 256;
};
inline constexpr ReadShape kReadShapes[] = {{1, 256}, {1, 512}, {2, 256},
                                            {2, 512}, {4, 256}, {4, 512}};

/// Enqueues one reading of `bytes` bytes of device memory, a multiple of 16.
/// @param out  A word of device memory: what keeps the compiler from leaving the reading out.
void launch_read(const void* memory, std::int64_t bytes, unsigned* out, ReadShape shape,
                 cudaStream_t stream);

}  // namespace switchyard::bench
