#pragma once

#include "experts/gpu/streaming/down.cuh"
#include "experts/gpu/streaming/kernels.hpp"
#include "experts/gpu/streaming/up.cuh"

namespace switchyard::streaming {

// What is built is what choose_streaming() picks: each kernel takes seconds to compile.
template <typename T, bool kHopper>
const void* pick_up(int tiles) {
  if (tiles == 1) return reinterpret_cast<const void*>(&streaming_up_kernel<T, 1, kHopper>);
  if (tiles == 4) return reinterpret_cast<const void*>(&streaming_up_kernel<T, 4, kHopper>);
  if constexpr (kHopper) {
    if (tiles == 2) return reinterpret_cast<const void*>(&streaming_up_kernel<T, 2, kHopper>);
    if (tiles == 8) return reinterpret_cast<const void*>(&streaming_up_kernel<T, 8, kHopper>);
  }
  return nullptr;
}

template <typename T, int kTiles, int kMaxTokenTiles, bool kByItem, bool kHopper>
const void* down() {
  return reinterpret_cast<const void*>(
      &streaming_down_kernel<T, kTiles, kMaxTokenTiles, kByItem, kHopper>);
}

template <typename T, bool kHopper>
const void* pick_down(int tiles, bool by_item, bool many_rows) {
  if constexpr (kHopper) {
    if constexpr (!Weights<T>::kCoded) {
      if (by_item) {
        if (tiles == 2) return down<T, 2, 4, true, true>();
        return tiles == 4 ? down<T, 4, 4, true, true>() : nullptr;
      }
    }
    if (by_item) return nullptr;
    if (!many_rows) {
      if (tiles == 1) return down<T, 1, 4, false, true>();
      if (tiles == 2) return down<T, 2, 4, false, true>();
      return tiles == 4 ? down<T, 4, 4, false, true>() : nullptr;
    }
  }
  if (by_item) return nullptr;
  if (tiles == 1) return down<T, 1, 8, false, kHopper>();
  if constexpr (Weights<T>::kCoded) {
    if (tiles == 2) return down<T, 2, 8, false, kHopper>();
  }
  return tiles == 4 ? down<T, 4, 8, false, kHopper>() : nullptr;
}

template <typename T, bool kHopper>
Kernels pick(const StreamingShape& shape) {
  return {pick_up<T, kHopper>(shape.up.tiles),
          pick_down<T, kHopper>(shape.down.tiles, shape.down.by_item, takes_all_registers(shape))};
}

}  // namespace switchyard::streaming
