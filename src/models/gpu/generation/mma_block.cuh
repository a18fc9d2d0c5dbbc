#pragma once

// Products of a token step by mma.sync, as weights lie: a lane reads 16 bytes of a row at a time.

#include "core/gpu/ptx.cuh"

namespace switchyard::models::gpu {

/// Adds to a warp's m16n8 tile 32 columns: lane l has 16 bytes, l % 4 of 4, of rows l / 4 of both
/// halves of its rows, and of row l / 4 of the other side. Which columns go together does not
/// matter.
__device__ __forceinline__ void multiply_block(const int4& upper, const int4& lower, const int4& x,
                                               float (&sum)[4]) {
  const auto bits = [](int v) { return static_cast<std::uint32_t>(v); };
  const std::uint32_t first[4] = {bits(upper.x), bits(lower.x), bits(upper.y), bits(lower.y)};
  const std::uint32_t second[4] = {bits(upper.z), bits(lower.z), bits(upper.w), bits(lower.w)};
  ptx::mma_bf16(sum, first, bits(x.x), bits(x.y));
  ptx::mma_bf16(sum, second, bits(x.z), bits(x.w));
}

/// Packs from one row to the next in shared memory: so that eight lanes that read 64 bytes of two
/// rows have all banks.
[[nodiscard]] __host__ __device__ constexpr int padded_packs(int packs) {
  return packs + (12 - packs % 8) % 8;
}

}  // namespace switchyard::models::gpu
