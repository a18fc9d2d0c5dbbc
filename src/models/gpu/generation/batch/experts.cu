// The experts of a batch's rows: a block has an expert and some of its columns. A warp of it
// streams weights into a ring in shared memory, also while the stage in front runs; the others find
// the rows that have chosen the expert, gather them, and multiply them by a tile of weights each.
#include <algorithm>

#include "core/gpu/ptx.cuh"
#include "experts/gpu/activation.cuh"
#include "models/gpu/generation/batch/tiles.cuh"

namespace switchyard::models::gpu {
namespace {

constexpr int kConsumers = 8, kProducers = 4;  // warps
constexpr int kConsumerThreads = 32 * kConsumers, kThreads = kConsumerThreads + 32 * kProducers;
constexpr int kRowsOfProducer = kOutsOfTile / kProducers;
constexpr int kMostPiece = 32;  // packs of a row in a stage, a lane each
constexpr int kMostStages = 16;
constexpr int kTilesAtOnce = 4;  // of an expert's rows
constexpr int kMostSlots = static_cast<int>(kBatchRows * kMostChosen);
constexpr int kBarrierBytes = 16 * kMostStages;  // full and empty of each stage

/// The first product has tiles of eight gate rows and their up rows, the second of 16 outputs.
template <bool kGated>
constexpr int kTileColumns = kGated ? kOutsOfTile / 2 : kOutsOfTile;

struct ExpertsKernelArgs {
  const int4* w;               ///< [E, 2 I, H] or [E, H, I].
  const int4* x;               ///< [rows, H] or [rows, top_k, I].
  void* y;                     ///< out [rows, top_k, I] bf16 or [rows, top_k, H] f32.
  const std::int32_t* expert;  ///< As BatchExpertsArgs has them.
  int slots, top_k;
  int packs, out;         ///< Packs of 16 bytes of a row of weights; columns.
  int tiles_of_block;     ///< At most.
  int piece, num_pieces;  ///< Packs of a row in a stage; how many make a row.
  int num_stages, rows_at_once;
};

/// The rows that have chosen this block's expert, and for which of theirs: row * top_k + k.
struct OwnSlots {
  int count;
  std::uint16_t slot[kMostSlots];
  std::uint8_t row[kMostSlots];
};

__device__ __forceinline__ void consumers_meet() { ptx::named_barrier(1, kConsumerThreads); }

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

/// Packs from one row to the next: whole blocks of 32 columns, and an odd number, so that eight
/// rows that are read together have all banks.
[[nodiscard]] __host__ __device__ constexpr int row_stride(int packs) {
  return (packs + kBlockPacks - 1) / kBlockPacks * kBlockPacks + 1;
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

/// Stages of a ring: a piece of the columns of 16 rows of weights each, row_stride() apart. A
/// tile is one warp's; the others come by too, or a barrier's parity would tell them nothing.
class Ring {
 public:
  __device__ __forceinline__ Ring(const ExpertsKernelArgs& p, unsigned char* memory)
      : barriers_(ptx::shared_address(memory)),
        stages_(reinterpret_cast<int4*>(memory + kBarrierBytes)),
        num_(p.num_stages),
        packs_(kOutsOfTile * row_stride(p.piece)) {}

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < num_; ++i) {
      ptx::mbarrier_init(full(i), 32 * kProducers);
      ptx::mbarrier_init(empty(i), kConsumers);
    }
  }
  [[nodiscard]] __device__ __forceinline__ int num() const { return num_; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t full(int slot) const {
    return barriers_ + 16 * slot;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t empty(int slot) const {
    return full(slot) + 8;
  }
  [[nodiscard]] __device__ __forceinline__ int4* stage(int slot) const {
    return stages_ + slot * packs_;
  }
  [[nodiscard]] __device__ __forceinline__ int4* behind() const { return stage(num_); }

 private:
  std::uint32_t barriers_;
  int4* stages_;
  int num_, packs_;
};

/// Where a role stands in the ring.
struct Place {
  int slot = 0;
  std::uint32_t phase = 0;
  __device__ __forceinline__ void go_on(int num) {
    if (++slot < num) return;
    slot = 0;
    phase ^= 1U;
  }
};

/// What a producer warp does: some rows of stage after stage of the block's weights.
template <bool kGated>
class Producer {
 public:
  __device__ __forceinline__ Producer(const ExpertsKernelArgs& p, const Ring& ring, int first_tile,
                                      int end_tile)
      : p_(p), ring_(ring), first_(first_tile), end_(end_tile), tile_(first_tile) {
    const int row = (static_cast<int>(threadIdx.x) / 32 - kConsumers) * kRowsOfProducer;
    const std::int64_t matrix =
        (kGated ? 2 : 1) * blockIdx.y + (row >= kColumns ? 1 : 0);  // gate or up
    column_ = row % kColumns;
    from_ = p.w + matrix * p.out * p.packs + lane();
    to_ = static_cast<std::uint32_t>(16 * (row * row_stride(p.piece) + lane()));
  }

  /// Of one pass over the weights.
  [[nodiscard]] __device__ __forceinline__ int stages() const {
    return (end_ - first_) * p_.num_pieces;
  }
  [[nodiscard]] __device__ __forceinline__ int issued() const { return issued_; }

  __device__ __forceinline__ void issue() {
    if (issued_ >= ring_.num()) ptx::mbarrier_wait(ring_.empty(at_.slot), at_.phase ^ 1U);
    const int first = piece_ * p_.piece, column = tile_ * kColumns + column_;
    const int packs = min(p_.piece, p_.packs - first);
    if (lane() < row_stride(packs) - 1) {  // a whole block, with zeros
      const int4* from = from_ + std::int64_t{column} * p_.packs + first;
      std::uint32_t to = ptx::shared_address(ring_.stage(at_.slot)) + to_;
#pragma unroll
      for (int i = 0; i < kRowsOfProducer; ++i) {
        const bool there = column + i < p_.out && lane() < packs;
        ptx::cp_async_16(to, there ? from : from_, there ? 16 : 0);
        from += p_.packs;
        to += static_cast<std::uint32_t>(16 * row_stride(p_.piece));
      }
    }
    ptx::cp_async_arrive(ring_.full(at_.slot));
    ++issued_;
    at_.go_on(ring_.num());
    if (++piece_ < p_.num_pieces) return;
    piece_ = 0;
    if (++tile_ == end_) tile_ = first_;
  }

 private:
  static constexpr int kColumns = kTileColumns<kGated>;
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

  const ExpertsKernelArgs& p_;
  const Ring& ring_;
  int first_, end_, tile_, column_, piece_ = 0, issued_ = 0;
  const int4* from_;
  std::uint32_t to_;
  Place at_;
};

/// Sums of many tiles of rows have others to wait for; of few each has two.
template <int kTiles>
constexpr int kChains = kTiles < kTilesAtOnce ? 2 : 1;

/// Adds the products of a stage's packs. `w` and `x`: what this lane tells of 8 x 8 matrices, which
/// are the halves of both sides' rows and columns, at the stage's first column.
template <int kTiles>
__device__ __forceinline__ void multiply_stage(std::uint32_t w, int packs, std::uint32_t x,
                                               const std::uint32_t (&row)[kTiles],
                                               float (&sum)[kChains<kTiles>][kTiles][4]) {
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
      ptx::mma_bf16(sum[0][t], first, of_x[0], of_x[1]);
      ptx::mma_bf16(sum[kChains<kTiles> - 1][t], second, of_x[2], of_x[3]);
    }
  }
}

template <bool kGated>
__global__ void __maxnreg__(64) experts_kernel(ExpertsKernelArgs p) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ OwnSlots own;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int part = lane % kBlockPacks;
  const int all_tiles = (p.out + kTileColumns<kGated> - 1) / kTileColumns<kGated>;
  const int first_tile = min(all_tiles, static_cast<int>(blockIdx.x) * p.tiles_of_block);
  const int end_tile = min(all_tiles, first_tile + p.tiles_of_block);
  const Ring ring(p, memory);
  let_stage_behind_begin();
  if (threadIdx.x == 0) {
    own.count = 0;
    ring.init();
  }
  __syncthreads();
  if (warp >= kConsumers) {
    Producer<kGated> producer(p, ring, first_tile, end_tile);
    const int at_once = min(ring.num(), producer.stages());
    while (producer.issued() < at_once) producer.issue();
    wait_for_stages_in_front();
    __syncthreads();  // slots have been found
    const int passes = (own.count + p.rows_at_once - 1) / p.rows_at_once;
    while (producer.issued() < passes * producer.stages()) producer.issue();
    ptx::cp_async_wait<0>();
    return;
  }
  wait_for_stages_in_front();
  find_slots(p, own);
  __syncthreads();

  int4* const rows = ring.behind();
  const std::uint32_t first_row = ptx::shared_address(rows);
  // A lane tells of a row of eight: weights' upper and lower ones, columns 0 and 8; rows' columns
  // 0, 8, 16 and 24.
  const int eighth = lane / 8, w_row = lane % 8 + eighth % 2 * 8;
  const auto of_w = static_cast<std::uint32_t>(16 * (w_row * row_stride(p.piece) + eighth / 2));
  Place at;
  for (int base = 0; base < own.count; base += p.rows_at_once) {
    const int count = min(p.rows_at_once, own.count - base);
    if (base > 0) consumers_meet();
    gather(
        p, count, [&](int i) { return kGated ? own.row[base + i] : own.slot[base + i]; }, rows);
    by_tiles(count, [&](auto of_rows) {
      constexpr int kTiles = of_rows();
      constexpr bool kHasTwo = kChains<kTiles> == 2;
      std::uint32_t row[kTiles];  // rows that there are not are another one
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int of = min(t * kRowsOfTile + lane % 8, count - 1);
        row[t] = static_cast<std::uint32_t>(16 * (of * row_stride(p.packs) + eighth));
      }
#pragma unroll 1
      for (int tile = first_tile; tile < end_tile; ++tile) {
        const bool is_own = (tile - first_tile) % kConsumers == warp;
        float sum[kChains<kTiles>][kTiles][4] = {};
#pragma unroll 1
        for (int piece = 0; piece < p.num_pieces; ++piece) {
          ptx::mbarrier_wait(ring.full(at.slot), at.phase);
          if (is_own) {
            multiply_stage<kTiles>(ptx::shared_address(ring.stage(at.slot)) + of_w,
                                   min(p.piece, p.packs - piece * p.piece),
                                   first_row + static_cast<std::uint32_t>(16 * piece * p.piece),
                                   row, sum);
          }
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(ring.empty(at.slot));
          at.go_on(ring.num());
        }
        if (!is_own) continue;
        const int column = tile * kTileColumns<kGated> + lane / 4;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int i = t * kRowsOfTile + 2 * part + j;
            if (i >= count) continue;
            const std::int64_t to = std::int64_t{own.slot[base + i]} * p.out + column;
            float upper = sum[0][t][j], lower = sum[0][t][2 + j];
            if constexpr (kHasTwo) {
              upper += sum[1][t][j];
              lower += sum[1][t][2 + j];
            }
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
constexpr std::int64_t kRoom = (kGated ? 118 : 92) << 10;
constexpr std::int64_t kRoomOfRows = 52 << 10, kMostOfRows = 100 << 10;

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
  const std::int64_t left = kRoom<kGated> - kBarrierBytes - at_once * row_bytes(in);
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
                                 .tiles_of_block = static_cast<int>((tiles + blocks - 1) / blocks),
                                 .piece = static_cast<int>(piece) / kPack<Bf16>,
                                 .num_pieces = static_cast<int>((in + piece - 1) / piece),
                                 .num_stages = static_cast<int>(stages),
                                 .rows_at_once = static_cast<int>(at_once)};
  // Of the first kernel more than half of a multiprocessor: two blocks on one would leave another
  // without, where that one has no room yet.
  const std::int64_t bytes = kBarrierBytes + stages * of_stage + at_once * row_bytes(in);
  allow_most_shared_memory(reinterpret_cast<const void*>(experts_kernel<kGated>));
  launch_overlapped(experts_kernel<kGated>,
                    dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(args.num_experts)),
                    kThreads,
                    static_cast<std::size_t>(kGated ? std::max(bytes, kRoom<kGated>) : bytes),
                    args.stream, params);
}

}  // namespace

bool batch_experts_fit(std::int64_t h, std::int64_t i) {
  return kRowsOfTile * std::max(row_bytes(h), row_bytes(i)) <= kMostOfRows;
}

void batch_gate_and_up(const BatchExpertsArgs& args) {
  launch_experts<true>(args, args.w13, args.x, args.inner, args.h, args.i);
}

void batch_down(const BatchExpertsArgs& args) {
  launch_experts<false>(args, args.w2, args.inner, args.parts, args.i, args.h);
}

}  // namespace switchyard::models::gpu
