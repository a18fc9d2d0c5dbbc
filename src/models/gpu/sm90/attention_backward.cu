// The way back through causal attention in bf16 by Hopper's wgmma, as attention_backward_bf16.cu
// has it: a kernel by blocks of queries, a kernel by blocks of keys, and nothing added up between
// blocks.
#include "models/gpu/attention.hpp"
#include "models/gpu/sm90/attention_tiles.cuh"

namespace switchyard::models::gpu {
namespace {

using namespace sm90;

constexpr float kLog2E = 1.4426950408889634F;

template <int kDim>
__global__ void __launch_bounds__(kThreads, kDim == 64 ? 3 : 2)
    queries_kernel(AttentionBackwardArgs args) {
  const AttentionArgs& p = args.forward;
  extern __shared__ int4 shared[];
  const std::uint32_t q = first_tile(shared);
  const std::uint32_t dout = q + kTileBytes<kDim>, k = dout + kTileBytes<kDim>;
  const std::uint32_t v = k + 2 * kTileBytes<kDim>;
  const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
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
  load_tile<kDim>(dout, head_of(args.dout, sequence, head, kDim, p.positions), args.dout.row, first,
                  p.positions);
  load(0);
  const float scale = 1.0F / sqrtf(static_cast<float>(kDim));
  const std::int64_t stats = (sequence * p.heads + head) * p.positions;
  float lse[2], delta[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first + 16 * warp + lane / 4 + 8 * h;
    const bool there = row < p.positions;
    lse[h] = there ? p.lse[stats + row] * kLog2E : 0.0F;
    delta[h] = there ? args.delta[stats + row] : 0.0F;
  }
  Sums sums[kBoxes<kDim>] = {};
  for (int tile = 0; tile <= block; ++tile) {
    if (tile < block) {
      load(tile + 1);
      wait_for_tiles<1>();
    } else {
      wait_for_tiles<0>();
    }
    const std::uint32_t at = static_cast<std::uint32_t>(tile % 2) * kTileBytes<kDim>;
    Sums s, dp;
    ptx::wgmma_fence();
    multiply_rows<kDim>(q, k + at, s);
    multiply_rows<kDim>(dout, v + at, dp);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      const int h = i / 2 % 2;
      const int row = 16 * warp + lane / 4 + 8 * h;
      const bool seen = tile < block || column <= row;
      const float share = ptx::exp2_approx(__fmaf_rn(s[i], scale * kLog2E, -lse[h]));
      s[i] = seen ? share * (dp[i] - delta[h]) : 0.0F;
    }
    Rounded ds(s);
    ds.hold();
    ptx::wgmma_fence();
    multiply_columns<kDim>(ds, k + at, sums);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ds.hold();
    __syncthreads();
  }
  const float by[2] = {scale, scale};
  store_rows<kDim>(sums, by, head_of(args.dq, sequence, head, kDim, p.positions), args.dq.row,
                   first, p.positions);
}

/// Rows are keys here, and columns the queries of all heads that share them.
template <int kDim>
__global__ void __launch_bounds__(kThreads, kDim == 64 ? 3 : 1)
    keys_kernel(AttentionBackwardArgs args) {
  const AttentionArgs& p = args.forward;
  extern __shared__ int4 shared[];
  __shared__ float lse[2][kRows], delta[2][kRows];
  const std::uint32_t k = first_tile(shared);
  const std::uint32_t v = k + kTileBytes<kDim>, q = v + kTileBytes<kDim>;
  const std::uint32_t dout = q + 2 * kTileBytes<kDim>;
  const int block = static_cast<int>(blockIdx.x), of_kv = static_cast<int>(blockIdx.y);
  const std::int64_t sequence = blockIdx.z;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int thread = static_cast<int>(threadIdx.x);
  const int first = block * kRows, group = p.heads / p.kv_heads;
  const int each = static_cast<int>(gridDim.x) - block;  // tiles of queries from the keys' own on
  const auto load = [&](int item) {
    const int head = of_kv * group + item / each, tile = block + item % each;
    const std::uint32_t at = static_cast<std::uint32_t>(item % 2) * kTileBytes<kDim>;
    load_tile<kDim>(q + at, head_of(p.q, sequence, head, kDim, p.positions), p.q.row, tile * kRows,
                    p.positions);
    load_tile<kDim>(dout + at, head_of(args.dout, sequence, head, kDim, p.positions), args.dout.row,
                    tile * kRows, p.positions);
    ptx::cp_async_commit();
    if (thread >= kRows) return;
    const std::int64_t stats = (sequence * p.heads + head) * p.positions;
    const int row = tile * kRows + thread;
    const bool there = row < p.positions;
    lse[item % 2][thread] = there ? p.lse[stats + row] * kLog2E : INFINITY;  // a share of 0
    delta[item % 2][thread] = there ? args.delta[stats + row] : 0.0F;
  };
  load_tile<kDim>(k, head_of(p.k, sequence, of_kv, kDim, p.positions), p.k.row, first, p.positions);
  load_tile<kDim>(v, head_of(p.v, sequence, of_kv, kDim, p.positions), p.v.row, first, p.positions);
  load(0);
  const float scale = 1.0F / sqrtf(static_cast<float>(kDim));
  Sums dk[kBoxes<kDim>] = {}, dv[kBoxes<kDim>] = {};
  for (int item = 0; item < group * each; ++item) {
    if (item + 1 < group * each) {
      load(item + 1);
      wait_for_tiles<1>();
    } else {
      wait_for_tiles<0>();
    }
    const int stage = item % 2;
    const bool own = item % each == 0;
    const std::uint32_t at = static_cast<std::uint32_t>(stage) * kTileBytes<kDim>;
    Sums s, ds;
    ptx::wgmma_fence();
    multiply_rows<kDim>(k, q + at, s);
    multiply_rows<kDim>(v, dout + at, ds);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;  // the query
      const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2);
      const bool seen = !own || row <= column;
      const float share = ptx::exp2_approx(__fmaf_rn(s[i], scale * kLog2E, -lse[stage][column]));
      s[i] = seen ? share : 0.0F;
      ds[i] = s[i] * (ds[i] - delta[stage][column]);
    }
    Rounded shares(s), rounded(ds);
    shares.hold();
    rounded.hold();
    ptx::wgmma_fence();
    multiply_columns<kDim>(shares, dout + at, dv);
    multiply_columns<kDim>(rounded, q + at, dk);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    shares.hold();
    rounded.hold();
    __syncthreads();
  }
  const float of_k[2] = {scale, scale}, of_v[2] = {1.0F, 1.0F};
  store_rows<kDim>(dk, of_k, head_of(args.dk, sequence, of_kv, kDim, p.positions), args.dk.row,
                   first, p.positions);
  store_rows<kDim>(dv, of_v, head_of(args.dv, sequence, of_kv, kDim, p.positions), args.dv.row,
                   first, p.positions);
}

template <int kDim>
void run(const AttentionBackwardArgs& args) {
  const AttentionArgs& forward = args.forward;
  constexpr std::size_t kShared = std::size_t{6} * kTileBytes<kDim> + kTileAlign;
  const auto batch = static_cast<unsigned>(forward.batch);
  const unsigned tiles = blocks_for(forward.positions, kRows);
  launch(queries_kernel<kDim>, dim3(tiles, static_cast<unsigned>(forward.heads), batch), kThreads,
         kShared, forward.stream, args);
  launch(keys_kernel<kDim>, dim3(tiles, static_cast<unsigned>(forward.kv_heads), batch), kThreads,
         kShared, forward.stream, args);
}

}  // namespace

void attention_backward_sm90(const AttentionBackwardArgs& args) {
  if (args.forward.head_dim == 64) return run<64>(args);
  run<128>(args);
}

}  // namespace switchyard::models::gpu
