// The experts of a batch's rows, a kernel a product: a block has an expert and some of its columns.
// Some of its warps stream weights into a ring in shared memory, also while the stage in front
// runs; the others find the rows that have chosen the expert, gather them, and multiply them by a
// tile of weights each.
#include <algorithm>

#include "experts/gpu/activation.cuh"
#include "models/gpu/generation/batch/experts.cuh"
#include "models/gpu/generation/batch/whole_experts.hpp"

namespace switchyard::models::gpu {
namespace {

constexpr int kBarrierOfTeams = 2;  // and behind it

struct ExpertsKernelArgs {
  TilesArgs tiles;  ///< Of [E, 2 I, H] or [E, H, I]; all of them, not the block's.
  const int4* x;    ///< [rows, H] or [rows, top_k, I].
  void* y;          ///< out [rows, top_k, I] bf16 or [rows, top_k, H] f32.
  Choice choice;
  int tiles_of_block;  ///< At most.
  int num_stages, rows_at_once;
  int warps_of_tile;  ///< A power of two: they share its pieces.
};

template <bool kGated>
__global__ void __maxnreg__(64) streaming_batch_kernel(ExpertsKernelArgs p) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ OwnSlots own;
  __shared__ std::uint64_t found_barrier;  // the slots, by all warps that consume
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int part = lane % kBlockPacks;
  TilesArgs tiles = p.tiles;
  tiles.first = min(tiles.end, static_cast<int>(blockIdx.x) * p.tiles_of_block);
  tiles.end = min(tiles.end, tiles.first + p.tiles_of_block);
  const WeightRing ring(memory, p.num_stages, kOutsOfTile * row_stride(tiles.piece));
  const std::uint32_t found = ptx::shared_address(&found_barrier);
  let_stage_behind_begin();
  if (threadIdx.x == 0) {
    own.count = 0;
    ptx::mbarrier_init(found, 1);
    ring.init(kConsumers);
  }
  __syncthreads();
  if (warp >= kConsumers) {
    RingFiller filler(ring);
    TilePieces<kGated> pieces(tiles, static_cast<int>(blockIdx.y));
    const auto issue = [&] { filler.issue([&](std::uint32_t to) { pieces.fill(to); }); };
    const int at_once = min(ring.num(), pieces.stages());
    while (filler.issued() < at_once) issue();
    const int passes = wait_for_passes(own, p.rows_at_once, found);
    while (filler.issued() < passes * pieces.stages()) issue();
    ptx::cp_async_wait<0>();
    return;
  }
  find_slots_of_all(p.choice, own, found);

  int4* const rows = ring.behind();
  const int team = warp / p.warps_of_tile, own_piece = warp % p.warps_of_tile;
  // What warps of a team leave for their first one, [kConsumers, 4 kTiles, 32].
  float* const left =
      reinterpret_cast<float*>(rows + p.rows_at_once * row_stride(tiles.packs)) + lane;
  const std::uint32_t first_row = ptx::shared_address(rows);
  const std::uint32_t of_w = place_in_weights(tiles.piece);
  RingPlace at;
  for (int base = 0; base < own.count; base += p.rows_at_once) {
    const int count = min(p.rows_at_once, own.count - base);
    if (base > 0) consumers_meet();
    gather(
        p.x, tiles.packs, count,
        [&](int i) { return kGated ? own.row[base + i] : own.slot[base + i]; }, rows);
    by_tiles(count, [&](auto of_rows) {
      constexpr int kTiles = of_rows();
      std::uint32_t row[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) row[t] = place_in_rows(t, count, tiles.packs);
#pragma unroll 1
      for (int tile = tiles.first; tile < tiles.end; ++tile) {
        const bool is_own = (tile - tiles.first) % (kConsumers / p.warps_of_tile) == team;
        float sum[kTiles][4] = {};
#pragma unroll 1
        for (int piece = 0; piece < tiles.num_pieces; ++piece) {
          ptx::mbarrier_wait(ring.full(at.slot), at.phase);
          if (is_own && piece % p.warps_of_tile == own_piece) {
            multiply_stage<kTiles>(ptx::shared_address(ring.stage(at.slot)) + of_w,
                                   min(tiles.piece, tiles.packs - piece * tiles.piece),
                                   first_row + static_cast<std::uint32_t>(16 * piece * tiles.piece),
                                   row, sum);
          }
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(ring.empty(at.slot));
          at.advance(ring.num());
        }
        if (!is_own) continue;
        if (p.warps_of_tile > 1) {  // of one tile: there are no more than teams
          float* const own_left = left + warp * 4 * kTilesAtOnce * 32;
#pragma unroll
          for (int n = 0; n < 4 * kTiles && own_piece > 0; ++n) {
            own_left[32 * n] = sum[n / 4][n % 4];
          }
          ptx::named_barrier(kBarrierOfTeams + team, 32 * p.warps_of_tile);
          if (own_piece > 0) continue;
#pragma unroll 1
          for (int w = 1; w < p.warps_of_tile; ++w) {
            const float* const other = own_left + w * 4 * kTilesAtOnce * 32;
#pragma unroll
            for (int n = 0; n < 4 * kTiles; ++n) sum[n / 4][n % 4] += other[32 * n];
          }
        }
        const int column = tile * kTileColumns<kGated> + lane / 4;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int i = t * kRowsOfTile + 2 * part + j;
            if (i >= count) continue;
            const std::int64_t to = std::int64_t{own.slot[base + i]} * tiles.out + column;
            const float upper = sum[t][j], lower = sum[t][2 + j];
            if constexpr (kGated) {
              if (column >= tiles.out) continue;
              store(static_cast<Bf16*>(p.y) + to,
                    activate<Activation::kSilu, true>(upper, lower, {}));
            } else {
              if (column < tiles.out) static_cast<float*>(p.y)[to] = upper;
              if (column + 8 < tiles.out) static_cast<float*>(p.y)[to + 8] = lower;
            }
          }
        }
      }
    });
  }
}

// ---- launches ----------------------------------------------------------------------------------

/// Shared memory of a block: so that one of each kernel stands on a multiprocessor, and the second
/// one asks for its weights while the first one runs.
template <bool kGated>
constexpr std::int64_t kRoom = (kGated ? 118 : 94) << 10;
constexpr std::int64_t kRoomOfRows = 36 << 10;      // as many rows as fit,
constexpr std::int64_t kMostOfRows = 100 << 10;     // at least eight of them.
constexpr std::int64_t kMostBesideRows = 60 << 10;  // slots, barriers, sums, a ring of the fewest

template <bool kGated>
void launch_experts(const BatchExpertsArgs& args, const void* w, const void* x, void* y,
                    std::int64_t in, std::int64_t out) {
  constexpr std::int64_t kLeastStages = 4;
  const std::int64_t tiles = (out + kTileColumns<kGated> - 1) / kTileColumns<kGated>;
  const std::int64_t blocks =
      std::clamp<std::int64_t>(num_multiprocessors() / args.num_experts, 1, tiles);
  // Of an expert that more rows have chosen the weights are read once more.
  const std::int64_t at_once =
      std::min({(args.rows + kRowsOfTile - 1) / kRowsOfTile,
                std::max<std::int64_t>(kRoomOfRows / row_bytes(in) / kRowsOfTile, 1),
                std::int64_t{kTilesAtOnce}}) *
      kRowsOfTile;
  const Pieces pieces(in);
  const std::int64_t of_block = (tiles + blocks - 1) / blocks;
  std::int64_t of_tile = 1;
  while (2 * of_tile * of_block <= kConsumers && 2 * of_tile <= pieces.count) of_tile *= 2;
  const std::int64_t of_sums = of_tile > 1 ? kConsumers * 4 * kTilesAtOnce * 32 * 4 : 0;
  const std::int64_t but_ring = kBarrierBytes + at_once * row_bytes(in) + of_sums;
  const std::int64_t left = kRoom<kGated> - but_ring;
  const std::int64_t of_stage = kOutsOfTile * row_bytes(pieces.packs * kPack<Bf16>);
  const std::int64_t stages = std::clamp<std::int64_t>(left / of_stage, kLeastStages, kMostStages);
  const ExpertsKernelArgs params{.tiles = {.w = static_cast<const int4*>(w),
                                           .packs = static_cast<int>(in) / kPack<Bf16>,
                                           .out = static_cast<int>(out),
                                           .first = 0,
                                           .end = static_cast<int>(tiles),
                                           .piece = static_cast<int>(pieces.packs),
                                           .num_pieces = static_cast<int>(pieces.count)},
                                 .x = static_cast<const int4*>(x),
                                 .y = y,
                                 .choice = choice_of(args),
                                 .tiles_of_block = static_cast<int>(of_block),
                                 .num_stages = static_cast<int>(stages),
                                 .rows_at_once = static_cast<int>(at_once),
                                 .warps_of_tile = static_cast<int>(of_tile)};
  // Of the first kernel more than half of a multiprocessor: two blocks on one would leave another
  // without, where that one has no room yet.
  const std::int64_t bytes = but_ring + stages * of_stage;
  allow_most_shared_memory(reinterpret_cast<const void*>(streaming_batch_kernel<kGated>));
  launch_overlapped(streaming_batch_kernel<kGated>,
                    dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(args.num_experts)),
                    kExpertsThreads,
                    static_cast<std::size_t>(kGated ? std::max(bytes, kRoom<kGated>) : bytes),
                    args.stream, params);
}

}  // namespace

bool batch_experts_fit(std::int64_t h, std::int64_t i) {
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return kRowsOfTile * std::max(row_bytes(h), row_bytes(i)) <= kMostOfRows &&
         kMostOfRows + kMostBesideRows <= most;
}

void batch_experts(const BatchExpertsArgs& args) {
  if (has_whole_experts(args.num_experts, args.h, args.i)) return whole_experts(args);
  launch_experts<true>(args, args.w13, args.x, args.inner, args.h, args.i);
  launch_experts<false>(args, args.w2, args.inner, args.parts, args.i, args.h);
}

std::int32_t batch_expert_splits(std::int32_t num_experts, std::int64_t h, std::int64_t i) {
  return has_whole_experts(num_experts, h, i) ? whole_expert_splits(num_experts, i) : 1;
}

}  // namespace switchyard::models::gpu
