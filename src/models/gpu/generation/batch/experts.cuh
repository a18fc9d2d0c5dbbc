#pragma once

// What the kernels of a batch's experts share: a block finds the rows that have chosen its expert,
// gathers them into shared memory, and multiplies them by tiles of weights.

#include "core/gpu/ptx.cuh"
#include "models/gpu/generation/batch/tiles.cuh"
#include "models/gpu/generation/batch/weight_ring.cuh"

namespace switchyard::models::gpu {

inline constexpr int kTilesAtOnce = 4;  // of an expert's rows
inline constexpr int kMostSlots = static_cast<int>(kBatchRows * kMostChosen);

/// The rows that have chosen this block's expert, and for which of theirs: row * top_k + k.
struct OwnSlots {
  int count;
  std::uint16_t slot[kMostSlots];
  std::uint8_t row[kMostSlots];
};

__device__ __forceinline__ void consumers_meet() { ptx::named_barrier(1, kConsumerThreads); }

/// Which rows chose which experts.
struct Choice {
  const std::int32_t* expert;  ///< [rows, top_k]; null: one expert, which all have.
  int slots, top_k;
};

/// By the consumers, in any order, which no sum depends on. Of logits that are not numbers a row
/// may have chosen an expert twice.
__device__ __forceinline__ void find_slots(const Choice& p, OwnSlots& own) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < p.slots; i += kConsumerThreads) {
    if (p.expert != nullptr && p.expert[i] != static_cast<int>(blockIdx.y)) continue;
    const int at = atomicAdd(&own.count, 1);
    own.slot[at] = static_cast<std::uint16_t>(i);
    own.row[at] = static_cast<std::uint8_t>(i / p.top_k);
  }
}

/// By the consumers, behind the stages in front: the slots, which `found` then says to those that
/// fill the ring.
__device__ __forceinline__ void find_slots_of_all(const Choice& choice, OwnSlots& own,
                                                  std::uint32_t found) {
  wait_for_stages_in_front();
  find_slots(choice, own);
  consumers_meet();
  if (threadIdx.x == 0) ptx::mbarrier_arrive(found);
}
/// By those that fill the ring: how many times they have to.
[[nodiscard]] __device__ __forceinline__ int wait_for_passes(const OwnSlots& own, int rows_at_once,
                                                             std::uint32_t found) {
  wait_for_stages_in_front();
  ptx::mbarrier_wait(found, 0);
  return (own.count + rows_at_once - 1) / rows_at_once;
}

/// By the consumers: rows of `packs` packs into shared memory, row_stride() apart, with zeros
/// behind them.
template <class RowOf>
__device__ __forceinline__ void gather(const int4* x, int packs, int count, const RowOf& row_of,
                                       int4* to) {
  const int stride = row_stride(packs), lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / 32; row < count; row += kConsumers) {
    const int4* const from = x + std::int64_t{row_of(row)} * packs;
#pragma unroll 2
    for (int pack = lane; pack < stride; pack += 32) {
      const bool there = pack < packs;
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

/// Where a lane begins in 16 rows of weights, row_stride() of `packs` apart, in bytes: it tells of
/// upper and lower rows' columns 0 and 8.
[[nodiscard]] __device__ __forceinline__ std::uint32_t place_in_weights(int packs) {
  const int lane = static_cast<int>(threadIdx.x) % 32, eighth = lane / 8;
  return static_cast<std::uint32_t>(16 *
                                    ((lane % 8 + eighth % 2 * 8) * row_stride(packs) + eighth / 2));
}

/// And in the rows of tile t, of which there are `count` in all: of columns 0, 8, 16 and 24. Rows
/// that there are not are another one.
[[nodiscard]] __device__ __forceinline__ std::uint32_t place_in_rows(int t, int count, int packs) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = min(t * kRowsOfTile + lane % 8, count - 1);
  return static_cast<std::uint32_t>(16 * (row * row_stride(packs) + lane / 8));
}

[[nodiscard]] inline Choice choice_of(const BatchExpertsArgs& args) {
  return {.expert = args.expert,
          .slots = static_cast<int>(args.rows * args.top_k),
          .top_k = args.top_k};
}

/// Memory of a row of `columns` in shared memory.
[[nodiscard]] inline std::int64_t row_bytes(std::int64_t columns) {
  return std::int64_t{16} * row_stride(static_cast<int>(columns) / kPack<Bf16>);
}

/// How the columns of a row of weights are cut into pieces, in packs: even ones, whole blocks.
struct Pieces {
  std::int64_t packs, count;

  explicit Pieces(std::int64_t columns) {
    constexpr std::int64_t kMost = kMostPiece * kPack<Bf16>;
    const std::int64_t least = (columns + kMost - 1) / kMost;
    const std::int64_t of_piece = ((columns + least - 1) / least + 31) / 32 * 32;
    packs = of_piece / kPack<Bf16>;
    count = (columns + of_piece - 1) / of_piece;
  }
};

}  // namespace switchyard::models::gpu
