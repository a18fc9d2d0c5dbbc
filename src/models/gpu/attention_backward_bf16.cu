// The way back through causal attention in bf16: one kernel by blocks of queries for dq, one by
// blocks of keys for dk and dv. Each makes the probabilities again from the logarithms of the sums:
// seven products where five would do, and nothing is added up between blocks.
#include "models/gpu/attention.hpp"
#include "models/gpu/attention_tiles.cuh"

namespace switchyard::models::gpu {
namespace {

using namespace tiles;

constexpr float kLog2E = 1.4426950408889634F;
constexpr int kDeltaThreads = 256;

/// dout . out of each query: a thread has 16 bytes of both, neighbouring threads a head's.
template <int kDim>
__global__ void delta_kernel(AttentionBackwardArgs args) {
  constexpr int kLanes = kDim / 8;
  const AttentionArgs& p = args.forward;
  const std::int64_t thread = std::int64_t{blockIdx.x} * kDeltaThreads + threadIdx.x;
  const std::int64_t item = thread / kLanes;
  const std::int64_t row = item / p.heads;  // of all sequences
  const int head = static_cast<int>(item % p.heads);
  const int column = head * kDim + static_cast<int>(thread % kLanes) * 8;
  const bool is_there = row < p.batch * p.positions;
  float delta = 0;
  if (is_there) {
    const auto read = [&](const Heads& from, float(&x)[8]) {
      const Bf16* const at = static_cast<const Bf16*>(from.data) + row * from.row + column;
      unpack16(*reinterpret_cast<const int4*>(at), x, Bf16{});
    };
    float out[8], dout[8];
    read(p.out, out);
    read(args.dout, dout);
#pragma unroll
    for (int i = 0; i < 8; ++i) delta += out[i] * dout[i];
  }
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) delta += __shfl_xor_sync(0xffffffffU, delta, i);
  if (!is_there || thread % kLanes != 0) return;
  const std::int64_t sequence = row / p.positions;
  args.delta[(sequence * p.heads + head) * p.positions + row % p.positions] = delta;
}

template <int kDim>
__global__ void __launch_bounds__(kThreads) queries_kernel(AttentionBackwardArgs args) {
  const AttentionArgs& p = args.forward;
  extern __shared__ int4 shared[];
  const std::uint32_t q = ptx::shared_address(shared);
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
  float sums[kDim / 8][4] = {};
  for (int tile = 0; tile <= block; ++tile) {
    if (tile < block) {
      load(tile + 1);
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
    __syncthreads();
    const std::uint32_t at = static_cast<std::uint32_t>(tile % 2) * kTileBytes<kDim>;
    Scores s, dp;
    multiply_rows<kDim>(q, k + at, s);
    multiply_rows<kDim>(dout, v + at, dp);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * n + 2 * (lane % 4) + i % 2;
        const int row = 16 * warp + lane / 4 + 8 * (i / 2);
        const bool seen = tile < block || column <= row;
        const float share = ptx::exp2_approx(s[n][i] * (scale * kLog2E) - lse[i / 2]);
        s[n][i] = seen ? share * (dp[n][i] - delta[i / 2]) : 0.0F;
      }
    }
    multiply_columns<kDim>(s, k + at, sums);
    __syncthreads();
  }
  const float by[2] = {scale, scale};
  store_rows<kDim>(sums, by, head_of(args.dq, sequence, head, kDim, p.positions), args.dq.row,
                   first, p.positions);
}

/// Rows are keys here, and columns the queries of all heads that share them.
template <int kDim>
__global__ void __launch_bounds__(kThreads) keys_kernel(AttentionBackwardArgs args) {
  const AttentionArgs& p = args.forward;
  extern __shared__ int4 shared[];
  __shared__ float lse[2][kRows], delta[2][kRows];
  const std::uint32_t k = ptx::shared_address(shared);
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
  float dk[kDim / 8][4] = {}, dv[kDim / 8][4] = {};
  for (int item = 0; item < group * each; ++item) {
    if (item + 1 < group * each) {
      load(item + 1);
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
    __syncthreads();
    const int stage = item % 2;
    const bool own = item % each == 0;
    const std::uint32_t at = static_cast<std::uint32_t>(stage) * kTileBytes<kDim>;
    Scores s, ds;
    multiply_rows<kDim>(k, q + at, s);
    multiply_rows<kDim>(v, dout + at, ds);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * n + 2 * (lane % 4) + i % 2;  // the query
        const int row = 16 * warp + lane / 4 + 8 * (i / 2);
        const bool seen = !own || row <= column;
        const float share = ptx::exp2_approx(s[n][i] * (scale * kLog2E) - lse[stage][column]);
        s[n][i] = seen ? share : 0.0F;
        ds[n][i] = s[n][i] * (ds[n][i] - delta[stage][column]);
      }
    }
    multiply_columns<kDim>(s, dout + at, dv);
    multiply_columns<kDim>(ds, q + at, dk);
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
  constexpr std::size_t kShared = std::size_t{6} * kTileBytes<kDim>;
  const auto batch = static_cast<unsigned>(forward.batch);
  const unsigned tiles = blocks_for(forward.positions, kRows);
  const std::int64_t pieces = forward.batch * forward.positions * forward.heads * (kDim / 8);
  launch(delta_kernel<kDim>, blocks_for(pieces, kDeltaThreads), kDeltaThreads, 0, forward.stream,
         args);
  if (takes_sm90(forward)) return attention_backward_sm90(args);
  launch(queries_kernel<kDim>, dim3(tiles, static_cast<unsigned>(forward.heads), batch), kThreads,
         kShared, forward.stream, args);
  launch(keys_kernel<kDim>, dim3(tiles, static_cast<unsigned>(forward.kv_heads), batch), kThreads,
         kShared, forward.stream, args);
}

}  // namespace

void attention_backward_bf16(const AttentionBackwardArgs& args) {
  switch (args.forward.head_dim) {
    case 32: return run<32>(args);
    case 64: return run<64>(args);
    default: return run<128>(args);
  }
}

}  // namespace switchyard::models::gpu
