#pragma once

// The routing of a token step in a kernel that stays: logits, and who has chosen an expert. Each
// block has it for itself.

#include "models/gpu/generation/choose_experts.cuh"
#include "models/gpu/generation/persistent/products.cuh"

namespace switchyard::models::gpu {

/// Of a layer, in shared memory: what the rows have chosen, and who has chosen an expert.
struct Choices {
  static constexpr int kSlots = kRowsOfStep * kMostChosen;  ///< Slot row * top_k + k.
  std::int32_t expert[kSlots];
  float share[kSlots];

  int num_used;
  std::int16_t used[kMostRouted];   ///< Experts that have rows, ascending.
  std::int16_t index[kMostRouted];  ///< Of an expert among them.
  int4 slots[kMostRouted];          ///< By expert: std::int16_t of each row; -1: none.
  int before[kStepWarps];           ///< How many of them a warp's experts are.

  [[nodiscard]] __device__ __forceinline__ int slot(int of_expert, int row) const {
    return reinterpret_cast<const std::int16_t*>(slots + of_expert)[row];
  }
  __device__ __forceinline__ void set(int of_expert, int row, int slot) {
    reinterpret_cast<std::int16_t*>(slots + of_expert)[row] = static_cast<std::int16_t>(slot);
  }
};
static_assert(sizeof(int4) == sizeof(std::int16_t) * kRowsOfStep);

/// Nobody has chosen an expert: behind a barrier.
__device__ __forceinline__ void clear_choices(Choices& choices, int num_experts) {
  static_assert(kMostRouted <= kStepThreads);
  const int e = static_cast<int>(threadIdx.x);
  if (e < num_experts) choices.slots[e] = make_int4(-1, -1, -1, -1);
}

/// Fills in which experts have been chosen; all threads, begins and ends with a barrier.
__device__ __forceinline__ void find_used(Choices& to, int num_experts) {
  const int e = static_cast<int>(threadIdx.x), warp = e / 32, lane = e % 32;
  const int num_warps = (num_experts + 31) / 32;
  __syncthreads();
  bool used = false;
  if (e < num_experts) {
    const int4 slots = to.slots[e];
    used = (slots.x & slots.y & slots.z & slots.w) != -1;
  }
  const unsigned in_use = __ballot_sync(0xffffffffU, used);
  int index = __popc(in_use & ((1U << lane) - 1));
  if (num_warps > 1) {
    if (lane == 0) to.before[warp] = __popc(in_use);
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < min(warp, num_warps); ++w) index += to.before[w];
  }
  if (e == num_experts - 1) to.num_used = index + (used ? 1 : 0);
  if (used) {
    to.used[index] = static_cast<std::int16_t>(e);
    to.index[e] = static_cast<std::int16_t>(index);
  }
  __syncthreads();
}

/// Logits of the experts that are this warp's, with the rows that are: num_warps share the
/// experts, and where these are few, several an expert's rows. Made, it has asked for the first
/// one's weights.
template <typename T>
class RouterProduct {
 public:
  /// @param warp  Of the num_warps that share the experts.
  __device__ __forceinline__ RouterProduct(const float* gate, int experts, int hidden, int warp,
                                           int num_warps)
      : gate_(gate), experts_(experts), hidden_(hidden) {
    sharing_ = max(1, min(kRowsOfStep, num_warps / experts));
    expert_ = warp / sharing_;
    first_row_ = warp % sharing_;
    stride_ = num_warps / sharing_;
    if (expert_ >= stride_) expert_ = experts_;  // one too many
    load(expert_, 0);
  }

  /// @param put  (row, expert, float), by one lane for each. `rows`: `stride` numbers apart.
  template <class Put>
  __device__ __forceinline__ void run(const T* rows, int stride, int num_rows, const Put& put) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int expert = expert_; expert < experts_; expert += stride_) {
#pragma unroll 1
      for (int row = first_row_; row < num_rows; row += sharing_) {
        float sum = 0;
#pragma unroll 1
        for (int base = 0; base < hidden_; base += kColumns) {
          if (asked_expert_ != expert || asked_base_ != base) load(expert, base);
#pragma unroll
          for (int i = 0; i < kFours; ++i) {
            const int column = base + 4 * (lane + 32 * i);
            if (column >= hidden_) continue;
            float x[4];
            load4(rows + row * stride + column, x);
#pragma unroll
            for (int j = 0; j < 4; ++j) sum = fmaf(ahead_[i][j], x[j], sum);
          }
        }
        sum = warp_sum(sum);
        if (lane == 0) put(row, expert, sum);
      }
    }
  }

 private:
  static constexpr int kFours = 4, kColumns = 128 * kFours;

  __device__ __forceinline__ void load(int expert, int base) {
    asked_expert_ = expert;
    asked_base_ = base;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int column = base + 4 * (static_cast<int>(threadIdx.x) % 32 + 32 * i);
      if (expert >= experts_ || column >= hidden_) continue;
      load4(gate_ + std::int64_t{expert} * hidden_ + column, ahead_[i]);
    }
  }

  const float* gate_;
  int experts_, hidden_, sharing_, expert_, first_row_, stride_;
  int asked_expert_, asked_base_;  ///< What is there:
  float ahead_[kFours][4];
};

}  // namespace switchyard::models::gpu
