// The experts of a batch's rows: a block has an expert and some of its columns, finds the rows that
// have chosen it, and gathers them into shared memory, from where its warps multiply them.
#include <algorithm>

#include "experts/gpu/activation.cuh"
#include "models/gpu/generation/batch/tiles.cuh"

namespace switchyard::models::gpu {
namespace {

constexpr int kAhead = 4;  // blocks of columns of a warp whose weights are under way
constexpr int kChunk = kAhead * kBlockPacks;
/// Of an expert: registers for more would leave no room for a second kernel's blocks.
constexpr int kTilesAtOnce = 4;
constexpr int kMostSlots = static_cast<int>(kBatchRows * kMostChosen);

/// The rows that have chosen this block's expert, and for which of theirs: row * top_k + k.
struct OwnSlots {
  int count;
  std::uint16_t slot[kMostSlots];
  std::uint8_t row[kMostSlots];
};

/// In any order, which no sum depends on. Of logits that are not numbers a row may have chosen an
/// expert twice.
__device__ __forceinline__ void find_slots(const BatchExpertsArgs& p, OwnSlots& own) {
  const int slots = static_cast<int>(p.rows) * p.top_k, expert = static_cast<int>(blockIdx.y);
  if (threadIdx.x == 0) own.count = p.expert == nullptr ? slots : 0;
  __syncthreads();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < slots; i += kBatchThreads) {
    if (p.expert != nullptr && p.expert[i] != expert) continue;
    const int at = p.expert == nullptr ? i : atomicAdd(&own.count, 1);
    own.slot[at] = static_cast<std::uint16_t>(i);
    own.row[at] = static_cast<std::uint8_t>(i / p.top_k);
  }
  __syncthreads();
}

/// Rows of `packs` 16 bytes into shared memory, padded_packs() apart, with zeros behind them.
template <class RowOf>
__device__ __forceinline__ void gather(const void* from, int count, int packs, const RowOf& row_of,
                                       int4* to) {
  const int stride = padded_packs(packs), lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / 32; row < count; row += kBatchWarps) {
    const int4* const of_row = static_cast<const int4*>(from) + std::int64_t{row_of(row)} * packs;
#pragma unroll 2
    for (int pack = lane; pack < stride; pack += 32) {
      const bool there = pack < packs;
      ptx::cp_async_16(ptx::shared_address(to + row * stride + pack), of_row + (there ? pack : 0),
                       there ? 16 : 0);
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
}

/// A lane's two rows of weights of a tile, so many packs apart, and the pack before which it reads
/// them.
struct TileWeights {
  const int4* upper;
  int to_lower, end;
};

/// A lane's weights of the next kAhead blocks of columns.
struct WeightsAhead {
  int4 of[kAhead][2];

  __device__ __forceinline__ void load(int i, const TileWeights& from, int pack) {
    const bool there = pack + static_cast<int>(threadIdx.x) % kBlockPacks < from.end;
    const int4* const upper = from.upper + pack;
    of[i][0] = there ? ptx::load_constant_16(upper) : int4{};
    of[i][1] = there ? ptx::load_constant_16(upper + from.to_lower) : int4{};
  }
  __device__ __forceinline__ void begin(const TileWeights& from, int pack) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i, from, pack + kBlockPacks * i);
  }
};

/// Where a lane has its part of each tile's row; rows that there are not are another one.
template <int kTiles>
struct TileRows {
  const int4* rows;
  int at[kTiles];
  __device__ __forceinline__ TileRows(const int4* first, int count, int packs) : rows(first) {
    const int lane = static_cast<int>(threadIdx.x) % 32, stride = padded_packs(packs);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      at[t] = min(t * kRowsOfTile + lane / 4, count - 1) * stride + lane % kBlockPacks;
    }
  }
};

/// Adds the products of packs [begin, end) of a tile, of which the first are under way, as
/// afterwards those of `then` are.
template <int kTiles>
__device__ __forceinline__ void multiply_tile(WeightsAhead& ahead, const TileRows<kTiles>& x,
                                              const TileWeights& now, const TileWeights& then,
                                              int begin, int end, float (&sum)[kTiles][4]) {
#pragma unroll 1
  for (int chunk = begin; chunk < end; chunk += kChunk) {
    const bool last = chunk + kChunk >= end;
    const TileWeights next{last ? then.upper : now.upper, last ? then.to_lower : now.to_lower,
                           last ? then.end : now.end};
    const int from = last ? begin : chunk + kChunk;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int pack = chunk + kBlockPacks * i;
      if (pack < end) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          multiply_block(ahead.of[i][0], ahead.of[i][1], x.rows[x.at[t] + pack], sum[t]);
        }
      }
      ahead.load(i, next, from + kBlockPacks * i);
    }
  }
}

/// Tiles that are this block's, of `all` of an expert.
struct OwnTiles {
  int first, end;
  __device__ __forceinline__ explicit OwnTiles(int all) {
    const int blocks = static_cast<int>(gridDim.x), each = (all + blocks - 1) / blocks;
    first = min(all, static_cast<int>(blockIdx.x) * each);
    end = min(all, first + each);
  }
};

/// Rows of weights that a thread of a block asks for into the L2 cache, of a matrix or of two.
struct AskedRows {
  const int4* first;
  std::int64_t to_other;  ///< Packs; 0: one matrix.
  int packs, next, end;   ///< Of a row; rows.

  __device__ __forceinline__ void until(int row) {
    const int to = min(row, end), count = (to - next) * packs;
    if (count <= 0) return;
    const int4* const from = first + std::int64_t{next} * packs;
    ask_into_l2(from, count);
    if (to_other != 0) ask_into_l2(from + to_other, count);
    next = to;
  }
};
/// How far ahead, in packs of 16 bytes; at least what the warps read at a time.
constexpr int kAskedPacks = (96 << 10) / 16;

// ---- gate and up: a tile is eight gate rows and their up rows, of a warp
// -------------------------

__global__ void __launch_bounds__(kBatchThreads, 2)
    gate_and_up_kernel(BatchExpertsArgs p, int rows_at_once) {
  extern __shared__ int4 rows[];
  __shared__ OwnSlots own;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int of = lane / 4, part = lane % 4;
  const int packs = static_cast<int>(p.h) / kPack<Bf16>, inner = static_cast<int>(p.i);
  const OwnTiles tiles((inner + 7) / 8);
  let_stage_behind_begin();

  const int4* const gates =
      static_cast<const int4*>(p.w13) + std::int64_t{2} * blockIdx.y * inner * packs + part;
  const auto weights_of = [&](int tile) -> TileWeights {
    const int column = min(tile * 8 + of, inner - 1);
    return {gates + std::int64_t{column} * packs, inner * packs, tile < tiles.end ? packs : 0};
  };
  const std::int64_t to_up = std::int64_t{inner} * packs;
  AskedRows asked{gates - part, to_up, packs, tiles.first * 8, min(tiles.end * 8, inner)};
  const int rows_ahead = max(8 * kBatchWarps, kAskedPacks / (2 * packs));
  if (threadIdx.x == 0) asked.until(asked.next + rows_ahead);
  WeightsAhead ahead;
  ahead.begin(weights_of(tiles.first + warp), 0);
  wait_for_stages_in_front();
  find_slots(p, own);

  Bf16* const to = static_cast<Bf16*>(p.inner);
  for (int base = 0; base < own.count; base += rows_at_once) {
    const int count = min(rows_at_once, own.count - base);
    if (base > 0) {
      ahead.begin(weights_of(tiles.first + warp), 0);
      __syncthreads();
    }
    gather(
        p.x, count, packs, [&](int row) { return own.row[base + row]; }, rows);
    by_tiles(count, [&](auto of_rows) {
      constexpr int kTiles = of_rows();
      const TileRows<kTiles> from(rows, count, packs);
#pragma unroll 1
      for (int tile = tiles.first + warp; tile < tiles.end; tile += kBatchWarps) {
        if (threadIdx.x == 0) asked.until((tile + kBatchWarps) * 8 + rows_ahead);
        float sum[kTiles][4] = {};
        multiply_tile<kTiles>(ahead, from, weights_of(tile), weights_of(tile + kBatchWarps), 0,
                              packs, sum);
        // Gate and up of a column of this lane's with rows 2 part and the next of each tile.
        const int column = tile * 8 + of;
        if (column >= inner) continue;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int row = t * kRowsOfTile + 2 * part + j;
            if (row >= count) continue;
            store(to + std::int64_t{own.slot[base + row]} * inner + column,
                  activate<Activation::kSilu, true>(sum[t][j], sum[t][2 + j], {}));
          }
        }
      }
    });
  }
}

// ---- down: a tile is 16 outputs, of a team of warps that share the columns
// -----------------------

__global__ void __launch_bounds__(kBatchThreads, 2)
    down_kernel(BatchExpertsArgs p, int rows_at_once, int warps_of_team) {
  extern __shared__ int4 rows[];
  __shared__ OwnSlots own;
  __shared__ TileSums<kTilesAtOnce> sums[kBatchWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int packs = static_cast<int>(p.i) / kPack<Bf16>, hidden = static_cast<int>(p.h);
  const int teams = kBatchWarps / warps_of_team, team = warp / warps_of_team;
  const OwnTiles tiles((hidden + kOutsOfTile - 1) / kOutsOfTile);
  // Of the team's columns this warp's.
  const int blocks = (packs + kBlockPacks - 1) / kBlockPacks;
  const int each = (blocks + warps_of_team - 1) / warps_of_team * kBlockPacks;
  const int begin = (warp - team * warps_of_team) * each, end = min(packs, begin + each);
  let_stage_behind_begin();

  const int4* const weights = static_cast<const int4*>(p.w2) +
                              std::int64_t{blockIdx.y} * hidden * packs + lane % kBlockPacks;
  const auto weights_of = [&](int tile) -> TileWeights {
    const int out = min(tile * kOutsOfTile + lane / 4, hidden - 1);
    return {weights + std::int64_t{out} * packs, out + 8 < hidden ? 8 * packs : 0,
            tile < tiles.end ? end : 0};
  };
  AskedRows asked{weights - lane % kBlockPacks, 0, packs, tiles.first * kOutsOfTile,
                  min(tiles.end * kOutsOfTile, hidden)};
  const int rows_ahead = max(kOutsOfTile * teams, kAskedPacks / packs);
  if (threadIdx.x == 0) asked.until(asked.next + rows_ahead);
  WeightsAhead ahead;
  ahead.begin(weights_of(tiles.first + team), begin);
  wait_for_stages_in_front();
  find_slots(p, own);

  for (int base = 0; base < own.count; base += rows_at_once) {
    const int count = min(rows_at_once, own.count - base);
    if (base > 0) {
      ahead.begin(weights_of(tiles.first + team), begin);
      __syncthreads();
    }
    gather(
        p.inner, count, packs, [&](int row) { return own.slot[base + row]; }, rows);
    by_tiles(count, [&](auto of_rows) {
      constexpr int kTiles = of_rows();
      const TileRows<kTiles> from(rows, count, packs);
#pragma unroll 1
      for (int round = tiles.first; round < tiles.end; round += teams) {
        if (threadIdx.x == 0) asked.until((round + teams) * kOutsOfTile + rows_ahead);
        float sum[kTiles][4] = {};
        multiply_tile<kTiles>(ahead, from, weights_of(round + team),
                              weights_of(round + team + teams), begin, end, sum);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) sums[warp].leave(t, sum[t]);
        __syncthreads();
        const int of_team = count * kOutsOfTile;
        for (int i = static_cast<int>(threadIdx.x); i < teams * of_team; i += kBatchThreads) {
          const int whose = i / of_team, row = (i - whose * of_team) / kOutsOfTile;
          const int column = i % kOutsOfTile;
          const int out = (round + whose) * kOutsOfTile + column;
          if (round + whose >= tiles.end || out >= hidden) continue;
          float total = 0;
          for (int w = 0; w < warps_of_team; ++w) {
            total += sums[whose * warps_of_team + w].sum[row][column];
          }
          p.parts[std::int64_t{own.slot[base + row]} * hidden + out] = total;
        }
        __syncthreads();
      }
    });
  }
}

// ---- launches ----------------------------------------------------------------------------------

// Of shared memory for rows: so that blocks of both kernels stand on a multiprocessor together, and
// the second one asks for its weights while the first one runs.
constexpr std::int64_t kRoomOfRows = 80 << 10;

std::int64_t row_bytes(std::int64_t columns) {
  return std::int64_t{16} * padded_packs(static_cast<int>(columns) / kPack<Bf16>);
}

/// Rows that a block gathers at a time; for an expert that more have chosen it reads its weights
/// once more.
int rows_at_once(std::int64_t rows, std::int64_t columns) {
  const std::int64_t tiles = (rows + kRowsOfTile - 1) / kRowsOfTile;
  const std::int64_t most = kRoomOfRows / row_bytes(columns) / kRowsOfTile;
  return kRowsOfTile * static_cast<int>(std::min({tiles, most, std::int64_t{kTilesAtOnce}}));
}

dim3 blocks_of(const BatchExpertsArgs& args, std::int64_t tiles) {
  const std::int64_t of_expert =
      std::clamp<std::int64_t>(num_multiprocessors() / args.num_experts, 1, tiles);
  return {static_cast<unsigned>(of_expert), static_cast<unsigned>(args.num_experts)};
}

/// As leaves the fewest blocks of columns for a warp, one after the other.
int choose_team(std::int64_t tiles_of_block, std::int64_t column_blocks) {
  const auto cost = [&](std::int64_t warps) {
    const std::int64_t teams = kBatchWarps / warps;
    return (tiles_of_block + teams - 1) / teams * ((column_blocks + warps - 1) / warps);
  };
  int best = 1;
  for (const int warps : {2, 4, 8}) {
    if (cost(warps) < cost(best)) best = warps;
  }
  return best;
}

}  // namespace

bool batch_experts_fit(std::int64_t h, std::int64_t i) {
  return kRowsOfTile * std::max(row_bytes(h), row_bytes(i)) <= kRoomOfRows;
}

void batch_gate_and_up(const BatchExpertsArgs& args) {
  const int at_once = rows_at_once(args.rows, args.h);
  // More than half: two blocks on one multiprocessor would leave another one without, where that
  // has no room yet.
  const auto bytes =
      static_cast<std::size_t>(std::max<std::int64_t>(at_once * row_bytes(args.h), 116 << 10));
  allow_most_shared_memory(reinterpret_cast<const void*>(gate_and_up_kernel));
  launch_overlapped(gate_and_up_kernel, blocks_of(args, (args.i + 7) / 8), kBatchThreads, bytes,
                    args.stream, args, at_once);
}

void batch_down(const BatchExpertsArgs& args) {
  const int at_once = rows_at_once(args.rows, args.i);
  const auto bytes = static_cast<std::size_t>(at_once * row_bytes(args.i));
  const std::int64_t tiles = (args.h + kOutsOfTile - 1) / kOutsOfTile;
  const dim3 blocks = blocks_of(args, tiles);
  const int team = choose_team((tiles + blocks.x - 1) / blocks.x, (args.i + 31) / 32);
  allow_most_shared_memory(reinterpret_cast<const void*>(down_kernel));
  launch_overlapped(down_kernel, blocks, kBatchThreads, bytes, args.stream, args, at_once, team);
}

}  // namespace switchyard::models::gpu
