#pragma once

// The multiplying warpgroups of the grouped product with codes. Each has 64 weight rows of every
// item as the M side, from registers, and all its token rows as the N side; a lane has the gate and
// the up row of a column (plain: rows 8 apart), so that an item is finished where it is summed.

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "core/gpu/wgmma_registers.cuh"
#include "experts/gpu/activation.cuh"
#include "experts/gpu/coded/numbers.cuh"
#include "experts/gpu/grouped/coded/load.cuh"

namespace switchyard {

/// The factors of a lane's two rows: of their matrices, or of the block of a turn.
template <WeightFormat kFormat>
struct CodedScales {
  const float* upper;
  const float* lower;
  __device__ __forceinline__ float2 at(int turn) const {
    if constexpr (kFormat == WeightFormat::kE4M3) {
      return {__ldg(upper + turn), __ldg(lower + turn)};
    } else {
      return {__ldg(upper), __ldg(lower)};
    }
  }
};

template <typename Shape>
class CodedMultiplier {
 public:
  static constexpr WeightFormat kFormat = Shape::kFormat;
  static constexpr bool kByTurn = kFormat == WeightFormat::kE4M3;
  static constexpr bool kIsSecond = Shape::kEpilogue == CodedEpilogue::kLinear;
  using Cursor = StageCursor<Shape::kStages>;

  __device__ CodedMultiplier(const CodedRing<Shape>& ring, const CodedParams& params,
                             const unsigned char* shared, int turns)
      : ring_(ring), params_(params), shared_(shared), turns_(turns) {}

  __device__ __forceinline__ void run(const CodedWalk& walk) {
    walk.for_each([&](const CodedItem& item) { multiply_up_to<16>(item); });
  }

 private:
  /// By the fewest rows, a multiple of 16 or all, that hold the item's.
  template <int kN>
  __device__ __forceinline__ void multiply_up_to(const CodedItem& item) {
    if constexpr (kN >= Shape::kRows) {
      multiply<Shape::kRows>(item);
    } else if (item.rows <= kN) {
      multiply<kN>(item);
    } else {
      multiply_up_to<kN + 16>(item);
    }
  }
  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  /// The first of the two groups of 8 rows of this warp in a stage, and bytes to the other.
  static __device__ __forceinline__ int group() { return Shape::kGated ? warp() : 2 * warp(); }
  static constexpr int kToOther = (Shape::kGated ? Shape::kMultiplyWarps : 1) * Shape::kGroupBytes;
  /// Columns of the output that begin the warp's groups.
  static __device__ __forceinline__ int column(const CodedItem& item, int which) {
    return item.tile * Shape::kColumns + 8 * (Shape::kGated ? warp() : 2 * warp() + which);
  }

  __device__ __forceinline__ CodedScales<kFormat> scales_of(const CodedItem& item) const {
    constexpr int kMatrices = Shape::kGated ? 2 : 1;
    const std::int64_t matrix = std::int64_t{kMatrices} * item.expert;
    if constexpr (kByTurn) {
      const int across = (params_.depth + kE4M3Block - 1) / kE4M3Block;
      const int down = (params_.columns + kE4M3Block - 1) / kE4M3Block;
      const auto row = [&](int which) {
        const int block = min(column(item, which), params_.columns - 1) / kE4M3Block;
        return params_.scales + ((matrix + (Shape::kGated ? which : 0)) * down + block) * across;
      };
      return {row(0), row(1)};
    } else {
      return {params_.scales + matrix, params_.scales + matrix + (Shape::kGated ? 1 : 0)};
    }
  }

  /// What a lane reads at a time: of two rows the codes of 8 weights each of a step (e4m3) or of
  /// two (MXFP4, a word each), and their scales, a byte a step.
  struct Codes {
    uint2 code[2];
    std::uint32_t scale[2];
  };
  static constexpr int kStepsOfCodes = kByTurn ? 1 : 2;
  /// The numbers of a step: the left sides of two products.
  struct Numbers {
    std::uint32_t low[4];
    std::uint32_t high[4];
  };

  /// @param turn  Where the codes of this lane's first row begin in that turn.
  /// @param step  A multiple of kStepsOfCodes.
  static __device__ __forceinline__ Codes load(const unsigned char* turn, int step) {
    Codes codes;
    const auto word = [](const unsigned char* at) {
      return *reinterpret_cast<const std::uint32_t*>(at);
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kByTurn) {
        // As coded::ordered_run says: each of the two reads all banks once.
        const int to_last = 4 - 2 * coded::e4m3_first_word(lane() % 4);
        const unsigned char* const at = turn + i * kToOther + step * coded::kE4M3StepBytes;
        codes.code[i] = {word(at), word(at + to_last)};
      } else {
        const unsigned char* const at = turn + i * kToOther + step / 2 * coded::kMxfp4UnitBytes;
        const int to_scales = coded::kMxfp4ScalesAt + lane() / 4 * 2 - 8 * lane();
        codes.code[i] = *reinterpret_cast<const uint2*>(at);
        codes.scale[i] = *reinterpret_cast<const std::uint16_t*>(at + to_scales);
      }
    }
    return codes;
  }
  /// @param step  Of those of `codes`.
  static __device__ __forceinline__ void decode(const Codes& codes, int step, Numbers& numbers) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint4 w;
      if constexpr (kByTurn) {
        w = coded::e4m3_numbers(codes.code[i]);
      } else {
        const std::uint32_t scale = step == 0 ? codes.scale[i] & 255U : codes.scale[i] >> 8;
        w = coded::mxfp4_numbers(step == 0 ? codes.code[i].x : codes.code[i].y,
                                 scale * coded::kMxfp4Exponents);
      }
      numbers.low[i] = w.x, numbers.low[2 + i] = w.y;
      numbers.high[i] = w.z, numbers.high[2 + i] = w.w;
    }
  }

  /// Where this lane's codes lie in `turn`, whose stage has been waited for.
  __device__ __forceinline__ const unsigned char* find(int turn, const Cursor& cursor) const {
    const int place =
        kByTurn ? coded::e4m3_place(lane() / 4, lane() % 4) + coded::e4m3_first_word(lane() % 4)
                : 8 * lane();
    return shared_ + cursor.stage * Shape::kStageBytes + turn % Shape::kTurns * Shape::kTurnBytes +
           group() * Shape::kGroupBytes + place;
  }

  /// Numbers of a step are made while the products of the step before run, over the ends of turns
  /// and stages too; codes are asked for before those products are.
  template <int kN>
  __device__ __forceinline__ void multiply(const CodedItem& item) {
    constexpr int kSteps = kCodedTurn / coded::kStepValues;
    static_assert(kSteps % 2 == 0);
    constexpr std::uint64_t kNextBox = Shape::kBoxBytes >> 4;
    const CodedScales<kFormat> scales = scales_of(item);
    float sums[kN / 2] = {};
    float part[kByTurn ? kN / 2 : 1];
    float2 scale = scales.at(0);
    Numbers numbers[2];
    ptx::mbarrier_wait(ring_.full(cursor_), cursor_.phase);
    const unsigned char* codes = find(0, cursor_);
    Codes held = load(codes, 0);
    decode(held, 0, numbers[0]);
    for (int turn = 0; turn < turns_; ++turn) {
      const std::uint64_t rows = ptx::wgmma_operand(ring_.rows_at(cursor_)) +
                                 turn % Shape::kTurns * (2 * Shape::kBoxBytes >> 4);
      const bool ends_stage = turn % Shape::kTurns == Shape::kTurns - 1 || turn == turns_ - 1;
      Cursor next = cursor_;
      if (ends_stage) next.advance();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const bool ends_turn = step == kSteps - 1;
        const int of_held = (step + 1) % kStepsOfCodes;
        if (!ends_turn && of_held == 0) held = load(codes, step + 1);
        const std::uint64_t b = rows + step / 2 * kNextBox + step % 2 * 4;
        const std::uint32_t adds = step > 0 || !kByTurn ? 1 : 0;
        if constexpr (kByTurn) {
          multiply_step<kN>(part, numbers[step % 2], b, adds);
        } else {
          multiply_step<kN>(sums, numbers[step % 2], b, adds);
        }
        if (ends_turn && turn + 1 < turns_) {
          if (ends_stage) ptx::mbarrier_wait(ring_.full(next), next.phase);
          codes = find(turn + 1, next);
          held = load(codes, 0);
        }
        ptx::wgmma_wait<1>();  // of the step before, whose numbers lie where the next ones will
        decode(held, of_held, numbers[(step + 1) % 2]);
      }
      if constexpr (kByTurn) {
        const float2 next_scale = scales.at(min(turn + 1, turns_ - 1));
        finish(part);
        add(sums, part, scale);
        scale = next_scale;
      } else {
        finish(sums);
      }
      if (ends_stage && lane() == 0) ptx::mbarrier_arrive(ring_.empty(cursor_));
      cursor_ = next;
    }
    if constexpr (!kByTurn) {
#pragma unroll
      for (int i = 0; i < kN / 2; i += 4) {
        sums[i] *= scale.x, sums[i + 1] *= scale.x;
        sums[i + 2] *= scale.y, sums[i + 3] *= scale.y;
      }
    }
    store<kN>(item, sums);
  }

  /// Under way when it returns.
  template <int kN>
  static __device__ __forceinline__ void multiply_step(float (&sums)[kN / 2],
                                                       const Numbers& numbers, std::uint64_t b,
                                                       std::uint32_t adds) {
    ptx::wgmma_fence();
    ptx::wgmma_bf16_from_registers<kN>(sums, numbers.low, b, adds);
    ptx::wgmma_bf16_from_registers<kN>(sums, numbers.high, b + 2, 1);
    ptx::wgmma_commit();
  }
  /// Until all products have been added; the compiler may not move reads of sums above.
  template <int kValues>
  static __device__ __forceinline__ void finish(float (&sums)[kValues]) {
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kValues; ++i) asm volatile("" : "+f"(sums[i])::"memory");
    __syncwarp();
  }

  template <int kValues>
  static __device__ __forceinline__ void add(float (&sums)[kValues], const float (&part)[kValues],
                                             const float2& scale) {
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
      sums[i] = fmaf(part[i], scale.x, sums[i]);
      sums[i + 1] = fmaf(part[i + 1], scale.x, sums[i + 1]);
      sums[i + 2] = fmaf(part[i + 2], scale.y, sums[i + 2]);
      sums[i + 3] = fmaf(part[i + 3], scale.y, sums[i + 3]);
    }
  }

  template <int kN>
  __device__ __forceinline__ void store(const CodedItem& item, const float (&sums)[kN / 2]) const {
    const int upper = column(item, 0) + lane() / 4;
    const int lower = column(item, 1) + lane() / 4;
    float2 bias{};
    if (params_.bias != nullptr) {
      const std::int64_t columns = params_.columns;
      const float* of = params_.bias + (Shape::kGated ? 2 : 1) * columns * item.expert;
      const auto at = [&](int i) { return __ldg(of + min(i, params_.columns - 1)); };
      bias.x = at(upper);
      bias.y = Shape::kGated ? __ldg(of + columns + min(upper, params_.columns - 1)) : at(lower);
    }
    if constexpr (Shape::kEpilogue == CodedEpilogue::kLinear) {
      put_both<kN>(
          item, [&](int i) { return sums[i] + bias.x; },
          [&](int i) { return sums[i + 2] + bias.y; });
    } else {
      with_activation(params_.activation.kind, [&](auto kind) {
        if constexpr (Shape::kGated) {
          put<kN>(item, 0, [&](int i) {
            return activate<kind(), true>(sums[i] + bias.x, sums[i + 2] + bias.y,
                                          params_.activation);
          });
        } else if constexpr (kind() != Activation::kClampedSwiglu) {
          put<kN>(item, 0, [&](int i) {
            return activate<kind(), false>(sums[i] + bias.x, 0, params_.activation);
          });
          put<kN>(item, 1, [&](int i) {
            return activate<kind(), false>(sums[i + 2] + bias.y, 0, params_.activation);
          });
        }
      });
    }
  }

  /// Of 8 rows and a group of 8 columns a lane has two rows of column lane / 4; then two columns of
  /// row lane / 4, from 2 (lane % 4) on.
  template <typename Value>
  static __device__ __forceinline__ std::uint32_t turned(int rows, Value&& value) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(value(4 * rows), value(4 * rows + 1));
    return ptx::transpose_8x8(*reinterpret_cast<const std::uint32_t*>(&pair));
  }
  /// Where the lane's row of the first 8 has `to_column`.
  __device__ __forceinline__ __nv_bfloat16* place_of(const CodedItem& item, int to_column) const {
    return static_cast<__nv_bfloat16*>(params_.out) +
           static_cast<std::int64_t>(item.row + lane() / 4) * params_.columns + to_column;
  }

  /// @param which  Of the warp's groups.
  /// @param value  Of sum i and, of the other row, i + 2.
  template <int kN, typename Value>
  __device__ __forceinline__ void put(const CodedItem& item, int which, Value&& value) const {
    int to_column = column(item, which) + lane() % 4 * 2;
    const bool exists = to_column < params_.columns;
    if constexpr (Shape::kOrdered && !kIsSecond) {
      to_column = static_cast<int>(coded::ordered_column(kFormat, to_column));
    }
    __nv_bfloat16* const out = place_of(item, to_column);
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      const std::uint32_t pair = turned(n, value);
      if (exists && 8 * n + lane() / 4 < item.rows) {
        *reinterpret_cast<std::uint32_t*>(out + std::int64_t{8} * n * params_.columns) = pair;
      }
    }
  }

  /// Both groups, which are 16 columns side by side: a lane writes four of a row, so that a warp
  /// writes whole sectors. Of neighbours one takes the first group's columns of both, one the
  /// other's.
  template <int kN, typename First, typename Last>
  __device__ __forceinline__ void put_both(const CodedItem& item, First&& first,
                                           Last&& last) const {
    const bool takes_last = lane() % 2 == 1;
    const int to_column = column(item, takes_last ? 1 : 0) + lane() % 4 / 2 * 4;
    const bool exists = to_column < params_.columns;
    __nv_bfloat16* const out = place_of(item, to_column);
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      const std::uint32_t of_first = turned(n, first);
      const std::uint32_t of_last = turned(n, last);
      const std::uint32_t other = __shfl_xor_sync(~0U, takes_last ? of_first : of_last, 1);
      if (exists && 8 * n + lane() / 4 < item.rows) {
        *reinterpret_cast<uint2*>(out + std::int64_t{8} * n * params_.columns) =
            takes_last ? make_uint2(other, of_last) : make_uint2(of_first, other);
      }
    }
  }

  const CodedRing<Shape>& ring_;
  const CodedParams& params_;
  const unsigned char* shared_;
  int turns_;
  Cursor cursor_;
};

}  // namespace switchyard
