#pragma once

// What only Hopper has beside the two kernels.

#include "experts/gpu/streaming/kernels.cuh"
#include "experts/gpu/streaming/whole.cuh"

namespace switchyard::streaming {

template <typename T, int kDownTiles, bool kByItem>
const void* whole() {
  return reinterpret_cast<const void*>(&streaming_whole_kernel<T, 1, kDownTiles, kByItem>);
}

/// What choose_streaming() takes.
template <typename T>
const void* pick_whole(const StreamingShape& shape) {
  if (shape.up.tiles != 1) return nullptr;
  if (shape.down.by_item) return shape.down.tiles == 4 ? whole<T, 4, true>() : whole<T, 2, true>();
  if constexpr (sizeof(T) == 4) {
    if (shape.down.tiles == 1) return whole<T, 1, false>();
    if (shape.down.tiles == 2) return whole<T, 2, false>();
  }
  return nullptr;
}

template <typename T>
Kernels pick_hopper(const StreamingShape& shape) {
  Kernels kernels = pick<T, true>(shape);
  kernels.whole = pick_whole<T>(shape);
  return kernels;
}

}  // namespace switchyard::streaming
