// Products of a batch's rows with a matrix. Each number of x is read by one warp of a block, so
// that it goes from the L2 cache into registers; sums meet in shared memory.
#include "models/gpu/generation/batch/tiles.cuh"

namespace switchyard::models::gpu {
namespace {

constexpr int kAhead = 2;  // blocks of columns of a warp under way

/// Of so many tiles of rows a warp, and groups of warps that share them.
template <int kTiles, int kGroups>
__global__ void __launch_bounds__(kBatchThreads, 2) batch_product_kernel(BatchProductArgs p) {
  constexpr int kShare = kBatchWarps / kGroups;  // warps that share the columns
  constexpr int kChunk = kAhead * kShare * kBlockPacks;
  __shared__ TileSums<kTiles> sums[kBatchWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int of = lane / 4, part = lane % 4, group = warp / kShare;
  const int packs = static_cast<int>(p.in) / kPack<Bf16>, rows = static_cast<int>(p.rows);
  const int first = static_cast<int>(blockIdx.x) * kOutsOfTile, out = static_cast<int>(p.out);
  let_stage_behind_begin();
  if (threadIdx.x == 0) {
    ask_into_l2(static_cast<const int4*>(p.w) + std::int64_t{first} * packs,
                min(kOutsOfTile, out - first) * packs);
  }

  // Rows and outputs that there are not have another one's sums.
  const int4* const upper =
      static_cast<const int4*>(p.w) + std::int64_t{min(first + of, out - 1)} * packs;
  const int4* const lower =
      static_cast<const int4*>(p.w) + std::int64_t{min(first + of + 8, out - 1)} * packs;
  const int4* const x = static_cast<const int4*>(p.x);
  int from[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    from[t] = min((group * kTiles + t) * kRowsOfTile + of, rows - 1) * packs;
  }
  wait_for_stages_in_front();

  float sum[kTiles][4] = {};
  // Neighbouring blocks of columns are of neighbouring warps.
#pragma unroll 1
  for (int chunk = kBlockPacks * (warp % kShare); chunk < packs; chunk += kChunk) {
    int4 of_w[kAhead][2], of_x[kAhead][kTiles];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int pack = chunk + i * kShare * kBlockPacks + part;
      const bool inside = pack < packs;
      of_w[i][0] = inside ? ptx::load_constant_16(upper + pack) : int4{};
      of_w[i][1] = inside ? ptx::load_constant_16(lower + pack) : int4{};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) of_x[i][t] = x[from[t] + (inside ? pack : 0)];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        multiply_block(of_w[i][0], of_w[i][1], of_x[i][t], sum[t]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) sums[warp].leave(t, sum[t]);
  constexpr int kOuts = kOutsOfTile * kTiles * kGroups * kRowsOfTile;
  constexpr int kEach = (kOuts + kBatchThreads - 1) / kBatchThreads;  // of a thread
  const int column = static_cast<int>(threadIdx.x) % kOutsOfTile;
  float added[kEach];
  const auto row_of = [&](int i) {
    return (static_cast<int>(threadIdx.x) + i * kBatchThreads) / kOutsOfTile;
  };
  const auto is_own = [&](int i) { return row_of(i) < rows && first + column < out; };
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const std::int64_t at = std::int64_t{row_of(i)} * out + first + column;
    added[i] = p.add != nullptr && is_own(i) ? p.add[at] : 0.0F;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!is_own(i)) continue;
    const int row = row_of(i), whose = row / (kTiles * kRowsOfTile);
    float total = 0;
#pragma unroll
    for (int w = 0; w < kShare; ++w) {
      total += sums[whose * kShare + w].sum[row - whose * kTiles * kRowsOfTile][column];
    }
    total += added[i];
    const std::int64_t at = std::int64_t{row} * out + first + column;
    if (p.y_is_f32) {
      static_cast<float*>(p.y)[at] = total;
    } else {
      store(static_cast<Bf16*>(p.y) + at, total);
    }
  }
}

}  // namespace

void batch_product(const BatchProductArgs& args) {
  const auto launch_kernel = [&](auto kernel) {
    launch_overlapped(kernel, blocks_for(args.out, kOutsOfTile), kBatchThreads, 0, args.stream,
                      args);
  };
  if (args.rows > 4 * kRowsOfTile) {
    launch_kernel(batch_product_kernel<4, 2>);
  } else {
    by_tiles(static_cast<int>(args.rows),
             [&](auto tiles) { launch_kernel(batch_product_kernel<tiles(), 1>); });
  }
}

}  // namespace switchyard::models::gpu
