#pragma once

// e4m3: codes become numbers of bf16, for rows of bf16.

#include <cstdint>

#include "core/gpu/wgmma_registers.cuh"
#include "experts/gpu/coded/numbers.cuh"
#include "experts/gpu/grouped/coded/output.cuh"

namespace switchyard {

template <typename Shape>
class WideMultiplier : CodedOutput<Shape> {
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

  /// The factors of a lane's two rows, of the block of a turn.
  struct Scales {
    const float* upper;
    const float* lower;
    __device__ __forceinline__ float2 at(int turn) const {
      return {__ldg(upper + turn), __ldg(lower + turn)};
    }
  };
  __device__ __forceinline__ Scales scales_of(const CodedItem& item) const {
    const std::int64_t matrix = std::int64_t{Output::kMatrices} * item.expert;
    const int across = (params_.depth + kE4M3Block - 1) / kE4M3Block;
    const int down = (params_.columns + kE4M3Block - 1) / kE4M3Block;
    const auto row = [&](int which) {
      const int block = min(Output::column(item, which), params_.columns - 1) / kE4M3Block;
      return params_.scales + ((matrix + (Shape::kGated ? which : 0)) * down + block) * across;
    };
    return {row(0), row(1)};
  }

  /// What a lane reads at a time: of two rows the codes of 8 weights each of a step.
  struct Codes {
    uint2 code[2];
  };
  /// The numbers of a step: the left sides of two products.
  struct Numbers {
    std::uint32_t low[4];
    std::uint32_t high[4];
  };

  /// @param turn  Where the codes of this lane's first row begin in that turn.
  static __device__ __forceinline__ Codes load(const unsigned char* turn, int step) {
    Codes codes;
    const auto word = [](const unsigned char* at) {
      return *reinterpret_cast<const std::uint32_t*>(at);
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // As coded::ordered_run says: each of the two reads all banks once.
      const int to_last = 4 - 2 * coded::e4m3_first_word(lane() % 4);
      const unsigned char* const at = turn + i * Output::kToOther + step * coded::kE4M3StepBytes;
      codes.code[i] = {word(at), word(at + to_last)};
    }
    return codes;
  }
  static __device__ __forceinline__ void decode(const Codes& codes, Numbers& numbers) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 w = coded::e4m3_numbers(codes.code[i]);
      numbers.low[i] = w.x, numbers.low[2 + i] = w.y;
      numbers.high[i] = w.z, numbers.high[2 + i] = w.w;
    }
  }
  /// Where this lane's codes lie in a stage, which has been waited for.
  __device__ __forceinline__ const unsigned char* find(const Cursor& cursor) const {
    return this->find_group(cursor) + coded::e4m3_place(lane() / 4, lane() % 4) +
           coded::e4m3_first_word(lane() % 4);
  }

  /// Numbers of a step are made while the products of the step before run, over the ends of turns
  /// too; codes are asked for before those products are.
  template <int kN>
  __device__ __forceinline__ void multiply(const CodedItem& item) {
    constexpr int kSteps = kCodedTurn / coded::kStepValues;
    static_assert(kSteps % 2 == 0);
    constexpr std::uint64_t kNextBox = Shape::kBoxBytes >> 4;
    const Scales scales = scales_of(item);
    float sums[kN / 2] = {};
    float part[kN / 2];
    float2 scale = scales.at(0);
    Numbers numbers[2];
    ptx::mbarrier_wait(ring_.full(cursor_), cursor_.phase);
    const unsigned char* codes = find(cursor_);
    Codes held = load(codes, 0);
    decode(held, numbers[0]);
    for (int turn = 0; turn < turns_; ++turn) {
      const std::uint64_t rows = ptx::wgmma_operand(ring_.rows_at(cursor_));
      Cursor next = cursor_;
      next.advance();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const bool ends_turn = step == kSteps - 1;
        if (!ends_turn) held = load(codes, step + 1);
        const std::uint64_t b = rows + step / 2 * kNextBox + step % 2 * 4;
        multiply_step<kN>(part, numbers[step % 2], b, step > 0 ? 1 : 0);
        if (ends_turn && turn + 1 < turns_) {
          ptx::mbarrier_wait(ring_.full(next), next.phase);
          codes = find(next);
          held = load(codes, 0);
        }
        ptx::wgmma_wait<1>();  // of the step before, whose numbers lie where the next ones will
        decode(held, numbers[(step + 1) % 2]);
      }
      const float2 next_scale = scales.at(min(turn + 1, turns_ - 1));
      Output::finish(part);
      add(sums, part, scale);
      scale = next_scale;
      if (lane() == 0) ptx::mbarrier_arrive(ring_.empty(cursor_));
      cursor_ = next;
    }
    this->template store<kN>(item, sums);
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
};

}  // namespace switchyard
