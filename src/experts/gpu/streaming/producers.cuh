#pragma once

// The two warps that fill the ring: weights by tensor copies (or 16 bytes a lane before Hopper),
// token rows by one bulk copy each while they are few, else by 16 bytes a lane.

#include <cstdint>

#include "core/gpu/ptx.cuh"
#include "experts/gpu/streaming/ring.cuh"

namespace switchyard::streaming {

/// Copies rows of a chunk by 16 bytes a lane; the whole warp calls it. Short rows share a turn.
struct RowCopier {
  static constexpr int kBatch = 4;  // turns whose addresses are worked out together
  int rows;
  int row_bytes;
  int piece;
  int stride;    // from row to row in the stage
  int per_turn;  // rows
  int row;       // this lane's in the first turn
  int byte;      // and where in it
  const std::byte* from[kBatch];

  __device__ __forceinline__ RowCopier(int rows_, int row_bytes_, int piece_, int stride_)
      : rows(rows_), row_bytes(row_bytes_), piece(piece_), stride(stride_) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int width = piece > 256 ? 32 : piece > 128 ? 16 : piece > 64 ? 8 : 4;
    per_turn = 32 / width;
    row = lane / width;
    byte = lane % width * 16;
  }
  template <typename Source>
  __device__ __forceinline__ void aim(int first, Source&& source) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      from[i] = source(min(first + i * per_turn + row, rows - 1)) + byte;
    }
  }
  __device__ __forceinline__ bool in_one_batch() const { return rows <= kBatch * per_turn; }

  /// The batch of rows from `first` on, `offset` bytes into K; zeros past its end.
  __device__ __forceinline__ void copy(std::uint32_t to, int first, int offset) const {
    // Whole steps: the consumers multiply the last one in full.
    const int end = min(piece, (row_bytes - offset + kStepBytes - 1) / kStepBytes * kStepBytes);
    for (int b = 0; byte + b < end; b += 512 / per_turn) {
      const bool exists = offset + byte + b < row_bytes;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int r = first + i * per_turn + row;
        if (r < rows) {
          ptx::cp_async_16(to + r * stride + byte + b, exists ? from[i] + offset + b : from[i],
                           exists ? 16 : 0);
        }
      }
    }
  }
  template <typename Source>
  __device__ __forceinline__ void copy_all(std::uint32_t to, int offset, Source&& source) {
    for (int first = 0; first < rows; first += kBatch * per_turn) {
      aim(first, source);
      copy(to, first, offset);
    }
  }
};

/// Fills the token rows of stage after stage; the whole warp calls it.
template <bool kHopper>
struct TokenProducer {
  static constexpr int kBulkRows = 8;  // a bulk copy costs about 40 ns of the copy engine's time
  const Ring& ring;
  int row_bytes;
  Cursor cursor;

  template <typename Source>
  __device__ __forceinline__ void item(int rows, const Chunks& chunks, Source&& source) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (kHopper && rows <= kBulkRows && row_bytes % kStepBytes == 0) {
      by_bulk(rows, chunks, source);
      return;
    }
#endif
    RowCopier copier(rows, row_bytes, chunks.piece, chunks.token_stride);
    const bool aimed = copier.in_one_batch();
    if (aimed) copier.aim(0, source);
    for (int chunk = 0; chunk < chunks.count; ++chunk) {
      ptx::mbarrier_wait(ring.empty(cursor.slot), cursor.phase ^ 1);
      const std::uint32_t to = ring.stage(cursor.slot) + chunks.tokens_at;
      if (aimed) {
        copier.copy(to, 0, chunk * chunks.piece);
      } else {
        copier.copy_all(to, chunk * chunks.piece, source);
      }
      ptx::cp_async_arrive(ring.full(cursor.slot));
      cursor.advance(ring.num_stages);
    }
  }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  template <typename Source>
  __device__ __forceinline__ void by_bulk(int rows, const Chunks& chunks, Source&& source) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::byte* from = source(min(lane, rows - 1));
    const int at = chunks.tokens_at + lane * chunks.token_stride;
    for (int offset = 0; offset < row_bytes; offset += chunks.piece) {
      const int bytes = min(chunks.piece, row_bytes - offset);
      const std::uint32_t full = ring.full(cursor.slot);
      ptx::mbarrier_wait(ring.empty(cursor.slot), cursor.phase ^ 1);
      if (lane < rows) {
        ptx::mbarrier_arrive_expect(full, bytes);
        ptx::bulk_load(ring.stage(cursor.slot) + at, from + offset, bytes, full);
      } else {
        ptx::mbarrier_arrive(full);
      }
      cursor.advance(ring.num_stages);
    }
  }
#endif
};

/// Fills the weight rows of stage after stage; the whole warp calls it.
template <bool kHopper>
struct WeightProducer {
  const Ring& ring;
  const Pieces& pieces;
  int row_bytes;
  std::uint64_t policy;
  bool told;  // the next kernel may start
  Cursor cursor;

  /// `map`, `row`, `matrix`: the box of the item; `later`: chunks of the items after it.
  template <typename Source>
  __device__ __forceinline__ void item(const CUtensorMap* map, int row, int matrix, int weight_rows,
                                       const Chunks& chunks, int later, Source&& source) {
    each_stage(chunks, later, [&](int chunk) {
      if constexpr (kHopper) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        if (threadIdx.x % 32 == 0) {
          const std::uint32_t full = ring.full(cursor.slot);
          ptx::mbarrier_arrive_expect(full, weight_rows * chunks.piece);
          ptx::tma_load_3d(ring.stage(cursor.slot), map, chunk * (chunks.piece / 8), row, matrix,
                           full, policy);
        }
        __syncwarp();
#endif
      } else {
        RowCopier(weight_rows, row_bytes, chunks.piece, chunks.piece)
            .copy_all(ring.stage(cursor.slot), chunk * chunks.piece, source);
        ptx::cp_async_arrive(ring.full(cursor.slot));
      }
    });
  }

  /// Of codes: `groups` runs of memory, a lane each, of which a stage takes `stride` bytes.
  /// `source(lane)`: where a run begins; `bytes`: its length.
  template <typename Source>
  __device__ __forceinline__ void coded_item(int groups, int stride, int bytes,
                                             const Chunks& chunks, int later, Source&& source) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::byte* from = source(min(lane, groups - 1));
    each_stage(chunks, later, [&](int chunk) {
      const std::uint32_t full = ring.full(cursor.slot);
      const int size = min(stride, bytes - chunk * stride);
      if (lane == 0) ptx::mbarrier_arrive_expect(full, groups * size);
      __syncwarp();
      if (lane < groups) {
        ptx::bulk_load(ring.stage(cursor.slot) + lane * stride, from + chunk * stride, size, full,
                       policy);
      }
    });
#endif
  }

  /// fill(chunk) for each stage of an item, once it is empty.
  template <typename Fill>
  __device__ __forceinline__ void each_stage(const Chunks& chunks, int later, Fill&& fill) {
    for (int chunk = 0; chunk < chunks.count; ++chunk) {
      if (!told && later + chunks.count - chunk <= pieces.lead_stages) let_next_start();
      ptx::mbarrier_wait(ring.empty(cursor.slot), cursor.phase ^ 1);
      fill(chunk);
      cursor.advance(ring.num_stages);
    }
  }

  __device__ __forceinline__ void let_next_start() {
    told = true;
    if constexpr (kHopper) {
      // Whoever is let in may rely on what came before this kernel being complete.
      ptx::start_after_previous_kernel();
    }
  }
};

}  // namespace switchyard::streaming
