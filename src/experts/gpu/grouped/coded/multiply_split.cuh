#pragma once

// MXFP4: codes become numbers of e5m2 with their scales in them, and rows are split into two
// numbers of e4m3 for each value (split.hpp), which are multiplied with the same weights.

#include <cstdint>

#include "core/gpu/wgmma_registers.cuh"
#include "experts/gpu/coded/numbers.cuh"
#include "experts/gpu/grouped/coded/output.cuh"

namespace switchyard {

template <typename Shape>
class SplitMultiplier : CodedOutput<Shape> {
 public:
  using CodedOutput<Shape>::CodedOutput;

  __device__ __forceinline__ void run(const CodedWalk& walk) {
    walk.for_each([&](const CodedItem& item) { multiply_up_to<Shape::kLeastRows>(item); });
  }

 private:
  using Output = CodedOutput<Shape>;
  using Output::cursor_, Output::params_, Output::ring_, Output::turns_;
  using Output::lane;
  using typename Output::Cursor;

  /// Products are made for 16, 32, 48 (Shape::kRows) or 32, 64, 72, 80, 96, 128 rows: fine about
  /// 64, which is what 512 tokens give 32 experts.
  static constexpr int more_rows(int than) {
    if (than < 32) return 32;
    return than == 64 || than == 72 ? than + 8 : than == 80 ? 96 : than + 32;
  }

  /// By the fewest rows that hold the item's, of those that products are made for.
  template <int kN>
  __device__ __forceinline__ void multiply_up_to(const CodedItem& item) {
    if constexpr (kN < Shape::kRows) {
      if (item.rows > kN) return multiply_up_to<more_rows(kN)>(item);
    }
    constexpr int kHeld = kN < Shape::kRows ? kN : Shape::kRows;
    if constexpr (Shape::kBeside && kHeld == kRowsBeside) {
      if (params_.beside) return multiply<kHeld, true>(item);
    }
    multiply<kHeld, false>(item);
  }

  /// A turn's numbers: of each step the four words of a lane.
  static constexpr int kSteps = kCodedTurn / coded::kStepValues;
  using Numbers = std::uint32_t[kSteps][4];

  /// Of the turn in the stage at `cursor`, which has been waited for.
  __device__ __forceinline__ void decode(const Cursor& cursor, Numbers& numbers) const {
    const unsigned char* const turn = this->find_group(cursor);
#pragma unroll
    for (int unit = 0; unit < kCodedTurn / coded::kUnitValues; ++unit) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned char* const at = turn + i * Output::kToOther + unit * coded::kMxfp4UnitBytes;
        const uint2 codes = *reinterpret_cast<const uint2*>(at + 8 * lane());
        const coded::Mxfp4Table table(at[coded::kMxfp4ScalesAt + lane() / 2]);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint2 bytes = table.numbers(step == 0 ? codes.x : codes.y);
          numbers[2 * unit + step][i] = bytes.x;
          numbers[2 * unit + step][2 + i] = bytes.y;
        }
      }
    }
  }

  /// The products of a turn run while the numbers of the next one are made.
  /// @tparam kBeside  The second numbers of rows are columns of the products beside the first ones,
  ///                  and have sums of theirs; else both are added one after the other.
  template <int kN, bool kBeside>
  __device__ __forceinline__ void multiply_turn(int turn, const Numbers& now, Numbers& next,
                                                float (&sums)[kN / 2]) {
    constexpr int kColumns = kBeside ? 2 * kN : kN;
    const std::uint64_t rows = ptx::wgmma_operand(ring_.rows_at(cursor_));
    float part[kColumns / 2];
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint64_t first = rows + 2 * step;
      ptx::wgmma_e5m2_e4m3_from_registers<kColumns>(part, now[step], first, step > 0 ? 1 : 0);
      if constexpr (!kBeside) {
        ptx::wgmma_e5m2_e4m3_from_registers<kN>(part, now[step], first + (Shape::kBoxBytes >> 4),
                                                1);
      }
    }
    ptx::wgmma_commit();
    Cursor after = cursor_;
    after.advance();
    if (turn + 1 < turns_) {
      ptx::mbarrier_wait(ring_.full(after), after.phase);
      decode(after, next);
    }
    Output::finish(part);
    if (lane() == 0) ptx::mbarrier_arrive(ring_.empty(cursor_));
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) sums[i] += kBeside ? part[i] + part[kN / 2 + i] : part[i];
    cursor_ = after;
  }

  template <int kN, bool kBeside>
  __device__ __forceinline__ void multiply(const CodedItem& item) {
    float sums[kN / 2] = {};
    Numbers numbers[2];
    ptx::mbarrier_wait(ring_.full(cursor_), cursor_.phase);
    decode(cursor_, numbers[0]);
    for (int turn = 0;; turn += 2) {
      multiply_turn<kN, kBeside>(turn, numbers[0], numbers[1], sums);
      if (turn + 1 >= turns_) break;
      multiply_turn<kN, kBeside>(turn + 1, numbers[1], numbers[0], sums);
      if (turn + 2 >= turns_) break;
    }
    const float* const scales = params_.scales + std::int64_t{Output::kMatrices} * item.expert;
    const float upper = __ldg(scales) * coded::kMxfp4Unfolded;
    const float lower = Shape::kGated ? __ldg(scales + 1) * coded::kMxfp4Unfolded : upper;
#pragma unroll
    for (int i = 0; i < kN / 2; i += 4) {
      const float2 of_row = row_scales(item, i * 2);
      sums[i] = sums[i] * upper * of_row.x;
      sums[i + 1] = sums[i + 1] * upper * of_row.y;
      sums[i + 2] = sums[i + 2] * lower * of_row.x;
      sums[i + 3] = sums[i + 3] * lower * of_row.y;
    }
    this->template store<kN>(item, sums);
  }

  /// Of the lane's two of 8 rows from `first` on. The kernel before this one may have written them
  /// while this one ran: they are no constants, and come from the L2.
  __device__ __forceinline__ float2 row_scales(const CodedItem& item, int first) const {
    const auto at = [&](int row) {
      return __ldcg(params_.row_scales + item.row + min(row, item.rows - 1));
    };
    const int row = first + lane() % 4 * 2;
    return {at(row), at(row + 1)};
  }
};

}  // namespace switchyard
