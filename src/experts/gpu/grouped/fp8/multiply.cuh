#pragma once

// The multiplying warpgroups of the grouped product of e4m3. The tensor core's own sums keep some
// 14 bits, so each step of 128 goes into partial sums of 64 rows, and from there, times both
// scales, into fp32: 64 multiplications and additions in a thread, behind which the other
// warpgroup's products run.

#include "experts/gpu/activation.cuh"
#include "experts/gpu/coded/layout.hpp"
#include "experts/gpu/grouped/fp8/codes.cuh"
#include "experts/gpu/grouped/fp8/shape.cuh"

namespace switchyard {

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
      store_codes(sums[0], work.tile, 0, column, context_.params.epilogue.columns, fp8_);
    } else if (kHalves == 2) {
      store_codes(sums[1], work.tile, 1, column, context_.params.epilogue.columns, fp8_);
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

}  // namespace switchyard
