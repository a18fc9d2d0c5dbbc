// The experts of a batch's rows: a block has an expert and some of its columns. Some of its warps
// stream weights into a ring in shared memory, also while the stage in front runs; the others find
// the rows that have chosen the expert, gather them, and multiply them by a tile of weights each.
#include <algorithm>

#include "core/gpu/ptx.cuh"
#include "experts/gpu/activation.cuh"
#include "models/gpu/generation/batch/tiles.cuh"
#include "models/gpu/generation/batch/weight_ring.cuh"

namespace switchyard::models::gpu {
namespace {

constexpr int kTilesAtOnce = 4;  // of an expert's rows
constexpr int kMostSlots = static_cast<int>(kBatchRows * kMostChosen);

/// The rows that have chosen this block's expert, and for which of theirs: row * top_k + k.
struct OwnSlots {
  int count;
  std::uint16_t slot[kMostSlots];
  std::uint8_t row[kMostSlots];
};

__device__ __forceinline__ void consumers_meet() { ptx::named_barrier(1, kConsumerThreads); }
/// Producers and consumers, who come from different places.
__device__ __forceinline__ void all_meet() { ptx::named_barrier(2, kExpertsThreads); }
constexpr int kBarrierOfTeams = 3;  // and behind it

/// By the consumers, in any order, which no sum depends on. Of logits that are not numbers a row
/// may have chosen an expert twice.
__device__ __forceinline__ void find_slots(const ExpertsKernelArgs& p, OwnSlots& own) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < p.slots; i += kConsumerThreads) {
    if (p.expert != nullptr && p.expert[i] != static_cast<int>(blockIdx.y)) continue;
    const int at = atomicAdd(&own.count, 1);
    own.slot[at] = static_cast<std::uint16_t>(i);
    own.row[at] = static_cast<std::uint8_t>(i / p.top_k);
  }
}

/// By the consumers: rows into shared memory, row_stride() apart, with zeros behind them.
template <class RowOf>
__device__ __forceinline__ void gather(const ExpertsKernelArgs& p, int count, const RowOf& row_of,
                                       int4* to) {
  const int stride = row_stride(p.packs), lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / 32; row < count; row += kConsumers) {
    const int4* const from = p.x + std::int64_t{row_of(row)} * p.packs;
#pragma unroll 2
    for (int pack = lane; pack < stride; pack += 32) {
      const bool there = pack < p.packs;
      ptx::cp_async_16(ptx::shared_address(to + row * stride + pack), from + (there ? pack : 0),
                       there ? 16 : 0);
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  consumers_meet();
}

/// Adds the products of a stage's packs, whatever the number of tiles in one order. `w` and `x`:
/// what this lane tells of 8 x 8 matrices, the halves of both sides' rows and columns, at the
/// stage's first column.
template <int kTiles>
__device__ __forceinline__ void multiply_stage(std::uint32_t w, int packs, std::uint32_t x,
                                               const std::uint32_t (&row)[kTiles],
                                               float (&sum)[kTiles][4]) {
#pragma unroll 2
  for (int pack = 0; pack < packs; pack += kBlockPacks) {
    const auto at = static_cast<std::uint32_t>(16 * pack);
    std::uint32_t first[4], second[4];
    ptx::ldmatrix_x4(first, w + at);
    ptx::ldmatrix_x4(second, w + at + 32);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      std::uint32_t of_x[4];
      ptx::ldmatrix_x4(of_x, x + row[t] + at);
      ptx::mma_bf16(sum[t], first, of_x[0], of_x[1]);
      ptx::mma_bf16(sum[t], second, of_x[2], of_x[3]);
    }
  }
}

template <bool kGated>
__global__ void __maxnreg__(64) streaming_batch_kernel(ExpertsKernelArgs p) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ OwnSlots own;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int part = lane % kBlockPacks;
  const int all_tiles = (p.out + kTileColumns<kGated> - 1) / kTileColumns<kGated>;
  const int first_tile = min(all_tiles, static_cast<int>(blockIdx.x) * p.tiles_of_block);
  const int end_tile = min(all_tiles, first_tile + p.tiles_of_block);
  const WeightRing ring(p, memory);
  let_stage_behind_begin();
  if (threadIdx.x == 0) {
    own.count = 0;
    ring.init();
  }
  __syncthreads();
  if (warp >= kConsumers) {
    WeightProducer<kGated> producer(p, ring, first_tile, end_tile);
    const int at_once = min(ring.num(), producer.stages());
    while (producer.issued() < at_once) producer.issue();
    wait_for_stages_in_front();
    all_meet();  // slots have been found
    const int passes = (own.count + p.rows_at_once - 1) / p.rows_at_once;
    while (producer.issued() < passes * producer.stages()) producer.issue();
    ptx::cp_async_wait<0>();
    return;
  }
  wait_for_stages_in_front();
  find_slots(p, own);
  all_meet();

  int4* const rows = ring.behind();
  const int team = warp / p.warps_of_tile, own_piece = warp % p.warps_of_tile;
  // What warps of a team leave for their first one, [kConsumers, 4 kTiles, 32].
  float* const left = reinterpret_cast<float*>(rows + p.rows_at_once * row_stride(p.packs)) + lane;
  const std::uint32_t first_row = ptx::shared_address(rows);
  // A lane tells of a row of eight: weights' upper and lower ones, columns 0 and 8; rows' columns
  // 0, 8, 16 and 24.
  const int eighth = lane / 8, w_row = lane % 8 + eighth % 2 * 8;
  const auto of_w = static_cast<std::uint32_t>(16 * (w_row * row_stride(p.piece) + eighth / 2));
  RingPlace at;
  for (int base = 0; base < own.count; base += p.rows_at_once) {
    const int count = min(p.rows_at_once, own.count - base);
    if (base > 0) consumers_meet();
    gather(
        p, count, [&](int i) { return kGated ? own.row[base + i] : own.slot[base + i]; }, rows);
    by_tiles(count, [&](auto of_rows) {
      constexpr int kTiles = of_rows();
      std::uint32_t row[kTiles];  // rows that there are not are another one
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int of = min(t * kRowsOfTile + lane % 8, count - 1);
        row[t] = static_cast<std::uint32_t>(16 * (of * row_stride(p.packs) + eighth));
      }
#pragma unroll 1
      for (int tile = first_tile; tile < end_tile; ++tile) {
        const bool is_own = (tile - first_tile) % (kConsumers / p.warps_of_tile) == team;
        float sum[kTiles][4] = {};
#pragma unroll 1
        for (int piece = 0; piece < p.num_pieces; ++piece) {
          ptx::mbarrier_wait(ring.full(at.slot), at.phase);
          if (is_own && piece % p.warps_of_tile == own_piece) {
            multiply_stage<kTiles>(ptx::shared_address(ring.stage(at.slot)) + of_w,
                                   min(p.piece, p.packs - piece * p.piece),
                                   first_row + static_cast<std::uint32_t>(16 * piece * p.piece),
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
            const std::int64_t to = std::int64_t{own.slot[base + i]} * p.out + column;
            const float upper = sum[t][j], lower = sum[t][2 + j];
            if constexpr (kGated) {
              if (column >= p.out) continue;
              store(static_cast<Bf16*>(p.y) + to,
                    activate<Activation::kSilu, true>(upper, lower, {}));
            } else {
              if (column < p.out) static_cast<float*>(p.y)[to] = upper;
              if (column + 8 < p.out) static_cast<float*>(p.y)[to + 8] = lower;
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

std::int64_t row_bytes(std::int64_t columns) {
  return std::int64_t{16} * row_stride(static_cast<int>(columns) / kPack<Bf16>);
}

template <bool kGated>
void launch_experts(const BatchExpertsArgs& args, const void* w, const void* x, void* y,
                    std::int64_t in, std::int64_t out) {
  constexpr std::int64_t kPiece = kMostPiece * kPack<Bf16>, kLeastStages = 4;
  const std::int64_t tiles = (out + kTileColumns<kGated> - 1) / kTileColumns<kGated>;
  const std::int64_t blocks =
      std::clamp<std::int64_t>(num_multiprocessors() / args.num_experts, 1, tiles);
  // Of an expert that more rows have chosen the weights are read once more.
  const std::int64_t at_once =
      std::min({(args.rows + kRowsOfTile - 1) / kRowsOfTile,
                std::max<std::int64_t>(kRoomOfRows / row_bytes(in) / kRowsOfTile, 1),
                std::int64_t{kTilesAtOnce}}) *
      kRowsOfTile;
  const std::int64_t pieces = (in + kPiece - 1) / kPiece;
  const std::int64_t piece = ((in + pieces - 1) / pieces + 31) / 32 * 32;
  const std::int64_t num_pieces = (in + piece - 1) / piece;
  const std::int64_t of_block = (tiles + blocks - 1) / blocks;
  std::int64_t of_tile = 1;
  while (2 * of_tile * of_block <= kConsumers && 2 * of_tile <= num_pieces) of_tile *= 2;
  const std::int64_t of_sums = of_tile > 1 ? kConsumers * 4 * kTilesAtOnce * 32 * 4 : 0;
  const std::int64_t but_ring = kBarrierBytes + at_once * row_bytes(in) + of_sums;
  const std::int64_t left = kRoom<kGated> - but_ring;
  const std::int64_t of_stage = kOutsOfTile * row_bytes(piece);
  const std::int64_t stages = std::clamp<std::int64_t>(left / of_stage, kLeastStages, kMostStages);
  const ExpertsKernelArgs params{.w = static_cast<const int4*>(w),
                                 .x = static_cast<const int4*>(x),
                                 .y = y,
                                 .expert = args.expert,
                                 .slots = static_cast<int>(args.rows * args.top_k),
                                 .top_k = args.top_k,
                                 .packs = static_cast<int>(in) / kPack<Bf16>,
                                 .out = static_cast<int>(out),
                                 .tiles_of_block = static_cast<int>(of_block),
                                 .piece = static_cast<int>(piece) / kPack<Bf16>,
                                 .num_pieces = static_cast<int>(num_pieces),
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

void batch_gate_and_up(const BatchExpertsArgs& args) {
  launch_experts<true>(args, args.w13, args.x, args.inner, args.h, args.i);
}

void batch_down(const BatchExpertsArgs& args) {
  launch_experts<false>(args, args.w2, args.inner, args.parts, args.i, args.h);
}

}  // namespace switchyard::models::gpu
