// The experts of a batch's rows as one kernel: a block has an expert and some of its inner columns,
// so what its first product leaves is all that its second one needs of them, and stays in shared
// memory. Each block leaves a part of all outputs. Weights of both products stream through one ring
// in shared memory, filled by warps of their own, also while the stage in front runs; a stage is
// for one of the warps that multiply.
//
//   w13 [2 I, H]: own rows  --+                     +-->  w2 [H, I]: own columns
//   x: the expert's rows  ----+-->  inner [., own] -+-->  parts [block, ., H]
#include <algorithm>

#include "experts/gpu/activation.cuh"
#include "models/gpu/generation/batch/experts.cuh"
#include "models/gpu/generation/batch/whole_experts.hpp"

namespace switchyard::models::gpu {
namespace {

constexpr std::int32_t kLeastExperts = 8;  // of fewer the parts are too many
constexpr int kLeastStages = 4;
constexpr std::int64_t kMostOwnPacks = 32 * kProducers;  // a producer's lane each
/// Shared memory of a block. 204 KB, beside which no stage in front has room, are no faster, and of
/// 150 KB preset m takes 1% longer.
constexpr std::int64_t kRoom = 178 << 10;
constexpr std::int64_t kBesideRoom = 8 << 10;   // slots, and what the device takes
constexpr std::int64_t kRoomOfRows = 64 << 10;  // with what they become; as many as fit

/// What a stage of the second product has: all own columns of some tiles of outputs, whose rows lie
/// row_stride() apart.
struct SliceArgs {
  const int4* w2;      ///< [E, H, I].
  int packs, out;      ///< Of a row of w2; H.
  int packs_of_block;  ///< Most own ones of a block.
  int lanes;           ///< Log2 of those that copy a row.
  int tiles_of_stage, stages;
};

struct WholeExpertsArgs {
  const int4* w13;  ///< [E, 2 I, H].
  SliceArgs slice;
  int packs;              ///< Of a row of w13 and x.
  int piece, num_pieces;  ///< As TilesArgs has them.
  const int4* x;          ///< [rows, H].
  float* parts;           ///< out [blocks of an expert, rows, top_k, H].
  Choice choice;
  int stage_packs, num_stages, rows_at_once;
};

/// A producer thread's share of w2: every kProducers * 32nd lane.
class SlicePieces {
 public:
  __device__ __forceinline__ SlicePieces(const SliceArgs& p, int first, int own)
      : p_(p), own_(own) {
    from_ = p.w2 + std::int64_t{blockIdx.y} * p.out * p.packs + first;
  }
  /// The next stage, behind the last one the first again.
  __device__ __forceinline__ void fill(std::uint32_t stage) {
    const int thread = static_cast<int>(threadIdx.x) - kConsumerThreads;
    const int pack = thread & ((1 << p_.lanes) - 1), stride = row_stride(p_.packs_of_block);
    const int first = at_ * rows();
    if (pack < row_stride(own_) - 1) {  // a whole block, with zeros
#pragma unroll 4
      for (int row = thread >> p_.lanes; row < rows(); row += 32 * kProducers >> p_.lanes) {
        const bool there = first + row < p_.out && pack < own_;
        ptx::cp_async_16(stage + static_cast<std::uint32_t>(16 * (row * stride + pack)),
                         from_ + (there ? std::int64_t{first + row} * p_.packs + pack : 0),
                         there ? 16 : 0);
      }
    }
    if (++at_ == p_.stages) at_ = 0;
  }

 private:
  [[nodiscard]] __device__ __forceinline__ int rows() const {
    return p_.tiles_of_stage * kOutsOfTile;
  }

  const SliceArgs& p_;
  int own_, at_ = 0;
  const int4* from_;
};

__global__ void __maxnreg__(112) streaming_batch_whole_kernel(WholeExpertsArgs p) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ OwnSlots own;
  __shared__ std::uint64_t found_barrier;  // the slots, by all warps that consume
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first = static_cast<int>(blockIdx.x) * p.slice.packs_of_block;
  const int own_packs = min(p.slice.packs_of_block, p.slice.packs - first);
  const WeightRing ring(memory, p.num_stages, p.stage_packs);
  const std::uint32_t found = ptx::shared_address(&found_barrier);
  let_stage_behind_begin();
  if (threadIdx.x == 0) {
    own.count = 0;
    ptx::mbarrier_init(found, 1);
    ring.init(1);
  }
  __syncthreads();
  if (warp >= kConsumers) {
    // Eight inner columns are a tile of the first product and a pack of a row of the second's.
    const TilesArgs tiles{.w = p.w13,
                          .packs = p.packs,
                          .out = p.slice.packs * kPack<Bf16>,
                          .first = first,
                          .end = first + own_packs,
                          .piece = p.piece,
                          .num_pieces = p.num_pieces,
                          .at_once = kConsumers};
    TilePieces<true> gate_and_up(tiles, static_cast<int>(blockIdx.y));
    SlicePieces down(p.slice, first, own_packs);
    RingFiller filler(ring);
    const int of_pass = gate_and_up.stages() + p.slice.stages;
    int in_pass = 0;
    const auto issue = [&] {
      filler.issue([&](std::uint32_t to) {
        if (in_pass < gate_and_up.stages()) {
          gate_and_up.fill(to);
        } else {
          down.fill(to);
        }
      });
      if (++in_pass == of_pass) in_pass = 0;
    };
    const int at_once = min(ring.num(), of_pass);
    while (filler.issued() < at_once) issue();
    const int passes = wait_for_passes(own, p.rows_at_once, found);
    while (filler.issued() < passes * of_pass) issue();
    ptx::cp_async_wait<0>();
    return;
  }
  find_slots_of_all(p.choice, own, found);

  const int own_stride = row_stride(p.slice.packs_of_block), own_whole = row_stride(own_packs) - 1;
  int4* const rows = ring.behind();
  int4* const inner = rows + p.rows_at_once * row_stride(p.packs);
  const std::uint32_t first_row = ptx::shared_address(rows),
                      first_inner = ptx::shared_address(inner);
  const std::uint32_t in_w13 = place_in_weights(p.piece),
                      in_w2 = place_in_weights(p.slice.packs_of_block);
  const int part = lane % kBlockPacks;
  float* const parts = p.parts + std::int64_t{blockIdx.x} * p.choice.slots * p.slice.out;
  RingReader reader(ring);
  const int of_gate_and_up = own_packs * p.num_pieces;
  int begin = 0;  // of the pass, in stages
  for (int base = 0; base < own.count; base += p.rows_at_once) {
    const int count = min(p.rows_at_once, own.count - base);
    if (base > 0) consumers_meet();
    // Zeros behind the own columns, as behind those of w2.
    for (int i = static_cast<int>(threadIdx.x); i < count * (own_whole - own_packs);
         i += kConsumerThreads) {
      const int row = i / (own_whole - own_packs);
      inner[row * own_stride + own_packs + i - row * (own_whole - own_packs)] = int4{};
    }
    gather(
        p.x, p.packs, count, [&](int i) { return own.row[base + i]; }, rows);
    by_tiles(count, [&](auto of_rows) {
      constexpr int kTiles = of_rows();
      std::uint32_t row[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) row[t] = first_row + place_in_rows(t, count, p.packs);
#pragma unroll 1
      for (int tile = warp; tile < own_packs; tile += kConsumers) {
        float sum[kTiles][4] = {};
        const int turn = tile / kConsumers * kConsumers,
                  of_turn = min(kConsumers, own_packs - turn);
#pragma unroll 1
        for (int piece = 0; piece < p.num_pieces; ++piece) {
          const std::uint32_t stage =
              reader.wait_for(begin + turn * p.num_pieces + piece * of_turn + warp);
          multiply_stage<kTiles>(stage + in_w13, min(p.piece, p.packs - piece * p.piece),
                                 static_cast<std::uint32_t>(16 * piece * p.piece), row, sum);
          reader.release();
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int i = t * kRowsOfTile + 2 * part + j;
            if (i >= count) continue;
            Bf16* const to = reinterpret_cast<Bf16*>(inner + i * own_stride + tile);
            store(to + lane / 4, activate<Activation::kSilu, true>(sum[t][j], sum[t][2 + j], {}));
          }
        }
      }
      consumers_meet();
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        row[t] = first_inner + place_in_rows(t, count, p.slice.packs_of_block);
      }
#pragma unroll 1
      for (int n = warp; n < p.slice.stages; n += kConsumers) {
        std::uint32_t w = reader.wait_for(begin + of_gate_and_up + n) + in_w2;
        const int first_column = n * p.slice.tiles_of_stage * kOutsOfTile;
        const int end_column =
            min(first_column + p.slice.tiles_of_stage * kOutsOfTile, p.slice.out);
#pragma unroll 1
        for (int column = first_column + lane / 4; column < end_column + lane / 4;
             column += kOutsOfTile) {
          float sum[kTiles][4] = {};
          multiply_stage<kTiles>(w, own_packs, 0, row, sum);
          w += static_cast<std::uint32_t>(16 * kOutsOfTile * own_stride);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int i = t * kRowsOfTile + 2 * part + j;
              if (i >= count) continue;
              float* const to = parts + std::int64_t{own.slot[base + i]} * p.slice.out + column;
              if (column < p.slice.out) to[0] = sum[t][j];
              if (column + 8 < p.slice.out) to[8] = sum[t][2 + j];
            }
          }
        }
        reader.release();
      }
      begin += of_gate_and_up + p.slice.stages;
    });
  }
}

// ---- launches ----------------------------------------------------------------------------------

std::int64_t packs_of_block(std::int32_t num_experts, std::int64_t i) {
  const std::int64_t packs = i / kPack<Bf16>;
  const std::int64_t blocks =
      std::clamp<std::int64_t>(num_multiprocessors() / num_experts, 1, packs);
  return (packs + blocks - 1) / blocks;
}

/// A block's memory: rows and what they become, and as much of a ring as there is room for.
struct Memory {
  std::int64_t rows_at_once, stage, num_stages, bytes;
  std::int64_t tiles_of_slice, slices;  ///< Of w2: a stage each.
  bool fits;

  Memory(std::int64_t rows, std::int64_t h, std::int64_t own_columns) {
    const std::int64_t of_row = row_bytes(h) + row_bytes(own_columns);
    rows_at_once = std::min({(rows + kRowsOfTile - 1) / kRowsOfTile,
                             std::max<std::int64_t>(kRoomOfRows / of_row / kRowsOfTile, 1),
                             std::int64_t{kTilesAtOnce}}) *
                   kRowsOfTile;
    const std::int64_t of_tile = kOutsOfTile * row_bytes(own_columns);
    stage = std::max(kOutsOfTile * row_bytes(Pieces(h).packs * kPack<Bf16>), of_tile);
    // As many tiles as give all warps that consume as much to do, or nearly.
    const std::int64_t tiles = (h + kOutsOfTile - 1) / kOutsOfTile;
    const auto of_warp = [&](std::int64_t of_slice) {
      const std::int64_t num = (tiles + of_slice - 1) / of_slice;
      return (num + kConsumers - 1) / kConsumers * of_slice;
    };
    tiles_of_slice = 1;
    for (std::int64_t n = 2; n <= stage / of_tile; ++n) {
      if (of_warp(n) <= of_warp(tiles_of_slice)) tiles_of_slice = n;
    }
    slices = (tiles + tiles_of_slice - 1) / tiles_of_slice;
    const std::int64_t but_ring = kBarrierBytes + rows_at_once * of_row;
    const std::int64_t room =
        std::min(kRoom, device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kBesideRoom);
    num_stages = std::clamp<std::int64_t>((room - but_ring) / stage, kLeastStages, kMostStages);
    bytes = but_ring + num_stages * stage;
    fits = bytes <= room;
  }
};

/// Most stages from one that a warp reads to its next one, in passes over `own` tiles of so many
/// pieces and over slices.
std::int64_t longest_gap(std::int64_t own, std::int64_t pieces, std::int64_t slices) {
  std::int64_t longest = 0;
  for (std::int64_t warp = 0; warp < kConsumers; ++warp) {
    std::int64_t last = -1, begin = 0;
    const auto read = [&](std::int64_t stage) {
      longest = std::max(longest, stage - last);
      last = stage;
    };
    for (int pass = 0; pass < 2; ++pass, begin += own * pieces + slices) {
      for (std::int64_t tile = warp; tile < own; tile += kConsumers) {
        const std::int64_t turn = tile - warp;
        for (std::int64_t piece = 0; piece < pieces; ++piece) {
          read(begin + turn * pieces + piece * std::min<std::int64_t>(kConsumers, own - turn) +
               warp);
        }
      }
      for (std::int64_t n = warp; n < slices; n += kConsumers) read(begin + own * pieces + n);
    }
  }
  return longest;
}

}  // namespace

std::int32_t whole_expert_splits(std::int32_t num_experts, std::int64_t i) {
  const std::int64_t own = packs_of_block(num_experts, i);
  return static_cast<std::int32_t>((i / kPack<Bf16> + own - 1) / own);
}

bool has_whole_experts(std::int32_t num_experts, std::int64_t h, std::int64_t i) {
  if (num_experts < kLeastExperts) return false;
  const std::int64_t packs = i / kPack<Bf16>, own = packs_of_block(num_experts, i);
  if (own > kMostOwnPacks) return false;
  const Memory memory(kBatchRows, h, own * kPack<Bf16>);
  const std::int64_t pieces = Pieces(h).count, of_last = packs - (packs - 1) / own * own;
  return memory.fits && std::max(longest_gap(own, pieces, memory.slices),
                                 longest_gap(of_last, pieces, memory.slices)) <= memory.num_stages;
}

void whole_experts(const BatchExpertsArgs& args) {
  const std::int64_t own = packs_of_block(args.num_experts, args.i);
  const Memory memory(args.rows, args.h, own * kPack<Bf16>);
  const Pieces pieces(args.h);
  int lanes = 0;
  while (1 << lanes < row_stride(static_cast<int>(own)) - 1) ++lanes;
  const WholeExpertsArgs params{.w13 = static_cast<const int4*>(args.w13),
                                .slice = {.w2 = static_cast<const int4*>(args.w2),
                                          .packs = static_cast<int>(args.i) / kPack<Bf16>,
                                          .out = static_cast<int>(args.h),
                                          .packs_of_block = static_cast<int>(own),
                                          .lanes = lanes,
                                          .tiles_of_stage = static_cast<int>(memory.tiles_of_slice),
                                          .stages = static_cast<int>(memory.slices)},
                                .packs = static_cast<int>(args.h) / kPack<Bf16>,
                                .piece = static_cast<int>(pieces.packs),
                                .num_pieces = static_cast<int>(pieces.count),
                                .x = static_cast<const int4*>(args.x),
                                .parts = args.parts,
                                .choice = choice_of(args),
                                .stage_packs = static_cast<int>(memory.stage / 16),
                                .num_stages = static_cast<int>(memory.num_stages),
                                .rows_at_once = static_cast<int>(memory.rows_at_once)};
  allow_most_shared_memory(reinterpret_cast<const void*>(streaming_batch_whole_kernel));
  launch_overlapped(streaming_batch_whole_kernel,
                    dim3(static_cast<unsigned>(whole_expert_splits(args.num_experts, args.i)),
                         static_cast<unsigned>(args.num_experts)),
                    kExpertsThreads, static_cast<std::size_t>(memory.bytes), args.stream, params);
}

}  // namespace switchyard::models::gpu
