#pragma once

#include <cstdint>

namespace switchyard {

/// Counts through the stages of a pipeline.
template <int kStages>
struct StageCursor {
  std::uint32_t stage = 0;
  std::uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void advance(std::uint32_t steps) {
    const std::uint32_t end = stage + steps;
    phase ^= end / kStages % 2;
    stage = end % kStages;
  }
};

}  // namespace switchyard
