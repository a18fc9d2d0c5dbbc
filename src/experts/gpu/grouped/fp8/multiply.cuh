#pragma once

// The multiplying warpgroups of the grouped product of e4m3: each has 64 rows of a tile and all of
// its weights. The tensor core's own sums keep some 14 bits, so each step of 128 goes into partial
// sums of 128 columns, and from there, times both scales, into fp32: 64 multiplications and
// additions in a thread, behind which the other warpgroup's products run. The two wait for each
// other nowhere but through the stages, so one may finish a tile while the other still multiplies.

#include "experts/gpu/activation.cuh"
#include "experts/gpu/coded/layout.hpp"
#include "experts/gpu/grouped/fp8/codes.cuh"
#include "experts/gpu/grouped/fp8/shape.cuh"

namespace switchyard {

/// One multiplying warpgroup. `group` is to be the same register of all lanes (kernel.cuh).
template <bool kGated>
class Fp8Multiplier {
 public:
  using Shape = Fp8Shape<kGated>;
  using Cursor = StageCursor<Shape::kStages>;

  __device__ Fp8Multiplier(const Sm90Context<Shape>& context, const Fp8Params& fp8, int group)
      : context_(context),
        fp8_(fp8),
        group_(group),
        first_rows_(ptx::wgmma_operand(context.rows_at({}) +
                                       static_cast<std::uint32_t>(group * kHalfRows * 128))),
        first_weights_(ptx::wgmma_plain_operand(context.weights_at({}), 128 * coded::kGroupRows)),
        staging_{context.shared + Shape::kStagingAt +
                     static_cast<std::uint32_t>(group) * Shape::Out::kBytes,
                 1 + group} {}

  __device__ __forceinline__ void run() {
    float sums[2][64];
    Work work = context_.ring.receive(0);
    RowScales of_rows = row_scales(work);
    for (std::uint32_t index = 1; work.expert >= 0; ++index) {
      const bool has_rows = work.tile.rows > group_ * kHalfRows;
      if (has_rows) {
        multiply_tile(sums, work, of_rows);
      } else {
        pass_by();
      }
      // Which rows the next tile has is asked for before this one is finished.
      const Work next = context_.ring.receive(index);
      of_rows = row_scales(next);
      if (has_rows) finish(sums, work);
      work = next;
    }
  }

 private:
  static constexpr int kBehind = 200;  // cycles; a group of products is 256

  /// Where the scales of a thread's two rows begin.
  struct RowScales {
    std::uint32_t at[2];
  };
  /// Of one step: a thread's two rows and both halves of the weights.
  struct StepScales {
    float row[2];
    float half[2];
  };

  __device__ __forceinline__ RowScales row_scales(const Work& work) const {
    RowScales scales{};
    if (work.expert < 0 || work.tile.rows == 0) return scales;
    const int first = group_ * kHalfRows + static_cast<int>(threadIdx.x % 128 / 32) * 16 +
                      static_cast<int>(threadIdx.x % 32 / 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int32_t row = work.tile.row + min(first + 8 * i, work.tile.rows - 1);
      const std::int32_t source = kGated && context_.params.row_token != nullptr
                                      ? __ldg(context_.params.row_token + row)
                                      : row;
      scales.at[i] = static_cast<std::uint32_t>(source) * static_cast<std::uint32_t>(fp8_.blocks);
    }
    return scales;
  }

  [[nodiscard]] __device__ __forceinline__ const float* weight_scales(const Work& work,
                                                                      int half) const {
    const std::int32_t matrix = kGated ? 2 * work.expert + half : work.expert;
    const std::int32_t block = kGated ? work.tile.column_tile : 2 * work.tile.column_tile + half;
    return fp8_.weight_scales +
           (static_cast<std::int64_t>(matrix) * fp8_.row_blocks + min(block, fp8_.row_blocks - 1)) *
               fp8_.blocks;
  }

  /// A step's products run in two groups, of 128 weights each. Two warpgroups that begin theirs at
  /// once share the tensor cores, end at once, and leave them idle while both add up; one that is
  /// behind by more than that takes has them for itself meanwhile. So the second one begins a tile
  /// later, and what a step waits for, its stage and its scales, is waited for while the last group
  /// of the step before runs. Scales are asked for a step earlier still, in turns into two places:
  /// to move them would be to wait for them.
  __device__ __forceinline__ void multiply_tile(float (&sums)[2][64], const Work& work,
                                                const RowScales& of_rows) {
    const float* const of_weights[2] = {weight_scales(work, 0), weight_scales(work, 1)};
    const auto fetch = [&](StepScales& to, int step) {
      step = min(step, context_.num_steps - 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to.half[i] = __ldg(of_weights[i] + step);
        // The second product's rows are new: not by the cache that does not look for changes.
        const float* const from = fp8_.row_scales + of_rows.at[i] + step;
        to.row[i] = kGated ? __ldg(from) : *from;
      }
    };
    const auto multiplied = [](const StepScales& of, float(&scale)[2][2]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scale[i / 2][i % 2] = of.half[i / 2] * of.row[i % 2];
    };
    // In the second product only behind what writes the scales.
    if (!kGated) ptx::wait_for_previous_kernel();
    StepScales even, odd;
    fetch(even, 0);
    fetch(odd, 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[half][i] = 0;
    }
    ptx::mbarrier_wait(context_.full(cursor_), cursor_.phase);
    if (group_ == 1) ptx::wait_cycles(kBehind);
    float scale[2][2];
    multiplied(even, scale);
    // `of`: this step's scales, which are multiplied already; those of the step after next take
    // their place. `of_next`: the next step's.
    const auto multiply = [&](StepScales& of, const StepScales& of_next, int next) {
      fetch(of, next + 1);
      float part[64];
      begin_products(part, 0);
      add_part(part, sums[0], scale[0]);
      begin_products(part, 1);
      const Cursor now = cursor_;
      cursor_.advance();
      float next_scale[2][2] = {};
      if (next < context_.num_steps) {
        ptx::mbarrier_wait(context_.full(cursor_), cursor_.phase);
        multiplied(of_next, next_scale);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(next_scale[i / 2][i % 2]));
      add_part(part, sums[1], scale[1], [&] { release(now); });
#pragma unroll
      for (int i = 0; i < 4; ++i) scale[i / 2][i % 2] = next_scale[i / 2][i % 2];
    };
#pragma unroll 1
    for (int step = 0; step < context_.num_steps; step += 2) {
      multiply(even, odd, step + 1);
      if (step + 1 < context_.num_steps) multiply(odd, even, step + 2);
    }
  }

  /// An operand so many 16 bytes further on: of an address in shared memory no carry comes out of
  /// its field, so one addition of 32 bits does.
  static __device__ __forceinline__ std::uint64_t moved(std::uint64_t operand, std::uint32_t by) {
    return (operand & 0xFFFFFFFF00000000U) | (static_cast<std::uint32_t>(operand) + by);
  }

  /// Begins the products of 64 rows by 128 columns and 128 along the sum, of the stage at cursor_.
  __device__ __forceinline__ void begin_products(float (&part)[64], int half) const {
    const std::uint32_t stage = cursor_.stage * (Shape::kStageBytes >> 4);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::wgmma_e4m3(part, moved(first_rows_, stage + 2 * k),
                      moved(first_weights_, stage + half * (Shape::kWeightsBytes / 2 >> 4) +
                                                k * static_cast<std::uint32_t>(ptx::kPlainStep)),
                      k > 0);
    }
    ptx::wgmma_commit();
  }

  /// Waits for the products, calls done(), and adds them times the scales of the thread's two rows.
  template <typename Done>
  __device__ __forceinline__ void add_part(float (&part)[64], float (&sums)[64],
                                           const float (&scale)[2], Done&& done) const {
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(part[i])::"memory");
    done();
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = fmaf(part[i], scale[i / 2 % 2], sums[i]);
  }
  __device__ __forceinline__ void add_part(float (&part)[64], float (&sums)[64],
                                           const float (&scale)[2]) const {
    add_part(part, sums, scale, [] {});
  }

  /// In the first product one half is the gate's columns and the other the up ones.
  __device__ __forceinline__ void finish(float (&sums)[2][64], const Work& work) {
    const std::int32_t column = work.tile.column_tile * Shape::kOutColumns;
    add_bias(sums, work, column);
    if constexpr (kGated) {
      activate_sums(sums);
      const std::int32_t columns = context_.params.epilogue.columns;
      if (column + 128 <= columns) {
        store_codes<true>(sums[0], work.tile, group_, column, columns, fp8_);
      } else {
        store_codes<false>(sums[0], work.tile, group_, column, columns, fp8_);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) store_sums(sums[half], work.tile, column + half * 128);
    }
  }

  __device__ __forceinline__ void add_bias(float (&sums)[2][64], const Work& work,
                                           std::int32_t first) const {
    const EpilogueParams& epilogue = context_.params.epilogue;
    if (epilogue.bias == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const bias = epilogue.bias + (kGated ? 2 * work.expert + half : work.expert) *
                                                    static_cast<std::int64_t>(epilogue.columns);
#pragma unroll
      for (int block = 0; block < 16; ++block) {
        const std::int32_t column = first + (kGated ? 0 : half * 128) + block * 8 +
                                    static_cast<std::int32_t>(threadIdx.x % 4) * 2;
        if (column >= epilogue.columns) continue;
        const float2 b = __ldg(reinterpret_cast<const float2*>(bias + column));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          sums[half][4 * block + 2 * i] += b.x;
          sums[half][4 * block + 2 * i + 1] += b.y;
        }
      }
    }
  }

  __device__ __forceinline__ void activate_sums(float (&sums)[2][64]) const {
    const ActivationParams& activation = context_.params.epilogue.activation;
    constexpr bool kCoarse = true;  // the values become e4m3
    with_activation(activation.kind, [&](auto kind) {
      constexpr Activation kKind = decltype(kind)::value;
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        sums[0][i] = activate<kKind, true, kCoarse>(sums[0][i], sums[1][i], activation);
      }
    });
  }

  /// 128 columns of this warpgroup's rows.
  __device__ __forceinline__ void store_sums(const float (&sums)[64], const CtaTile& tile,
                                             std::int32_t column) {
    const RowBlock block{tile.row + group_ * kHalfRows,
                         min(tile.rows - group_ * kHalfRows, kHalfRows), column};
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      staging_.send(box, block, context_.params.epilogue, nullptr, [&](int i) {
        const int at = 4 * (box * 8 + i);
        const auto two = [&](int from) {
          return pack_two<__nv_bfloat16>(sums[from], sums[from + 1]);
        };
        return make_uint4(two(at), two(at + 2), two(at + 4), two(at + 6));
      });
    }
  }

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
  std::int32_t group_;
  std::uint64_t first_rows_, first_weights_;  // as operands, in the first stage
  typename Shape::Out staging_;
  Cursor cursor_;
};

}  // namespace switchyard
