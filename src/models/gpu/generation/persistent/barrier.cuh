#pragma once

// Where all blocks of a kernel meet. Two halves, so that a block can ask for what does not depend
// on the others while it waits.

#include <cstdint>

#include "core/gpu/ptx.cuh"

namespace switchyard::models::gpu {

/// In memory: how often blocks have arrived, ever; and in another line what that was when the
/// kernel began. All blocks are there at once (a cooperative launch).
class GridBarrier {
 public:
  static constexpr int kBegunAt = 32;  ///< Words from one to the other.

  __device__ explicit GridBarrier(std::uint32_t* words) : words_(words), target_(words[kBegunAt]) {}

  /// What the block's threads have written is there for all behind their wait().
  __device__ __forceinline__ void arrive() {
    __syncthreads();
    target_ += gridDim.x;
    if (threadIdx.x == 0) ptx::add_release(words_, 1);
  }
  __device__ __forceinline__ void wait() const {
    if (threadIdx.x == 0) {
      while (static_cast<std::int32_t>(ptx::load_acquire(words_) - target_) < 0) {
      }
    }
    __syncthreads();
  }
  /// By one thread, behind the last wait(): where the next kernel begins to count.
  __device__ __forceinline__ void finish() const { words_[kBegunAt] = target_; }

 private:
  std::uint32_t* words_;
  std::uint32_t target_;
};

}  // namespace switchyard::models::gpu
