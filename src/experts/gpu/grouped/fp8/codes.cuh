#pragma once

// The activation's values as e4m3, out of the registers of a warpgroup.

#include <cuda_fp8.h>

#include "experts/gpu/grouped/fp8/shape.cuh"

namespace switchyard {

/// Four lanes have two codes of each of four blocks; after it lane t has all eight of block t.
__device__ __forceinline__ uint2 turn(const std::uint32_t (&pairs)[4]) {
  const bool odd = threadIdx.x % 2 != 0;
  const bool upper = threadIdx.x / 2 % 2 != 0;
  // Blocks 2i and 2i + 1: what the neighbour keeps goes there.
  const std::uint32_t give = odd ? pairs[0] | pairs[2] << 16 : pairs[1] | pairs[3] << 16;
  const std::uint32_t got = __shfl_xor_sync(kAllLanes, give, 1);
  // Of block 0 or 1 (and 2 or 3): the even lane's codes, then the odd one's.
  const std::uint32_t low =
      odd ? __byte_perm(got, pairs[1], 0x5410) : __byte_perm(pairs[0], got, 0x5410);
  const std::uint32_t high =
      odd ? __byte_perm(got, pairs[3], 0x5432) : __byte_perm(pairs[2], got, 0x7610);
  const std::uint32_t there = __shfl_xor_sync(kAllLanes, upper ? low : high, 2);
  return upper ? make_uint2(there, high) : make_uint2(low, there);
}

/// 64 rows, the tile's first or second half, of 128 columns: one scale a row, 32 bytes of a row by
/// four lanes at a time. Whole: the matrix has all of the columns, and none is looked at for that.
template <bool kWhole>
__device__ __forceinline__ void store_codes(const float (&values)[64], const CtaTile& tile,
                                            int half, std::int32_t column, std::int32_t columns,
                                            const Fp8Params& fp8) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int first = static_cast<int>(threadIdx.x % 128 / 32) * 16 + lane / 4 + half * kHalfRows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = 0x1p-100F;
#pragma unroll
    for (int block = 0; block < 16; ++block) {
      const bool exists = kWhole || column + block * 8 < columns;
      const float a = fabsf(values[4 * block + 2 * h]);
      const float b = fabsf(values[4 * block + 2 * h + 1]);
      if (exists) largest = fmaxf(largest, fmaxf(a, b));
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    const float scale = __fdiv_rn(largest, 448.0F);
    const float inverse = __fdiv_rn(448.0F, largest);
    const int in_tile = first + 8 * h;
    const bool here = in_tile < tile.rows;
    const std::int64_t row = std::int64_t{tile.row} + in_tile;
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      std::uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * four + i) + 2 * h;
        pairs[i] = __nv_cvt_float2_to_fp8x2(
            make_float2(values[at] * inverse, values[at + 1] * inverse), __NV_SATFINITE, __NV_E4M3);
      }
      const uint2 eight = turn(pairs);
      const std::int32_t to = column + (4 * four + lane % 4) * 8;
      if (here && (kWhole || to < columns)) {
        *reinterpret_cast<uint2*>(fp8.codes + row * columns + to) = eight;
      }
    }
    if (here && lane % 4 == 0) {
      fp8.scales[row * ((columns + 127) / 128) + column / 128] = scale;
    }
  }
}

}  // namespace switchyard
