#pragma once

#include "core/reduced_check.hpp"
#include "core/select.hpp"
#include "switchyard/combine.hpp"

namespace switchyard {

extern const Implementation<CombineArgs> kCombineCpu;
extern const Implementation<FinishArgs> kFinishCpu;
#ifdef SWITCHYARD_WITH_CUDA
extern const Implementation<CombineArgs> kCombineCuda;
extern const Implementation<FinishArgs> kFinishCuda;
#endif

/// Leaves of the binary tree over `count` neighbours: the next power of two.
[[nodiscard]] constexpr std::int32_t tree_width(std::int32_t count) {
  std::int32_t width = 1;
  while (width < count) width *= 2;
  return width;
}

}  // namespace switchyard
