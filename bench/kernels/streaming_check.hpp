#pragma once

// Experts of a few tokens beside a reference in double, both on the device.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string>

#include "experts/gpu/streaming/streaming.hpp"

namespace switchyard::bench {

/// Enqueues: `count` values of the dtype, uniform with standard deviation `scale`, by counter.
void fill_uniform(void* values, DType dtype, std::size_t count, float scale, unsigned seed,
                  cudaStream_t stream);

/// Enqueues: matrices of random codes as coded/layout.hpp has them, and their scales, powers of two
/// that make numbers with a standard deviation of about `scale`. @returns the scale of all.
float fill_codes(WeightFormat format, std::byte* codes, std::size_t bytes, float scale,
                 unsigned seed, cudaStream_t stream);
/// `count` times that scale.
void fill_scales(float* scales, std::int64_t count, float scale, cudaStream_t stream);

struct StreamingVerdict {
  bool right = false;
  std::string
      text{};  ///< "ok", "WRONG" or "BITS DIFFER"; relative error, largest share of a bound.
};

/// Runs `launch` four times on silu experts of f32 sums, with a plan made before and just now in
/// turns: the bits must be those of the first run, the values those of plain sums in double whose
/// intermediate is not rounded (relative error 2e-6 in f32, 6e-3 in bf16, 1e-3 in f16; in f32 also
/// no element outside 1e-5 + 1e-3 |y|), or where `launch` makes the rows e4m3, 6e-2. Waits for the
/// stream; writes `params.act` and `.sums`.
[[nodiscard]] StreamingVerdict check_streaming(
    const StreamingParams& params,
    const std::function<void(const StreamingParams&, cudaStream_t)>& launch, cudaStream_t stream,
    bool fp8_rows = false);

}  // namespace switchyard::bench
