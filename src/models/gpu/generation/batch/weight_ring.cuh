#pragma once

// The weights of an expert's part on their way through shared memory: warps that produce fill
// stages of a ring, those that consume multiply them.
//
//   producers --> full[stage] --> consumers --> empty[stage] --> producers

#include "core/gpu/ptx.cuh"
#include "models/gpu/generation/batch/tiles.cuh"

namespace switchyard::models::gpu {

inline constexpr int kConsumers = 8, kProducers = 4;  ///< Warps.
inline constexpr int kConsumerThreads = 32 * kConsumers,
                     kExpertsThreads = kConsumerThreads + 32 * kProducers;
inline constexpr int kRowsOfProducer = kOutsOfTile / kProducers;
inline constexpr int kMostPiece = 32;  ///< Packs of a row in a stage, a lane each.
inline constexpr int kMostStages = 16;
inline constexpr int kBarrierBytes = 16 * kMostStages;  ///< Full and empty of each stage.

/// The first product has tiles of eight gate rows and their up rows, the second of 16 outputs.
template <bool kGated>
inline constexpr int kTileColumns = kGated ? kOutsOfTile / 2 : kOutsOfTile;

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
  int warps_of_tile;  ///< A power of two: they share its pieces.
};

/// Packs from one row to the next: whole blocks of 32 columns, and an odd number, so that eight
/// rows that are read together have all banks.
[[nodiscard]] __host__ __device__ constexpr int row_stride(int packs) {
  return (packs + kBlockPacks - 1) / kBlockPacks * kBlockPacks + 1;
}

/// Stages of a ring: a piece of the columns of 16 rows of weights each, row_stride() apart. A
/// tile is one warp's; the others come by too, or a barrier's parity would tell them nothing.
class WeightRing {
 public:
  __device__ __forceinline__ WeightRing(const ExpertsKernelArgs& p, unsigned char* memory)
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
struct RingPlace {
  int slot = 0;
  std::uint32_t phase = 0;
  __device__ __forceinline__ void advance(int num) {
    if (++slot < num) return;
    slot = 0;
    phase ^= 1U;
  }
};

/// What a producer warp does: some rows of stage after stage of the block's weights.
template <bool kGated>
class WeightProducer {
 public:
  __device__ __forceinline__ WeightProducer(const ExpertsKernelArgs& p, const WeightRing& ring,
                                            int first_tile, int end_tile)
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
    at_.advance(ring_.num());
    if (++piece_ < p_.num_pieces) return;
    piece_ = 0;
    if (++tile_ == end_) tile_ = first_;
  }

 private:
  static constexpr int kColumns = kTileColumns<kGated>;
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

  const ExpertsKernelArgs& p_;
  const WeightRing& ring_;
  int first_, end_, tile_, column_, piece_ = 0, issued_ = 0;
  const int4* from_;
  std::uint32_t to_;
  RingPlace at_;
};

}  // namespace switchyard::models::gpu
