#pragma once

// The experts of a token step in a kernel that stays. An expert's weights are read once for all
// rows and multiplied with all of them: what nobody asked for is thrown away. Gate and up rows are
// dealt to the warps of the grid, outputs to blocks, so that a block adds up what its outputs get
// from all experts. Of one row, and in f32, lanes share a row of weights; of several in bf16 it is
// mma.sync.

#include "experts/gpu/activation.cuh"
#include "models/gpu/generation/persistent/routing.cuh"
#include "models/gpu/generation/persistent/step.hpp"

namespace switchyard::models::gpu {

template <typename T, int kRows>
inline constexpr bool kByMma = sizeof(T) == 2 && kRows == kRowsOfStep;

/// A layer's experts as the products see them. Rows are of 16 bytes ("packs").
struct ExpertWeights {
  const int4* w13;
  const int4* w2;
  int hidden, inner;          ///< H, I.
  int packs_in, packs_inner;  ///< Of H and I.
};
template <typename T>
__device__ __forceinline__ ExpertWeights experts_of(const PersistentLayer& layer, int hidden) {
  return {static_cast<const int4*>(layer.w13),
          static_cast<const int4*>(layer.w2),
          hidden,
          layer.inner,
          hidden / kPack<T>,
          layer.inner / kPack<T>};
}

// ---- gate and up -------------------------------------------------------------------------------

/// inner [slots, I] = silu(gate rows) * up rows, of the rows [kRows, H] in shared memory, `stride`
/// packs apart: a warp has a gate row and its up row.
template <typename T, int kRows>
__device__ __forceinline__ void gate_and_up_by_lanes(const ExpertWeights& e, const int4* rows,
                                                     int stride, const Choices& choices, T* inner) {
  const int count = choices.num_used * e.inner, step = warps_of_grid();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto load = [&](int item, int first, WeightPiece<2>& to) {
    const bool there = item < count;
    const int used = there ? item / e.inner : 0;
    const int row = 2 * choices.used[used] * e.inner + item - used * e.inner;
    const int4* const gate = e.w13 + std::int64_t{row} * e.packs_in;
    to.load(0, gate, first, e.packs_in, there);
    to.load(1, gate + std::int64_t{e.inner} * e.packs_in, first, e.packs_in, there);
  };
  int item = warp_of_grid();
  WeightPiece<2> piece;
  load(item, 0, piece);
#pragma unroll 1
  for (; item < count; item += step) {
    float sum[2 * kRows] = {};
#pragma unroll 1
    for (int first = 0; first < e.packs_in; first += kPiecePacks) {
      const bool last = first + kPiecePacks >= e.packs_in;
      WeightPiece<2> next;
      load(last ? item + step : item, last ? 0 : first + kPiecePacks, next);
      add_products<T, 2, kRows>(
          piece, rows, first, e.packs_in, [&](int row) { return row * stride; }, sum);
      piece = next;
    }
    const float gate = sums_of_warp(sum);  // in the upper half of the lanes: up
    const float up = __shfl_xor_sync(0xffffffffU, gate, 16);
    const int row = lane / (16 / kRows);
    if (lane >= 16 || lane % (16 / kRows) != 0) continue;
    const int used = item / e.inner, slot = choices.slot(choices.used[used], row);
    if (slot < 0) continue;
    store(inner + slot * e.inner + item - used * e.inner,
          activate<Activation::kSilu, true>(gate, up, {}));
  }
}

/// Blocks of 32 columns of a lane's row under way.
inline constexpr int kMmaAhead = 4;

/// Of a warp: lane l has rows l / 4 of eight gate rows and their up rows, and of each 32 columns 16
/// bytes, l % 4; which columns go together in a product does not matter. A tile's weights are its
/// 16 rows, the other side the rows of the step.
template <typename T>
__device__ __forceinline__ void gate_and_up_by_mma(const ExpertWeights& e, const int4* rows,
                                                   int stride, const Choices& choices, T* inner) {
  const int lane = static_cast<int>(threadIdx.x) % 32, of = lane / 4, part = lane % 4;
  const int of_expert = (e.inner + 7) / 8, count = choices.num_used * of_expert;
  const int4* const x = rows + of * stride + part;
#pragma unroll 1
  for (int tile = warp_of_grid(); tile < count; tile += warps_of_grid()) {
    const int used = tile / of_expert, column = (tile - used * of_expert) * 8 + of;
    const int expert = choices.used[used];
    const bool there = column < e.inner;
    const int row = 2 * expert * e.inner + (there ? column : 0);
    const int4* const gate = e.w13 + std::int64_t{row} * e.packs_in + part;
    const int4* const up = gate + std::int64_t{e.inner} * e.packs_in;
    float sum[4] = {};
    int4 ahead[kMmaAhead][2];
    const auto load = [&](int at, int4(&to)[2]) {
      const bool inside = at + part < e.packs_in;
      to[0] = inside ? ptx::load_constant_16(gate + at) : int4{};
      to[1] = inside ? ptx::load_constant_16(up + at) : int4{};
    };
#pragma unroll
    for (int i = 0; i < kMmaAhead; ++i) load(4 * i, ahead[i]);
#pragma unroll 1
    for (int base = 0; base < e.packs_in; base += 4 * kMmaAhead) {
#pragma unroll
      for (int i = 0; i < kMmaAhead; ++i) {
        const int at = base + 4 * i;
        const int4 b = x[at + part < e.packs_in ? at : 0];
        multiply_block(ahead[i][0], ahead[i][1], b, sum);
        load(at + 4 * kMmaAhead, ahead[i]);
      }
    }
    // Lane l: gate and up of its row with rows 2 (l % 4) and the next of the step.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = choices.slot(expert, 2 * part + i);
      if (slot < 0 || !there) continue;
      store(inner + slot * e.inner + column,
            activate<Activation::kSilu, true>(sum[i], sum[2 + i], {}));
    }
  }
}

template <typename T, int kRows>
__device__ __forceinline__ void gate_and_up(const ExpertWeights& e, const int4* rows, int stride,
                                            const Choices& choices, T* inner) {
  if constexpr (kByMma<T, kRows>) {
    gate_and_up_by_mma<T>(e, rows, stride, choices, inner);
  } else {
    gate_and_up_by_lanes<T, kRows>(e, rows, stride, choices, inner);
  }
}

// ---- down --------------------------------------------------------------------------------------

/// What a block's outputs get from each expert. Items are an expert's, some outputs' and a part of
/// the columns; sums [items, kOuts, kRows] of them are left in shared memory.
template <typename T, int kRows>
class DownProduct {
 public:
  /// Outputs of an item, and packs of its columns.
  static constexpr int kOuts = kByMma<T, kRows> ? 8 : 1;
  static constexpr int kPacks = kByMma<T, kRows> ? 32 : kPiecePacks;

  __device__ __forceinline__ DownProduct(const ExpertWeights& e, const Choices& choices)
      : e_(e), choices_(choices), own_(e.hidden) {
    groups_ = (own_.count + kOuts - 1) / kOuts;
    parts_ = (e.packs_inner + kPacks - 1) / kPacks;
    items_ = choices.num_used * groups_ * parts_;
    item_ = static_cast<int>(threadIdx.x) / 32;
  }
  [[nodiscard]] __device__ __forceinline__ int first() const { return own_.first; }
  [[nodiscard]] __device__ __forceinline__ int outs() const { return own_.count; }

  /// Asks for the first item's weights.
  __device__ __forceinline__ void begin() {
    if constexpr (kByMma<T, kRows>) {
      load_blocks(item_, ahead_);
    } else {
      load_piece(item_, piece_);
    }
  }
  /// @param x     Inner rows in shared memory, `stride` packs apart; row `none` is zeros.
  __device__ __forceinline__ void run(const int4* x, int stride, int none, float* sums) {
    if constexpr (kByMma<T, kRows>) {
      run_by_mma(x, stride, none, sums);
    } else {
      run_by_lanes(x, stride, none, sums);
    }
  }
  /// Of output `out` of the block's, row `row`, from a used expert.
  [[nodiscard]] __device__ __forceinline__ float get(const float* sums, int used, int out,
                                                     int row) const {
    const int item = (used * groups_ + out / kOuts) * parts_;
    float sum = 0;
#pragma unroll 1
    for (int part = 0; part < parts_; ++part) {
      sum += sums[((item + part) * kOuts + out % kOuts) * kRows + row];
    }
    return sum;
  }

 private:
  struct Item {
    int expert, out, first;  ///< First output of the block's, first pack.
  };
  [[nodiscard]] __device__ __forceinline__ Item find(int item) const {
    const int of_out = item / parts_, used = of_out / groups_;
    return {choices_.used[used], (of_out - used * groups_) * kOuts,
            (item - of_out * parts_) * kPacks};
  }
  [[nodiscard]] __device__ __forceinline__ const int4* row_of(const Item& at, int out) const {
    return e_.w2 + (std::int64_t{at.expert} * e_.hidden + own_.first + out) * e_.packs_inner;
  }
  [[nodiscard]] __device__ __forceinline__ int x_row(int expert, int row, int none) const {
    const int slot = choices_.slot(expert, row);
    return slot < 0 ? none : slot;
  }

  __device__ __forceinline__ void load_piece(int item, WeightPiece<1>& to) const {
    const bool there = item < items_;
    const Item at = find(there ? item : 0);
    to.load(0, row_of(at, at.out), at.first, e_.packs_inner, there);
  }
  __device__ __forceinline__ void run_by_lanes(const int4* x, int stride, int none, float* sums) {
#pragma unroll 1
    for (; item_ < items_; item_ += kStepWarps) {
      WeightPiece<1> next;
      load_piece(item_ + kStepWarps, next);
      const Item at = find(item_);
      int from[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) from[row] = x_row(at.expert, row, none) * stride;
      float sum[kRows] = {};
      add_products<T, 1, kRows>(
          piece_, x, at.first, e_.packs_inner, [&](int row) { return from[row]; }, sum);
      const float total = sums_of_warp(sum);
      const int lane = static_cast<int>(threadIdx.x) % 32;
      if (lane % (32 / kRows) == 0) sums[item_ * kRows + lane / (32 / kRows)] = total;
      piece_ = next;
    }
  }

  static constexpr int kBlocks = kPacks / 4;
  __device__ __forceinline__ void load_blocks(int item, int4 (&to)[kBlocks]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Item at = find(item < items_ ? item : 0);
    const bool there = item < items_ && at.out + lane / 4 < own_.count;
    const int4* const row = row_of(at, there ? at.out + lane / 4 : 0);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int pack = at.first + 4 * i + lane % 4;
      to[i] = there && pack < e_.packs_inner ? ptx::load_constant_16(row + pack) : int4{};
    }
  }
  __device__ __forceinline__ void run_by_mma(const int4* x, int stride, int none, float* sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (; item_ < items_; item_ += kStepWarps) {
      const Item at = find(item_);
      const int4* const from = x + x_row(at.expert, lane / 4, none) * stride;
      float sum[4] = {};
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int pack = at.first + 4 * i + lane % 4;
        multiply_block(ahead_[i], int4{}, from[pack < e_.packs_inner ? pack : 0], sum);
      }
      load_blocks(item_ + kStepWarps, ahead_);
      float* const to = sums + (item_ * kOuts + lane / 4) * kRows + 2 * (lane % 4);
      *reinterpret_cast<float2*>(to) = {sum[0], sum[1]};
    }
  }

  const ExpertWeights& e_;
  const Choices& choices_;
  OwnOutputs own_;
  int groups_, parts_, items_, item_;
  union {
    WeightPiece<1> piece_;
    int4 ahead_[kBlocks];
  };
};

}  // namespace switchyard::models::gpu
