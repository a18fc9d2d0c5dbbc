#pragma once

// The grouped product of e4m3 on Hopper. It loads as the 16-bit one does (sm90/gemm.cuh), for whose
// loading warps two codes are one value: a stage has 128 rows by 128 codes and 256 rows of weights.
// Here each of the two multiplying warpgroups has all 128 rows and 128 of the weights' rows, so
// that its sums of a step have one scale of the weights, and in the first product one has the
// gate's columns and the other the up ones: the scale of 128 outputs is the largest of one row of a
// tile.
//
// The tensor core's own sums keep some 14 bits, so each step of 128 goes into partial sums of 64
// rows, and from there, times both scales, into fp32: 64 multiplications and additions in a thread,
// behind which the other warpgroup's products run.

#include <cuda_fp8.h>

#include "experts/gpu/activation.cuh"
#include "experts/gpu/coded/layout.hpp"
#include "experts/gpu/grouped/fp8/product.hpp"
#include "experts/gpu/grouped/sm90/gemm.cuh"

namespace switchyard {

template <bool kGated_>
struct Fp8Shape {
  static constexpr bool kGated = kGated_;  // the first product, which gathers its rows
  static constexpr bool kGather = kGated;
  static constexpr bool kTalls = false;

  static constexpr int kTileN = 256;
  static constexpr int kTileK = 64;  // pairs of codes
  static constexpr int kOutColumns = kGated ? 128 : 256;
  static constexpr int kRowsBytes = kTileRows * 128;
  static constexpr int kWeightsBytes = kTileN * 128;
  static constexpr int kStageBytes = kRowsBytes + kWeightsBytes;
  static constexpr int kStages = 4;
  static constexpr int kLoadedRows = kTileRows;

  // Of the first product: 64 x 128 sums from one warpgroup to the other. Of the second: a way out.
  using Out = WarpStaging<64>;
  static constexpr int kExchangeAt = kStages * kStageBytes;
  static constexpr int kExchangeBytes = kGated ? 64 * 128 * 4 : 2 * Out::kBytes;
  static constexpr int kMessagesAt = kExchangeAt + kExchangeBytes;
  static constexpr int kFullAt = kMessagesAt + kRingSlots * 16;
  static constexpr int kEmptyAt = kFullAt + kStages * 8;
  static constexpr int kGatheredAt = kEmptyAt + kStages * 8;
  static constexpr int kRingAt = kGatheredAt + kStages * 8;
  static constexpr int kSharedBytes = kRingAt + kRingSlots * 8;

  static constexpr int kThreads = 384;
  static constexpr int kGatherThreads = 64;
  static constexpr int kLoadRegisters = 40;
  static constexpr int kMultiplyRegisters = 232;
  static constexpr int kFullArrivals = kGather ? 2 : 1;
  static constexpr int kEmptyArrivals = 2 * 8;

  static_assert(kSharedBytes <= 232448, "more shared memory than a CTA can have");
  static_assert((kLoadRegisters + 2 * kMultiplyRegisters) * 128 <= 65536);
};

/// What the 16-bit product's parameters do not have.
struct Fp8Params {
  const float* row_scales;     // [N or S, blocks]
  const float* weight_scales;  // [E * (2 or 1), blocks of rows, blocks]
  std::int32_t blocks;         // along the sums
  std::int32_t row_blocks;     // of a matrix
  std::byte* codes;            // gated: out
  float* scales;
};

/// One thread: the weights of a tile, and its rows where they are contiguous.
template <bool kGated>
__device__ __forceinline__ void load_tile(const Sm90Context<Fp8Shape<kGated>>& context,
                                          const Work& work, const CUtensorMap* weights,
                                          const CUtensorMap* rows, StageCursor<4>& cursor,
                                          bool is_first) {
  using Shape = Fp8Shape<kGated>;
  const CtaTile& tile = work.tile;
  constexpr std::uint32_t kHalfWeights = Shape::kWeightsBytes / 2;
  constexpr std::uint32_t kHalfRowsBytes = Shape::kRowsBytes / 2;
  constexpr int kGroups = 128 / coded::kGroupRows;
  std::uint32_t bytes = Shape::kWeightsBytes;
  if (!kGated) {
    bytes += tile.rows > kHalfRows ? Shape::kRowsBytes : tile.rows > 0 ? kHalfRowsBytes : 0;
  }
  const auto half_group = [&](int half) {
    return kGated ? tile.column_tile * kGroups : (tile.column_tile * 2 + half) * kGroups;
  };
  const auto half_matrix = [&](int half) { return kGated ? 2 * work.expert + half : work.expert; };
  // The kernel before writes the rows of the second product; the weights need not wait.
  if (!kGated && is_first) wait_for_rows();
  for (int step = 0; step < context.num_steps; ++step, cursor.advance()) {
    const std::uint32_t full = context.full(cursor);
    const std::uint32_t to = context.weights_at(cursor);
    constexpr int kStepElements = 128 * coded::kGroupRows / 8;  // of 8 bytes
    ptx::mbarrier_wait(context.empty(cursor), cursor.phase ^ 1);
    ptx::mbarrier_arrive_expect(full, bytes);
    if (tile.share_weights) {
      const int half = static_cast<int>(context.cta);
      ptx::tma_load_3d_multicast(to + context.cta * kHalfWeights, weights, step * kStepElements,
                                 half_group(half), half_matrix(half), full, 3);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::tma_load_3d(to + half * kHalfWeights, weights, step * kStepElements, half_group(half),
                         half_matrix(half), full);
      }
    }
    if constexpr (!kGated) {
      const std::uint32_t rows_to = context.rows_at(cursor);
      const int k = step * Shape::kTileK;
      if (tile.rows > 0) ptx::tma_load_2d(rows_to, rows, k, tile.row, full);
      if (tile.rows > kHalfRows) {
        ptx::tma_load_2d(rows_to + kHalfRowsBytes, rows, k, tile.row + kHalfRows, full);
      }
    }
  }
}

/// One multiplying warpgroup.
template <bool kGated>
class Fp8Multiplier {
 public:
  using Shape = Fp8Shape<kGated>;
  using Cursor = StageCursor<Shape::kStages>;

  __device__ Fp8Multiplier(const Sm90Context<Shape>& context, const Fp8Params& fp8, char* shared,
                           int group)
      : context_(context),
        fp8_(fp8),
        exchange_(reinterpret_cast<float*>(shared + Shape::kExchangeAt)),
        group_(group),
        staging_{context.shared + Shape::kExchangeAt +
                     static_cast<std::uint32_t>(group) * Shape::Out::kBytes,
                 1 + group} {}

  __device__ __forceinline__ void run() {
    float sums[2][64];
    for (std::uint32_t index = 0;; ++index) {
      const Work work = context_.ring.receive(index);
      if (work.expert < 0) return;
      if (work.tile.rows > kHalfRows) {
        multiply_tile<2>(sums, work);
        finish<2>(sums, work);
      } else if (work.tile.rows > 0) {
        multiply_tile<1>(sums, work);
        finish<1>(sums, work);
      } else {
        pass_by();
      }
    }
  }

 private:
  /// Where the scales of a thread's rows begin: two of each half.
  struct RowScales {
    std::uint32_t at[4];
  };

  template <int kHalves>
  __device__ __forceinline__ RowScales row_scales(const CtaTile& tile) const {
    RowScales scales{};
    const int first =
        static_cast<int>(threadIdx.x % 128 / 32) * 16 + static_cast<int>(threadIdx.x % 32 / 4);
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      const std::int32_t row = tile.row + min(first + i % 2 * 8 + i / 2 * kHalfRows, tile.rows - 1);
      const std::int32_t source = kGated && context_.params.row_token != nullptr
                                      ? __ldg(context_.params.row_token + row)
                                      : row;
      scales.at[i] = static_cast<std::uint32_t>(source) * static_cast<std::uint32_t>(fp8_.blocks);
    }
    return scales;
  }

  [[nodiscard]] __device__ __forceinline__ const float* weight_scales(const Work& work) const {
    const std::int32_t matrix = kGated ? 2 * work.expert + group_ : work.expert;
    const std::int32_t block = kGated ? work.tile.column_tile : 2 * work.tile.column_tile + group_;
    return fp8_.weight_scales +
           (static_cast<std::int64_t>(matrix) * fp8_.row_blocks + min(block, fp8_.row_blocks - 1)) *
               fp8_.blocks;
  }

  template <int kHalves>
  __device__ __forceinline__ void multiply_tile(float (&sums)[2][64], const Work& work) {
    const RowScales at = row_scales<kHalves>(work.tile);
    const float* const of_weights = weight_scales(work);
    float next[2 * kHalves];
    const auto fetch = [&](int step) {
      const float weight = __ldg(of_weights + step);
#pragma unroll
      for (int i = 0; i < 2 * kHalves; ++i) {
        // The second product's rows are new: not by the cache that does not look for changes.
        const float* const from = fp8_.row_scales + at.at[i] + step;
        next[i] = weight * (kGated ? __ldg(from) : *from);
      }
    };
    // In the second product only behind what writes the scales.
    if (!kGated) ptx::wait_for_previous_kernel();
    fetch(0);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[half][i] = 0;
    }
    for (int step = 0; step < context_.num_steps; ++step, cursor_.advance()) {
      float scale[2 * kHalves];
#pragma unroll
      for (int i = 0; i < 2 * kHalves; ++i) scale[i] = next[i];
      fetch(min(step + 1, context_.num_steps - 1));
      ptx::mbarrier_wait(context_.full(cursor_), cursor_.phase);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float part[64];
        multiply_step(part, half);
        if (half == kHalves - 1) release(cursor_);
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          sums[half][i] = fmaf(part[i], scale[2 * half + i / 2 % 2], sums[half][i]);
        }
      }
    }
  }

  /// 64 rows by 128 columns and 128 along the sums.
  __device__ __forceinline__ void multiply_step(float (&part)[64], int half) const {
    const std::uint64_t rows = ptx::wgmma_operand(
        context_.rows_at(cursor_) + static_cast<std::uint32_t>(half * kHalfRows * 128));
    const std::uint64_t weights =
        ptx::wgmma_plain_operand(context_.weights_at(cursor_) +
                                     static_cast<std::uint32_t>(group_) * Shape::kWeightsBytes / 2,
                                 128 * coded::kGroupRows);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::wgmma_e4m3(part, rows + 2 * k, weights + k * ptx::kPlainStep, k > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(part[i])::"memory");
  }

  template <int kHalves>
  __device__ __forceinline__ void finish(float (&sums)[2][64], const Work& work) {
    if constexpr (kGated) {
      finish_gated<kHalves>(sums, work);
    } else {
      finish_linear<kHalves>(sums, work);
    }
  }

  /// Biases of the columns that this warpgroup's sums have.
  template <int kHalves>
  __device__ __forceinline__ void add_bias(float (&sums)[2][64], const Work& work,
                                           std::int32_t first) const {
    const EpilogueParams& epilogue = context_.params.epilogue;
    if (epilogue.bias == nullptr) return;
    const float* const bias = epilogue.bias + (kGated ? 2 * work.expert + group_ : work.expert) *
                                                  static_cast<std::int64_t>(epilogue.columns);
#pragma unroll
    for (int block = 0; block < 16; ++block) {
      const std::int32_t column =
          first + block * 8 + static_cast<std::int32_t>(threadIdx.x % 4) * 2;
      if (column >= epilogue.columns) continue;
      const float2 b = __ldg(reinterpret_cast<const float2*>(bias + column));
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          sums[half][4 * block + 2 * i] += b.x;
          sums[half][4 * block + 2 * i + 1] += b.y;
        }
      }
    }
  }

  /// Warpgroup 0 has the gate of all rows, 1 the up part: 0 gets the other's first 64 rows, and
  /// then 1 the last.
  template <int kHalves>
  __device__ __forceinline__ void finish_gated(float (&sums)[2][64], const Work& work) {
    const std::int32_t column = work.tile.column_tile * Shape::kOutColumns;
    add_bias<kHalves>(sums, work, column);
    const int thread = static_cast<int>(threadIdx.x % 128);
    float* const mine = exchange_ + thread;
    const auto put = [&](const float(&from)[64]) {
#pragma unroll
      for (int i = 0; i < 64; ++i) mine[i * 128] = from[i];
    };
    if (group_ == 1) put(sums[0]);
    both();
    if (group_ == 0) {
      activate_half<true>(sums[0], mine);
    }
    if (kHalves == 2) {
      both();
      if (group_ == 0) put(sums[1]);
      both();
      if (group_ == 1) activate_half<false>(sums[1], mine);
    }
    if (group_ == 0) {
      store_codes(sums[0], work, 0, column);
    } else if (kHalves == 2) {
      store_codes(sums[1], work, 1, column);
    }
    both();  // the next tile's sums may be put
  }

  /// Own sums become the activation's values; the other part of each lies in shared memory.
  template <bool kOwnGate>
  __device__ __forceinline__ void activate_half(float (&own)[64], const float* other) const {
    const ActivationParams& activation = context_.params.epilogue.activation;
    with_activation(activation.kind, [&](auto kind) {
      constexpr Activation kKind = decltype(kind)::value;
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        const float there = other[i * 128];
        own[i] =
            activate<kKind, true>(kOwnGate ? own[i] : there, kOwnGate ? there : own[i], activation);
      }
    });
  }

  /// 64 rows of 128 columns: one scale a row, 32 bytes of a row by four lanes at a time.
  __device__ __forceinline__ void store_codes(const float (&values)[64], const Work& work, int half,
                                              std::int32_t column) const {
    const std::int32_t columns = context_.params.epilogue.columns;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int first = static_cast<int>(threadIdx.x % 128 / 32) * 16 + lane / 4 + half * kHalfRows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = 0x1p-100F;
#pragma unroll
      for (int block = 0; block < 16; ++block) {
        const bool exists = column + block * 8 < columns;
        const float a = fabsf(values[4 * block + 2 * h]);
        const float b = fabsf(values[4 * block + 2 * h + 1]);
        if (exists) largest = fmaxf(largest, fmaxf(a, b));
      }
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
      }
      const float scale = __fdiv_rn(largest, 448.0F);
      const float inverse = __fdiv_rn(448.0F, largest);
      const int in_tile = first + 8 * h;
      const bool here = in_tile < work.tile.rows;
      const std::int64_t row = std::int64_t{work.tile.row} + in_tile;
#pragma unroll
      for (int four = 0; four < 4; ++four) {
        std::uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (4 * four + i) + 2 * h;
          pairs[i] =
              __nv_cvt_float2_to_fp8x2(make_float2(values[at] * inverse, values[at + 1] * inverse),
                                       __NV_SATFINITE, __NV_E4M3);
        }
        const uint2 eight = turn(pairs);
        const std::int32_t to = column + (4 * four + lane % 4) * 8;
        if (here && to < columns) {
          *reinterpret_cast<uint2*>(fp8_.codes + row * columns + to) = eight;
        }
      }
      if (here && lane % 4 == 0) {
        fp8_.scales[row * ((columns + 127) / 128) + column / 128] = scale;
      }
    }
  }

  /// Four lanes have two codes of each of four blocks; after it lane t has all eight of block t.
  static __device__ __forceinline__ uint2 turn(const std::uint32_t (&pairs)[4]) {
    const bool odd = threadIdx.x % 2 != 0;
    const bool upper = threadIdx.x / 2 % 2 != 0;
    // Blocks 2i and 2i + 1: what the neighbour keeps goes there.
    const std::uint32_t give = odd ? pairs[0] | pairs[2] << 16 : pairs[1] | pairs[3] << 16;
    const std::uint32_t got = __shfl_xor_sync(kAllLanes, give, 1);
    // Of block 0 or 1 (and 2 or 3): the even lane's codes, then the odd one's.
    const std::uint32_t low =
        odd ? __byte_perm(got, pairs[1], 0x5410) : __byte_perm(pairs[0], got, 0x5410);
    const std::uint32_t high =
        odd ? __byte_perm(got, pairs[3], 0x5432) : __byte_perm(pairs[2], got, 0x7610);
    const std::uint32_t there = __shfl_xor_sync(kAllLanes, upper ? low : high, 2);
    return upper ? make_uint2(there, high) : make_uint2(low, there);
  }

  template <int kHalves>
  __device__ __forceinline__ void finish_linear(float (&sums)[2][64], const Work& work) {
    const std::int32_t column = work.tile.column_tile * Shape::kOutColumns + group_ * 128;
    add_bias<kHalves>(sums, work, column);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const std::int32_t rows = min(work.tile.rows - half * kHalfRows, kHalfRows);
      const RowBlock block{work.tile.row + half * kHalfRows, rows, column};
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        staging_.send(box, block, context_.params.epilogue, nullptr, [&](int i) {
          const int at = 4 * (box * 8 + i);
          const auto two = [&](int from) {
            return pack_two<__nv_bfloat16>(sums[half][from], sums[half][from + 1]);
          };
          return make_uint4(two(at), two(at + 2), two(at + 4), two(at + 6));
        });
      }
    }
  }

  static __device__ __forceinline__ void both() { ptx::named_barrier(3, 256); }

  __device__ __forceinline__ void pass_by() {
    for (int step = 0; step < context_.num_steps; ++step, cursor_.advance()) {
      ptx::mbarrier_wait(context_.full(cursor_), cursor_.phase);
      release(cursor_);
    }
  }
  /// This warp has read the stage: both CTAs may fill it again.
  __device__ __forceinline__ void release(const Cursor& cursor) const {
    const std::uint32_t lane = threadIdx.x % 32;
    if (lane < 2) ptx::mbarrier_arrive_cluster(ptx::map_to_cta(context_.empty(cursor), lane));
  }

  const Sm90Context<Shape>& context_;
  const Fp8Params& fp8_;
  float* exchange_;
  std::int32_t group_;
  typename Shape::Out staging_;
  Cursor cursor_;
};

template <bool kGated>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Fp8Shape<kGated>::kThreads, 1)
    grouped_fp8(const __grid_constant__ CUtensorMap weights,
                const __grid_constant__ CUtensorMap rows, const __grid_constant__ Sm90Params params,
                const __grid_constant__ Fp8Params fp8) {
  using Shape = Fp8Shape<kGated>;
  extern __shared__ __align__(1024) char shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  const std::uint32_t cta = ptx::cluster_cta_rank();
  const UnitRing ring(base + Shape::kMessagesAt, base + Shape::kRingAt, cta);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(base + Shape::kFullAt + stage * 8, Shape::kFullArrivals);
      ptx::mbarrier_init(base + Shape::kEmptyAt + stage * 8, Shape::kEmptyArrivals);
      ptx::mbarrier_init(base + Shape::kGatheredAt + stage * 8, Shape::kGatherThreads);
    }
    ring.init();
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&weights);
    if (!kGated) ptx::prefetch_tensor_map(&rows);
  }
  ptx::cluster_sync();
  if (kGated) ptx::start_after_previous_kernel();
  const Sm90Context<Shape> context{params,
                                   nullptr,
                                   nullptr,
                                   base,
                                   cta,
                                   ring,
                                   (params.depth + Shape::kTileK - 1) / Shape::kTileK};
  const int group = static_cast<int>(threadIdx.x / 128);
  if (group == 0) {
    ptx::lower_registers<Shape::kLoadRegisters>();
    const int warp = static_cast<int>(threadIdx.x / 32);
    if (warp == 0) {
      run_loader(context, &weights, &rows);
    } else if (kGated && warp >= 2) {
      run_gather(context);
    } else if (kGated && warp == 1) {
      run_fence(context);
    }
  } else {
    ptx::raise_registers<Shape::kMultiplyRegisters>();
    Fp8Multiplier<kGated>(context, fp8, shared, group - 1).run();
  }
  __syncwarp();
  ptx::cluster_sync();  // nobody leaves while the other CTA may still write here
}

}  // namespace switchyard
