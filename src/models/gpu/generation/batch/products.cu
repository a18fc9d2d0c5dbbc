// Products of a batch's rows with a matrix. Each number of x is read by one warp of a block, so
// that it goes from the L2 cache into registers; sums meet in shared memory.
#include "models/gpu/generation/batch/tiles.cuh"

namespace switchyard::models::gpu {
namespace {

constexpr int kAhead = 2;  // blocks of columns of a warp under way

/// Of so many tiles of outputs a block, tiles of rows a warp, and groups of warps that share these.
template <int kOuts, int kTiles, int kGroups>
__global__ void __launch_bounds__(kBatchThreads, kOuts > 1 ? 1 : 2)
    batch_product_kernel(BatchProductArgs p) {
  constexpr int kShare = kBatchWarps / kGroups;  // warps that share the columns
  constexpr int kChunk = kAhead * kShare * kBlockPacks;
  __shared__ TileSums<kTiles> sums[kBatchWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int of = lane / 4, part = lane % 4, group = warp / kShare;
  const int packs = static_cast<int>(p.in) / kPack<Bf16>, rows = static_cast<int>(p.rows);
  const int first = static_cast<int>(blockIdx.x) * kOuts * kOutsOfTile;
  const int out = static_cast<int>(p.out);
  let_stage_behind_begin();
  const int4* const weights = static_cast<const int4*>(p.w);
  if (threadIdx.x == 0) {
    ask_into_l2(weights + std::int64_t{first} * packs,
                min(kOuts * kOutsOfTile, out - first) * packs);
  }

  // Rows and outputs that there are not have another one's sums.
  const int4* row_of_w[kOuts][2];
#pragma unroll
  for (int o = 0; o < kOuts; ++o) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first + o * kOutsOfTile + 8 * half + of, out - 1);
      row_of_w[o][half] = weights + std::int64_t{row} * packs;
    }
  }
  const int4* const x = static_cast<const int4*>(p.x);
  int from[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    from[t] = min((group * kTiles + t) * kRowsOfTile + of, rows - 1) * packs;
  }
  wait_for_stages_in_front();

  float sum[kOuts][kTiles][4] = {};
  // Neighbouring blocks of columns are of neighbouring warps.
#pragma unroll 1
  for (int chunk = kBlockPacks * (warp % kShare); chunk < packs; chunk += kChunk) {
    int4 of_w[kAhead][kOuts][2], of_x[kAhead][kTiles];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int pack = chunk + i * kShare * kBlockPacks + part;
      const bool inside = pack < packs;
#pragma unroll
      for (int o = 0; o < kOuts; ++o) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          of_w[i][o][half] = inside ? ptx::load_constant_16(row_of_w[o][half] + pack) : int4{};
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) of_x[i][t] = x[from[t] + (inside ? pack : 0)];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int o = 0; o < kOuts; ++o) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          multiply_block(of_w[i][o][0], of_w[i][o][1], of_x[i][t], sum[o][t]);
        }
      }
    }
  }
  constexpr int kAll = kOutsOfTile * kTiles * kGroups * kRowsOfTile;
  constexpr int kEach = (kAll + kBatchThreads - 1) / kBatchThreads;  // of a thread
  const int column = first + static_cast<int>(threadIdx.x) % kOutsOfTile;
  const auto row_of = [&](int i) {
    return (static_cast<int>(threadIdx.x) + i * kBatchThreads) / kOutsOfTile;
  };
#pragma unroll
  for (int o = 0; o < kOuts; ++o) {
    if (o > 0) __syncthreads();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) sums[warp].leave(t, sum[o][t]);
    const int own = column + o * kOutsOfTile;
    const auto is_own = [&](int i) { return row_of(i) < rows && own < out; };
    float added[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const std::int64_t at = std::int64_t{row_of(i)} * out + own;
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
        total += sums[whose * kShare + w].sum[row - whose * kTiles * kRowsOfTile]
                                             [static_cast<int>(threadIdx.x) % kOutsOfTile];
      }
      total += added[i];
      const std::int64_t at = std::int64_t{row} * out + own;
      if (p.y_is_f32) {
        static_cast<float*>(p.y)[at] = total;
      } else {
        store(static_cast<Bf16*>(p.y) + at, total);
      }
    }
  }
}

}  // namespace

void batch_product(const BatchProductArgs& args) {
  const auto launch_kernel = [&](auto kernel, int outs) {
    launch_overlapped(kernel, blocks_for(args.out, outs * kOutsOfTile), kBatchThreads, 0,
                      args.stream, args);
  };
  if (args.rows <= 4 * kRowsOfTile) {
    return by_tiles(static_cast<int>(args.rows),
                    [&](auto tiles) { launch_kernel(batch_product_kernel<1, tiles(), 1>, 1); });
  }
  // All rows come from the L2 cache for each block: rather fewer blocks than more than fit at once.
  if (blocks_for(args.out, kOutsOfTile) <= static_cast<unsigned>(num_multiprocessors())) {
    return launch_kernel(batch_product_kernel<1, 4, 2>, 1);
  }
  launch_kernel(batch_product_kernel<2, 4, 2>, 2);
}

}  // namespace switchyard::models::gpu
