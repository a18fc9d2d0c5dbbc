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

/// Packs from one row to the next: whole blocks of 32 columns, and an odd number, so that eight
/// rows that are read together have all banks.
[[nodiscard]] __host__ __device__ constexpr int row_stride(int packs) {
  return (packs + kBlockPacks - 1) / kBlockPacks * kBlockPacks + 1;
}

/// Stages of a ring: rows of weights, row_stride() apart. Either all warps that consume come by
/// each of them, also where a tile is another one's, or a stage has one reader (RingReader).
class WeightRing {
 public:
  /// @param packs  Of 16 bytes, of a stage.
  __device__ __forceinline__ WeightRing(unsigned char* memory, int num_stages, int packs)
      : barriers_(ptx::shared_address(memory)),
        stages_(reinterpret_cast<int4*>(memory + kBarrierBytes)),
        num_(num_stages),
        packs_(packs) {}

  /// @param readers  Warps that consume a stage.
  __device__ __forceinline__ void init(int readers) const {
    for (int i = 0; i < num_; ++i) {
      ptx::mbarrier_init(full(i), 32 * kProducers);
      ptx::mbarrier_init(empty(i), static_cast<std::uint32_t>(readers));
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

/// A warp that reads some of the stages, in order, each alone. A barrier's parity tells it nothing
/// where the stage before in that place may not be full yet; so none of a warp's stages may be
/// further behind the one before than the ring is long. (Stages become full in order.)
class RingReader {
 public:
  __device__ __forceinline__ explicit RingReader(const WeightRing& ring) : ring_(ring) {}

  /// @returns where stage number `index` lies, now that it is full.
  __device__ __forceinline__ std::uint32_t wait_for(int index) {
    slot_ += index - last_;
    last_ = index;
    if (slot_ >= ring_.num()) {
      slot_ -= ring_.num();
      phase_ ^= 1U;
    }
    ptx::mbarrier_wait(ring_.full(slot_), phase_);
    return ptx::shared_address(ring_.stage(slot_));
  }
  /// The whole warp: that stage may be filled again.
  __device__ __forceinline__ void release() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ring_.empty(slot_));
  }

 private:
  const WeightRing& ring_;
  int last_ = -1, slot_ = -1;
  std::uint32_t phase_ = 0;
};

/// What a producer warp does: stage after stage, as soon as there is room.
class RingFiller {
 public:
  __device__ __forceinline__ explicit RingFiller(const WeightRing& ring) : ring_(ring) {}

  [[nodiscard]] __device__ __forceinline__ int issued() const { return issued_; }

  /// `fill(to)` copies this warp's share of the next stage by cp.async.
  template <class Fill>
  __device__ __forceinline__ void issue(const Fill& fill) {
    if (issued_ >= ring_.num()) ptx::mbarrier_wait(ring_.empty(at_.slot), at_.phase ^ 1U);
    fill(ptx::shared_address(ring_.stage(at_.slot)));
    ptx::cp_async_arrive(ring_.full(at_.slot));
    ++issued_;
    at_.advance(ring_.num());
  }

 private:
  const WeightRing& ring_;
  RingPlace at_;
  int issued_ = 0;
};

/// Tiles of a matrix [out, 8 packs], or of an expert's two: a stage is a piece of the columns of a
/// tile's 16 rows.
struct TilesArgs {
  const int4* w;  ///< Of all experts.
  int packs, out;
  int first, end;         ///< Tiles of the block.
  int piece, num_pieces;  ///< Packs of a row in a stage; how many make a row.
  int at_once = 1;        ///< So many neighbouring tiles' pieces take turns.
};

/// A producer warp's share of them: some rows of each.
template <bool kGated>
class TilePieces {
 public:
  __device__ __forceinline__ TilePieces(const TilesArgs& p, int expert) : p_(p), first_(p.first) {
    const int row = (static_cast<int>(threadIdx.x) / 32 - kConsumers) * kRowsOfProducer;
    const std::int64_t matrix =
        (kGated ? 2 : 1) * expert + (row >= kColumns ? 1 : 0);  // gate or up
    column_ = row % kColumns;
    from_ = p.w + matrix * p.out * p.packs + lane();
    to_ = static_cast<std::uint32_t>(16 * (row * row_stride(p.piece) + lane()));
  }

  /// Of one pass over the weights.
  [[nodiscard]] __device__ __forceinline__ int stages() const {
    return (p_.end - p_.first) * p_.num_pieces;
  }

  /// The next stage, behind the last one the first again.
  __device__ __forceinline__ void fill(std::uint32_t stage) {
    const int first = piece_ * p_.piece, column = (first_ + tile_) * kColumns + column_;
    const int packs = min(p_.piece, p_.packs - first);
    if (lane() < row_stride(packs) - 1) {  // a whole block, with zeros
      const int4* from = from_ + std::int64_t{column} * p_.packs + first;
      std::uint32_t to = stage + to_;
#pragma unroll
      for (int i = 0; i < kRowsOfProducer; ++i) {
        const bool there = column + i < p_.out && lane() < packs;
        ptx::cp_async_16(to, there ? from : from_, there ? 16 : 0);
        from += p_.packs;
        to += static_cast<std::uint32_t>(16 * row_stride(p_.piece));
      }
    }
    const int at_once = min(p_.at_once, p_.end - first_);
    if (++tile_ < at_once) return;
    tile_ = 0;
    if (++piece_ < p_.num_pieces) return;
    piece_ = 0;
    first_ += at_once;
    if (first_ == p_.end) first_ = p_.first;
  }

 private:
  static constexpr int kColumns = kTileColumns<kGated>;
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

  const TilesArgs& p_;
  int first_, tile_ = 0, column_, piece_ = 0;
  const int4* from_;
  std::uint32_t to_;
};

}  // namespace switchyard::models::gpu
