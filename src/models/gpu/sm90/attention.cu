// Causal attention in bf16 by Hopper's wgmma, forward. A block has 64 queries of a head and goes
// over the tiles of keys up to their own; scores never leave registers. What one block's
// exponentials take, the products of the others on its multiprocessor fill.
#include "models/gpu/attention.hpp"
#include "models/gpu/sm90/attention_tiles.cuh"

namespace switchyard::models::gpu {
namespace {

using namespace sm90;

constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;

template <int kDim>
__global__ void __launch_bounds__(kThreads, kDim == 64 ? 4 : 2) attention_kernel(AttentionArgs p) {
  extern __shared__ int4 shared[];
  const std::uint32_t q = first_tile(shared);
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
  Sums sums[kBoxes<kDim>] = {};
  float most[2] = {-INFINITY, -INFINITY}, total[2] = {};
  for (int tile = 0; tile <= block; ++tile) {
    if (tile < block) {
      load(tile + 1);
      wait_for_tiles<1>();
    } else {
      wait_for_tiles<0>();
    }
    const std::uint32_t at = static_cast<std::uint32_t>(tile % 2) * kTileBytes<kDim>;
    // Again for each tile: ptxas (CUDA 13.0) takes registers that wgmma has read for free, even
    // where the next turn of a loop reads them.
    Rows<kDim> queries;
    queries.load(q);
    Sums s;
    ptx::wgmma_fence();
    multiply_rows<kDim>(queries, k + at, s);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    if (tile == block) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2);
        if (column > row) s[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float now = most[h];
#pragma unroll
      for (int n = 0; n < 8; ++n) now = fmaxf(now, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffU, now, 1));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffU, now, 2));
      const float keep = ptx::exp2_approx((most[h] - now) * scale);
      most[h] = now;
      const float shift = now * scale;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 4 * n + 2 * h; i < 4 * n + 2 * h + 2; ++i) {
          s[i] = ptx::exp2_approx(__fmaf_rn(s[i], scale, -shift));
          sum += s[i];
        }
      }
      total[h] = total[h] * keep + sum;
#pragma unroll
      for (int box = 0; box < kBoxes<kDim>; ++box) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          sums[box][4 * n + 2 * h] *= keep;
          sums[box][4 * n + 2 * h + 1] *= keep;
        }
      }
    }
    Rounded shares(s);
    shares.hold();
    ptx::wgmma_fence();
    multiply_columns<kDim>(shares, v + at, sums);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    shares.hold();
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
  launch(attention_kernel<kDim>, blocks, kThreads, std::size_t{5} * kTileBytes<kDim> + kTileAlign,
         args.stream, args);
}

}  // namespace

void attention_sm90(const AttentionArgs& args) {
  if (args.head_dim == 64) return run<64>(args);
  run<128>(args);
}

}  // namespace switchyard::models::gpu
