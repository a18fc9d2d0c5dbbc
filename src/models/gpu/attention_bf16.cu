// Causal attention in bf16 by tensor cores, forward. A block has 64 queries of a head and goes over
// the tiles of keys up to their own; scores never leave registers. Bound by the tensor cores and by
// the exponentials.
#include "models/gpu/attention.hpp"
#include "models/gpu/attention_tiles.cuh"

namespace switchyard::models::gpu {
namespace {

using namespace tiles;

constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;

template <int kDim>
__global__ void __launch_bounds__(kThreads) attention_kernel(AttentionArgs p) {
  extern __shared__ int4 shared[];
  const std::uint32_t q = ptx::shared_address(shared);
  const std::uint32_t k = q + kTileBytes<kDim>, v = k + 2 * kTileBytes<kDim>;  // two of each
  const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);  // those with most keys first
  const int head = static_cast<int>(blockIdx.y), of_kv = head / (p.heads / p.kv_heads);
  const std::int64_t sequence = blockIdx.z;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first = block * kRows;
  const Bf16* const keys = head_of(p.k, sequence, of_kv, kDim, p.positions);
  const Bf16* const values = head_of(p.v, sequence, of_kv, kDim, p.positions);
  const auto load = [&](int tile) {
    const std::uint32_t at = static_cast<std::uint32_t>(tile % 2) * kTileBytes<kDim>;
    load_tile<kDim>(k + at, keys, p.k.row, tile * kRows, p.positions);
    load_tile<kDim>(v + at, values, p.v.row, tile * kRows, p.positions);
    ptx::cp_async_commit();
  };
  load_tile<kDim>(q, head_of(p.q, sequence, head, kDim, p.positions), p.q.row, first, p.positions);
  load(0);
  const float scale = kLog2E / sqrtf(static_cast<float>(kDim));
  float sums[kDim / 8][4] = {};
  float most[2] = {-INFINITY, -INFINITY}, total[2] = {};
  for (int tile = 0; tile <= block; ++tile) {
    if (tile < block) {
      load(tile + 1);
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
    __syncthreads();
    const std::uint32_t at = static_cast<std::uint32_t>(tile % 2) * kTileBytes<kDim>;
    Scores s;
    multiply_rows<kDim>(q, k + at, s);
    if (tile == block) {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        for (int i = 0; i < 4; ++i) {
          const int column = 8 * n + 2 * (lane % 4) + i % 2;
          const int row = 16 * warp + lane / 4 + 8 * (i / 2);
          if (column > row) s[n][i] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float now = most[h];
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) now = fmaxf(now, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffU, now, 1));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffU, now, 2));
      const float keep = ptx::exp2_approx((most[h] - now) * scale);
      most[h] = now;
      total[h] *= keep;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          s[n][i] = ptx::exp2_approx((s[n][i] - now) * scale);
          total[h] += s[n][i];
        }
      }
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        sums[n][2 * h] *= keep;
        sums[n][2 * h + 1] *= keep;
      }
    }
    multiply_columns<kDim>(s, v + at, sums);
    __syncthreads();  // before the next tile but one is written over this
  }
  float by[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    total[h] += __shfl_xor_sync(0xffffffffU, total[h], 1);
    total[h] += __shfl_xor_sync(0xffffffffU, total[h], 2);
    by[h] = 1.0F / total[h];
    const int row = first + 16 * warp + lane / 4 + 8 * h;
    if (lane % 4 == 0 && row < p.positions) {
      p.lse[(sequence * p.heads + head) * p.positions + row] =
          most[h] * scale * kLn2 + logf(total[h]);
    }
  }
  store_rows<kDim>(sums, by, head_of(p.out, sequence, head, kDim, p.positions), p.out.row, first,
                   p.positions);
}

template <int kDim>
void run(const AttentionArgs& args) {
  const dim3 blocks(blocks_for(args.positions, kRows), static_cast<unsigned>(args.heads),
                    static_cast<unsigned>(args.batch));
  launch(attention_kernel<kDim>, blocks, kThreads, std::size_t{5} * kTileBytes<kDim>, args.stream,
         args);
}

}  // namespace

bool takes_sm90(const AttentionArgs& args) {
  return !args.portable && args.head_dim >= 64 &&
         device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
}

void attention_bf16(const AttentionArgs& args) {
  if (takes_sm90(args)) return attention_sm90(args);
  switch (args.head_dim) {
    case 32: return run<32>(args);
    case 64: return run<64>(args);
    default: return run<128>(args);
  }
}

}  // namespace switchyard::models::gpu
