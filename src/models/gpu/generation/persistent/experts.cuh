#pragma once

// The experts of a token step in a kernel that stays. Each block knows all rows' choices; an
// expert's weights are read once for all rows that have it: gate and up rows dealt to the warps of
// the grid, outputs to blocks, so that a block adds up what its outputs get from all experts.

#include "experts/gpu/activation.cuh"
#include "models/gpu/generation/choose_experts.cuh"
#include "models/gpu/generation/persistent/products.cuh"
#include "models/gpu/generation/persistent/step.hpp"

namespace switchyard::models::gpu {

/// Of a layer, in shared memory: what the rows have chosen, and who has chosen an expert.
template <int kRows>
struct Choices {
  static constexpr int kSlots = kRows * kMostChosen;  ///< Slot row * top_k + k.
  std::int32_t expert[kSlots];
  float share[kSlots];
  std::uint8_t index[kSlots];  ///< In `used`,
  std::uint8_t place[kSlots];  ///< and among its rows.

  int num_used;
  std::int16_t used[kMostRouted];  ///< Experts that have rows, ascending,
  std::uint8_t count[kMostRouted];
  std::uint8_t row[kMostRouted][kRows];
  std::uint8_t slot[kMostRouted][kRows];
  int before[kStepWarps];  ///< How many of them a warp's experts are.
};

/// Fills in who has chosen an expert; `expert` is there. All threads; ends with a barrier.
template <int kRows>
__device__ __forceinline__ void find_used(Choices<kRows>& to, int num_rows, int num_experts,
                                          int top_k) {
  static_assert(kMostRouted <= kStepThreads);
  const int e = static_cast<int>(threadIdx.x), warp = e / 32, lane = e % 32;
  if (e < num_rows * top_k)
    to.index[e] = to.place[e] = 0;  // rows that are not numbers choose twice
  int count = 0;
  std::uint8_t slots[kRows], rows[kRows];
  if (e < num_experts) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      int of_row = -1;
      for (int k = 0; r < num_rows && k < top_k; ++k) {
        if (to.expert[r * top_k + k] == e) of_row = r * top_k + k;
      }
      if (of_row < 0) continue;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i != count) continue;
        rows[i] = static_cast<std::uint8_t>(r);
        slots[i] = static_cast<std::uint8_t>(of_row);
      }
      ++count;
    }
  }
  const unsigned with_rows = __ballot_sync(0xffffffffU, count > 0);
  if (lane == 0) to.before[warp] = __popc(with_rows);
  __syncthreads();
  int index = __popc(with_rows & ((1U << lane) - 1));
  for (int w = 0; w < warp; ++w) index += to.before[w];
  if (e == kStepThreads - 1) to.num_used = index;
  if (count > 0) {
    to.used[index] = static_cast<std::int16_t>(e);
    to.count[index] = static_cast<std::uint8_t>(count);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // Behind the last one its first again: products are made of a power of two of rows.
      to.row[index][i] = i < count ? rows[i] : rows[0];
      to.slot[index][i] = i < count ? slots[i] : slots[0];
      if (i >= count) continue;
      to.index[slots[i]] = static_cast<std::uint8_t>(index);
      to.place[slots[i]] = static_cast<std::uint8_t>(i);
    }
  }
  __syncthreads();
}

/// Calls body(std::integral_constant<int, n>) of the smallest power of two n >= count.
template <int kMost, class Body>
__device__ __forceinline__ void with_count(int count, const Body& body) {
  if constexpr (kMost > 1) {
    if (count <= kMost / 2) return with_count<kMost / 2>(count, body);
  }
  body(std::integral_constant<int, kMost>{});
}

/// inner [B, K, I] = silu(gate rows) * up rows, of the rows [kRows, H] in shared memory.
template <typename T, int kRows>
__device__ __forceinline__ void gate_and_up(const PersistentLayer& layer, int hidden, const T* rows,
                                            const Choices<kRows>& choices, T* inner) {
  const int packs = hidden / kPack<T>, of_inner = layer.inner;
  const int count = choices.num_used * of_inner, stride = warps_of_grid();
  const int4* const in = reinterpret_cast<const int4*>(rows);
  const int4* const weights = static_cast<const int4*>(layer.w13);
  const auto load = [&](int item, int first, WeightPiece<2>& to) {
    const bool there = item < count;
    const int used = there ? item / of_inner : 0;
    const std::int64_t gate =
        std::int64_t{2} * choices.used[used] * of_inner + (item - used * of_inner);
    to.load(0, weights + gate * packs, first, packs, there);
    to.load(1, weights + (gate + of_inner) * packs, first, packs, there);
  };
  int item = warp_of_grid();
  WeightPiece<2> piece;
  load(item, 0, piece);
  while (item < count) {
    const int used = item / of_inner, column = item - used * of_inner;
    with_count<kRows>(choices.count[used], [&](auto size) {
      constexpr int kCount = size;
      float sum[2 * kCount] = {};
      for (int first = 0; first < packs; first += kPiecePacks) {
        const bool last = first + kPiecePacks >= packs;
        WeightPiece<2> next;
        load(last ? item + stride : item, last ? 0 : first + kPiecePacks, next);
        add_products<T, 2, kCount>(
            piece, in, first, packs, [&](int i) { return choices.row[used][i] * packs; }, sum);
        piece = next;
      }
      const float gate = sums_of_warp(sum);  // in the upper half of the lanes: up
      const float up = __shfl_xor_sync(0xffffffffU, gate, 16);
      const int lane = static_cast<int>(threadIdx.x) % 32, i = lane / (16 / kCount);
      if (lane >= 16 || lane % (16 / kCount) != 0 || i >= choices.count[used]) return;
      const std::int64_t at = std::int64_t{choices.slot[used][i]} * of_inner + column;
      store(inner + at, activate<Activation::kSilu, true>(gate, up, {}));
    });
    item += stride;
  }
}

/// A block's part of x = middle + what the experts give, rounded to T. begin() is what can be done
/// before the inner rows are there.
template <typename T, int kRows>
class DownProduct {
 public:
  __device__ DownProduct(const PersistentLayer& layer, int hidden, const Choices<kRows>& choices)
      : choices_(choices),
        weights_(static_cast<const int4*>(layer.w2)),
        hidden_(hidden),
        inner_(layer.inner),
        packs_(layer.inner / kPack<T>),
        pieces_((packs_ + kPiecePacks - 1) / kPiecePacks) {
    const int each = (hidden + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
    first_ = min(hidden, static_cast<int>(blockIdx.x) * each);
    outs_ = min(each, hidden - first_);
    steps_ = outs_ * choices.num_used * pieces_;
    step_ = static_cast<int>(threadIdx.x) / 32;
  }

  __device__ __forceinline__ void begin() { load(step_, piece_); }

  /// @param num_slots  Rows of `inner`; room for them and for steps * kRows floats is in `room`.
  __device__ __forceinline__ void run(const T* inner, int num_slots, int num_rows, int top_k,
                                      const float* middle, float* x, int4* room) {
    const int thread = static_cast<int>(threadIdx.x);
    const int4* const from = reinterpret_cast<const int4*>(inner);
    if (outs_ == 0) return;
    for (int i = thread; i < num_slots * packs_; i += kStepThreads) room[i] = from[i];
    float* const sums = reinterpret_cast<float*>(room + num_slots * packs_);
    __syncthreads();
    while (step_ < steps_) {
      WeightPiece<1> next;
      load(step_ + kStepWarps, next);
      const int piece = step_ % pieces_, used = step_ / pieces_ % choices_.num_used;
      with_count<kRows>(choices_.count[used], [&](auto size) {
        constexpr int kCount = size;
        float sum[kCount] = {};
        add_products<T, 1, kCount>(
            piece_, room, piece * kPiecePacks, packs_,
            [&](int i) { return choices_.slot[used][i] * packs_; }, sum);
        const float total = sums_of_warp(sum);
        const int lane = thread % 32;
        if (lane % (32 / kCount) == 0) sums[step_ * kRows + lane / (32 / kCount)] = total;
      });
      piece_ = next;
      step_ += kStepWarps;
    }
    __syncthreads();
    for (int i = thread; i < outs_ * num_rows; i += kStepThreads) {
      const int row = i / outs_, out = i - row * outs_;
      const std::int64_t at = std::int64_t{row} * hidden_ + first_ + out;
      const float before = middle[at];
      float sum = 0;
      for (int k = 0; k < top_k; ++k) {
        const int slot = row * top_k + k;
        const float* const parts =
            sums + (out * choices_.num_used + choices_.index[slot]) * pieces_ * kRows +
            choices_.place[slot];
        float y = 0;
        for (int piece = 0; piece < pieces_; ++piece) y += parts[piece * kRows];
        sum = fmaf(choices_.share[slot], y, sum);
      }
      T rounded;
      store(&rounded, sum);
      x[at] = before + to_float(rounded);
    }
  }

 private:
  __device__ __forceinline__ void load(int step, WeightPiece<1>& to) const {
    const bool there = step < steps_;
    const int piece = there ? step % pieces_ : 0, of_out = there ? step / pieces_ : 0;
    const int used = of_out % choices_.num_used, out = of_out / choices_.num_used;
    const std::int64_t row = std::int64_t{choices_.used[used]} * hidden_ + first_ + out;
    to.load(0, weights_ + row * packs_, piece * kPiecePacks, packs_, there);
  }

  const Choices<kRows>& choices_;
  const int4* weights_;
  int hidden_, inner_, packs_, pieces_;
  int first_, outs_, steps_, step_;
  WeightPiece<1> piece_;
};

}  // namespace switchyard::models::gpu
