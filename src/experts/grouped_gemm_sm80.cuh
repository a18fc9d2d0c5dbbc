#pragma once

// Grouped GEMM with mma.sync and cp.async, for sm_80 and everything later; the schedule, the order
// of sums and the epilogues are those of the Hopper kernel.
//
// Bound by the tensor cores. One CTA of 8 warps takes tiles of 128 rows by 256 rows of weights
// (128 gate and 128 up ones when gated), 64 x 64 a warp: 32 columns of each half, so that a gate
// and its up value meet in one thread. Four stages of 32 values deep (96 KB: what every chip since
// sm_80 has) are filled three ahead, across the ends of tiles.

#include "experts/grouped_epilogue.cuh"
#include "experts/grouped_scheduler.cuh"

namespace switchyard {

struct Sm80Params {
  ScheduleParams schedule;
  EpilogueParams epilogue;
  const void* rows;               // [N or S, depth]
  const std::int32_t* row_token;  // [S], or null
  const void* weights;            // [E * weight_rows, depth]
  std::int32_t depth;
  std::int32_t weight_rows;  // of one expert
};

constexpr int kSm80Threads = 256;
constexpr int kSm80Stages = 4;
constexpr int kSm80TileN = 256;
constexpr int kSm80TileK = 32;
constexpr int kSm80RowBytes = kSm80TileK * 2;
constexpr int kSm80RowsBytes = kTileRows * kSm80RowBytes;
constexpr int kSm80StageBytes = kSm80RowsBytes + kSm80TileN * kSm80RowBytes;
constexpr int kSm80SharedBytes = kSm80Stages * kSm80StageBytes;

/// Where 16-byte chunk `chunk` of a 64-byte row lies: any eight rows of one chunk meet all banks.
__device__ __forceinline__ std::uint32_t sm80_place(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kSm80RowBytes + ((chunk ^ (row >> 1 & 3)) << 4));
}

/// A work item as all threads see it; -1: no more.
__device__ __forceinline__ Work read_work(const int4* ring, std::uint32_t index) {
  const int4 m = ring[index % kRingSlots];
  return {m.x, {m.y, m.z, m.w, false}};
}

/// The next item with rows, for all threads, from one warp. False: no more.
__device__ __forceinline__ bool write_work(UnitWalk<2>& walk, int4* ring, std::uint32_t index) {
  int4 message = walk.next();
  Work work = unpack_message(message, static_cast<std::uint32_t>(walk.part()));
  while (work.expert >= 0 && work.tile.rows == 0) {
    message = walk.next();
    work = unpack_message(message, static_cast<std::uint32_t>(walk.part()));
  }
  if (threadIdx.x == 0) {
    ring[index % kRingSlots] = {work.expert, work.tile.row, work.tile.rows, work.tile.column_tile};
  }
  return work.expert >= 0;
}

/// Fills stages, tile after tile.
template <bool kGated>
class Sm80Loader {
 public:
  __device__ Sm80Loader(const Sm80Params& params, std::uint32_t shared, int4* ring)
      : params_(params), shared_(shared), ring_(ring) {
    begin(0);
  }

  /// The next step's 32 values of every row and weight into `stage`; then, at a tile's end, on to
  /// the next tile. `walk` is given by warp 0.
  __device__ __forceinline__ void load(int stage, UnitWalk<2>& walk, int num_steps) {
    if (work_.expert >= 0) {
      const int chunk = static_cast<int>(threadIdx.x % 4);
      const int row = static_cast<int>(threadIdx.x / 4);
      const std::int32_t k = step_ * kSm80TileK + chunk * 8;
      const bool inside = k < params_.depth;
      const std::uint32_t bytes = inside ? 16 : 0;
      const std::int32_t from = inside ? k : 0;
      const std::uint32_t to =
          shared_ + static_cast<std::uint32_t>(stage * kSm80StageBytes) + sm80_place(row, chunk);
      constexpr int kNext64 = 64 * kSm80RowBytes;
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::cp_async_16(to + i * kNext64, rows_[i] + from, bytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::cp_async_16(to + kSm80RowsBytes + i * kNext64, weights_[i] + from, bytes);
      }
      if (++step_ == num_steps) {
        step_ = 0;
        begin(++index_);
        if (threadIdx.x < 32 && work_.expert >= 0) write_work(walk, ring_, index_ + 1);
      }
    }
    ptx::cp_async_commit();
  }

 private:
  using Bits = std::uint16_t;

  __device__ __forceinline__ void begin(std::uint32_t index) {
    work_ = read_work(ring_, index);
    if (work_.expert < 0) return;
    const int row = static_cast<int>(threadIdx.x / 4);
    const std::int64_t depth = params_.depth;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int32_t at = work_.tile.row + min(row + 64 * i, work_.tile.rows - 1);
      const std::int64_t token = params_.row_token == nullptr ? at : params_.row_token[at];
      rows_[i] = static_cast<const Bits*>(params_.rows) + token * depth;
    }
    // Columns past the end repeat the last one and are never stored.
    const std::int32_t columns = params_.epilogue.columns;
    const std::int32_t first = work_.tile.column_tile * (kGated ? kSm80TileN / 2 : kSm80TileN);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int32_t column = first + row + 64 * (kGated ? i % 2 : i);
      const std::int64_t weight = std::int64_t{work_.expert} * params_.weight_rows +
                                  min(column, columns - 1) + (kGated && i >= 2 ? columns : 0);
      weights_[i] = static_cast<const Bits*>(params_.weights) + weight * depth;
    }
  }

  const Sm80Params& params_;
  std::uint32_t shared_;
  int4* ring_;
  Work work_;
  std::uint32_t index_ = 0;
  int step_ = 0;
  const Bits* rows_[2];
  const Bits* weights_[4];
};

/// One warp's 64 x 64 sums: sums[m][n] is the m16n8 block of rows 16m.. and column block n; blocks
/// 0..3 are 32 columns of the tile's first half, 4..7 the same ones of its second.
using Sm80Sums = float[4][8][4];

/// What one warp multiplies in 16 steps of k.
struct Sm80Operands {
  std::uint32_t rows[4][4];     // m16 blocks
  std::uint32_t weights[4][4];  // pairs of n8 blocks

  __device__ __forceinline__ void load_rows(int m, std::uint32_t stage, int k, int warp_m) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    ptx::ldmatrix_x4(rows[m],
                     stage + sm80_place(warp_m * 64 + m * 16 + lane % 16, 2 * k + lane / 16));
  }
  __device__ __forceinline__ void load_weights(int n, std::uint32_t stage, int k, int warp_n) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = n / 2 * 128 + warp_n * 32 + n % 2 * 16 + lane / 16 * 8 + lane % 8;
    ptx::ldmatrix_x4(weights[n], stage + kSm80RowsBytes + sm80_place(row, 2 * k + lane / 8 % 2));
  }
};

/// The products of `with`, and meanwhile, where there is a `next`, its operands from 16 steps of k
/// further: one after each eight products, so that neither shared memory nor the tensor cores wait.
template <typename T>
__device__ __forceinline__ void multiply(Sm80Sums& sums, const Sm80Operands& with,
                                         Sm80Operands& next, std::uint32_t stage, int k, int warp_m,
                                         int warp_n) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    next.load_rows(m, stage, k, warp_m);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n == 4) next.load_weights(m, stage, k, warp_n);
      const std::uint32_t b0 = with.weights[n / 2][n % 2 * 2];
      const std::uint32_t b1 = with.weights[n / 2][n % 2 * 2 + 1];
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        ptx::mma_bf16(sums[m][n], with.rows[m], b0, b1);
      } else {
        ptx::mma_f16(sums[m][n], with.rows[m], b0, b1);
      }
    }
  }
}

/// In groups of four lanes: value i of lane q becomes value q of lane i.
__device__ __forceinline__ uint4 transpose_four(std::uint32_t (&v)[4]) {
  const std::uint32_t lane = threadIdx.x;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const bool odd = (lane & 1) != 0;
    const std::uint32_t got = __shfl_xor_sync(kAllLanes, odd ? v[i] : v[i + 1], 1);
    (odd ? v[i] : v[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool high = (lane & 2) != 0;
    const std::uint32_t got = __shfl_xor_sync(kAllLanes, high ? v[i] : v[i + 2], 2);
    (high ? v[i] : v[i + 2]) = got;
  }
  return {v[0], v[1], v[2], v[3]};
}

/// Four column blocks of one row, one a value, from the four lanes that share the row: 32 columns.
__device__ __forceinline__ void store_32_columns(std::uint32_t (&v)[4], std::int32_t row,
                                                 std::int32_t rows_end, std::int32_t column,
                                                 const EpilogueParams& params) {
  const uint4 eight = transpose_four(v);
  const std::int32_t mine = column + static_cast<std::int32_t>(threadIdx.x % 4) * 8;
  if (row >= rows_end || mine >= params.columns) return;
  const std::int64_t at = static_cast<std::int64_t>(row) * params.columns + mine;
  *reinterpret_cast<uint4*>(static_cast<char*>(params.out) + at * 2) = eight;
}

/// Bias, activation, rounding and stores of one warp's sums.
template <typename T, Epilogue kEpilogue>
__device__ __forceinline__ void store_sums(Sm80Sums& sums, const Work& work, int warp_m, int warp_n,
                                           const EpilogueParams& params) {
  constexpr bool kGated = kEpilogue == Epilogue::kGated;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int32_t tile_column = work.tile.column_tile * (kGated ? 128 : 256) + warp_n * 32;
  const std::int32_t row = work.tile.row + warp_m * 64 + lane / 4;
  const std::int32_t rows_end = work.tile.row + work.tile.rows;
  if (params.bias != nullptr) {
    const float* bias =
        params.bias + static_cast<std::int64_t>(work.expert) * params.columns * (kGated ? 2 : 1);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const std::int32_t in_half = tile_column + n % 4 * 8 + lane % 4 * 2;
      const std::int32_t column = !kGated && n >= 4 ? in_half + 128 : in_half;
      if (column >= params.columns) continue;
      const float2 b = __ldg(
          reinterpret_cast<const float2*>(bias + column + (kGated && n >= 4 ? params.columns : 0)));
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        sums[m][n][0] += b.x;
        sums[m][n][1] += b.y;
        sums[m][n][2] += b.x;
        sums[m][n][3] += b.y;
      }
    }
  }
  const auto store = [&](auto kind) {
    [[maybe_unused]] constexpr Activation kKind = decltype(kind)::value;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int half = 0; half < (kGated ? 1 : 2); ++half) {
          std::uint32_t v[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            float v0 = sums[m][half * 4 + n][2 * h];
            float v1 = sums[m][half * 4 + n][2 * h + 1];
            if constexpr (kGated) {
              v0 = activate<kKind, true>(v0, sums[m][n + 4][2 * h], params.activation);
              v1 = activate<kKind, true>(v1, sums[m][n + 4][2 * h + 1], params.activation);
            } else if constexpr (kEpilogue == Epilogue::kPlain) {
              v0 = activate<kKind, false>(v0, 0.0F, params.activation);
              v1 = activate<kKind, false>(v1, 0.0F, params.activation);
            }
            v[n] = pack_two<T>(v0, v1);
          }
          store_32_columns(v, row + m * 16 + h * 8, rows_end, tile_column + half * 128, params);
        }
      }
    }
  };
  if constexpr (kEpilogue == Epilogue::kLinear) {
    store(std::integral_constant<Activation, Activation::kSilu>{});
  } else {
    with_activation(params.activation.kind, store);
  }
}

template <typename T, Epilogue kEpilogue>
__global__ void __launch_bounds__(kSm80Threads, 1)
    grouped_gemm_sm80(const __grid_constant__ Sm80Params params) {
  extern __shared__ __align__(128) char shared[];
  __shared__ int4 ring[kRingSlots];
  const std::uint32_t base = ptx::shared_address(shared);
  const int warp_m = static_cast<int>(threadIdx.x / 32 % 2);
  const int warp_n = static_cast<int>(threadIdx.x / 64);
  const int num_steps = (params.depth + kSm80TileK - 1) / kSm80TileK;
  UnitWalk<2> walk(params.schedule, static_cast<std::int32_t>(blockIdx.x),
                   static_cast<std::int32_t>(gridDim.x));
  if (threadIdx.x < 32 && write_work(walk, ring, 0)) write_work(walk, ring, 1);
  __syncthreads();
  Sm80Loader<kEpilogue == Epilogue::kGated> loader(params, base, ring);
#pragma unroll
  for (int stage = 0; stage < kSm80Stages - 1; ++stage) {
    loader.load(stage, walk, num_steps);
    __syncthreads();
  }
  // Operands are read 16 steps of k before they are multiplied, across stages and tiles, so the
  // tensor cores wait neither for shared memory nor at the barrier.
  static_assert(kSm80TileK == 32, "two halves of a stage take turns");
  Sm80Operands first;
  Sm80Operands second;
  ptx::cp_async_wait<kSm80Stages - 2>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    first.load_rows(i, base, 0, warp_m);
    first.load_weights(i, base, 0, warp_n);
  }
  int stage = 0;
  for (std::uint32_t index = 0;; ++index) {
    const Work work = read_work(ring, index);
    if (work.expert < 0) return;
    Sm80Sums sums = {};
    for (int step = 0; step < num_steps; ++step) {
      const std::uint32_t here = base + static_cast<std::uint32_t>(stage * kSm80StageBytes);
      loader.load((stage + kSm80Stages - 1) % kSm80Stages, walk, num_steps);
      multiply<T>(sums, first, second, here, 1, warp_m, warp_n);
      ptx::cp_async_wait<kSm80Stages - 2>();
      __syncthreads();
      stage = (stage + 1) % kSm80Stages;
      multiply<T>(sums, second, first, base + static_cast<std::uint32_t>(stage * kSm80StageBytes),
                  0, warp_m, warp_n);
    }
    if (work.tile.rows > warp_m * 64) {
      store_sums<T, kEpilogue>(sums, work, warp_m, warp_n, params.epilogue);
    }
  }
}

}  // namespace switchyard
