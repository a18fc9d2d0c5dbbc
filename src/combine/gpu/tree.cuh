#pragma once

// The binary tree of neighbours in registers, for leaves that come in ascending order and may be
// absent; the same bits as combine/sum_tree.hpp.

#include <cuda_runtime.h>

#include <cstdint>

namespace switchyard {

/// A tree of 2^kLevels leaves, over kColumns columns; kLevels = 0: of any width, with at most two
/// leaves present. All threads that share a token take the same branches.
template <int kLevels, int kColumns>
class RegisterTree {
 public:
  float sum[kColumns];  ///< Of the leaf that is being filled.

  __device__ __forceinline__ RegisterTree() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum[c] = 0.0F;
  }

  /// Go on to leaf `index`, larger than the last; the first leaf needs no call but begin().
  __device__ __forceinline__ void begin(int index) {
    last_ = index;
    leaves_ = 1;
  }

  __device__ __forceinline__ void next_leaf(int index) {
    // The subtree that ends here waits at the level where it and the new leaf meet.
    const int level = kLevels == 0 ? 0 : 31 - __clz(last_ ^ index);
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      if (l < level) add_pending(l);
    }
#pragma unroll
    for (int l = 0; l < kSlots; ++l) {
      if (l != level) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) pending_[l][c] = sum[c];
    }
    waiting_ |= 1U << level;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum[c] = 0.0F;
    last_ = index;
    ++leaves_;
  }

  /// Leaves the root in `sum`. An absent leaf, +0, can only turn a sum of nothing but -0 into +0.
  __device__ __forceinline__ void finish(int width) {
#pragma unroll
    for (int l = 0; l < kSlots; ++l) add_pending(l);
    if (leaves_ == width) return;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum[c] = __fadd_rn(sum[c], 0.0F);
  }

 private:
  __device__ __forceinline__ void add_pending(int l) {
    if ((waiting_ >> l & 1U) == 0) return;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum[c] = __fadd_rn(pending_[l][c], sum[c]);
    waiting_ &= ~(1U << l);
  }

  static constexpr int kSlots = kLevels == 0 ? 1 : kLevels;
  float pending_[kSlots][kColumns];
  std::uint32_t waiting_ = 0;
  int last_ = 0;
  int leaves_ = 0;
};

}  // namespace switchyard
