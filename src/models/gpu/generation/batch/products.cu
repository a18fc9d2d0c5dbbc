// Products of a batch's rows with a matrix. Each number of x is read by one warp of a block, so
// that it goes from the L2 cache into registers; sums meet in shared memory.
#include "models/gpu/generation/batch/tiles.cuh"

namespace switchyard::models::gpu {
namespace {

constexpr int kAhead = 2;  // blocks of columns of a warp under way
constexpr int kChunk = kAhead * kBatchWarps * kBlockPacks;

template <int kTiles>
__global__ void __launch_bounds__(kBatchThreads, 2) batch_product_kernel(BatchProductArgs p) {
  __shared__ TileSums<kTiles> sums[kBatchWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int of = lane / 4, part = lane % 4;
  const int packs = static_cast<int>(p.in) / kPack<Bf16>, rows = static_cast<int>(p.rows);
  const int first = static_cast<int>(blockIdx.x) * kOutsOfTile, out = static_cast<int>(p.out);
  let_stage_behind_begin();
  if (threadIdx.x == 0) {
    ask_into_l2(static_cast<const int4*>(p.w) + std::int64_t{first} * packs,
                min(kOutsOfTile, out - first) * packs);
  }

  const int4* const weights =
      static_cast<const int4*>(p.w) + std::int64_t{first + of} * packs + part;
  // Neighbouring blocks of columns are of neighbouring warps.
  const auto pack_of = [&](int chunk, int i) {
    return chunk + kBlockPacks * (i * kBatchWarps + warp);
  };
  int4 ahead[kAhead][2];
  const auto load = [&](int pack, int4(&to)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = pack + part < packs && first + of + 8 * half < out;
      to[half] =
          there ? ptx::load_constant_16(weights + std::int64_t{8 * half} * packs + pack) : int4{};
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(pack_of(0, i), ahead[i]);
  wait_for_stages_in_front();

  const int4* const x = static_cast<const int4*>(p.x);
  int from[kTiles];  // rows that there are not have another one's sums
#pragma unroll
  for (int t = 0; t < kTiles; ++t) from[t] = min(t * kRowsOfTile + of, rows - 1) * packs;
  float sum[kTiles][4] = {};
#pragma unroll 1
  for (int chunk = 0; chunk < packs; chunk += kChunk) {
    if (pack_of(chunk, 0) >= packs) break;  // of the whole warp
    int4 of_x[kAhead][kTiles];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int pack = pack_of(chunk, i) + part;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) of_x[i][t] = x[from[t] + (pack < packs ? pack : 0)];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        multiply_block(ahead[i][0], ahead[i][1], of_x[i][t], sum[t]);
      }
      load(pack_of(chunk + kChunk, i), ahead[i]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) sums[warp].leave(t, sum[t]);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < rows * kOutsOfTile; i += kBatchThreads) {
    const int row = i / kOutsOfTile, column = i % kOutsOfTile;
    if (first + column >= out) continue;
    const std::int64_t at = std::int64_t{row} * out + first + column;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kBatchWarps; ++w) total += sums[w].sum[row][column];
    if (p.add != nullptr) total += p.add[at];
    if (p.y_is_f32) {
      static_cast<float*>(p.y)[at] = total;
    } else {
      store(static_cast<Bf16*>(p.y) + at, total);
    }
  }
}

}  // namespace

void batch_product(const BatchProductArgs& args) {
  const auto launch_tiles = [&](auto tiles) {
    launch_overlapped(batch_product_kernel<tiles()>, blocks_for(args.out, kOutsOfTile),
                      kBatchThreads, 0, args.stream, args);
  };
  if (args.rows > 4 * kRowsOfTile) {
    launch_tiles(std::integral_constant<int, kBatchRows / kRowsOfTile>{});
  } else {
    by_tiles(static_cast<int>(args.rows), launch_tiles);
  }
}

}  // namespace switchyard::models::gpu
