#pragma once

#include <set>
#include <utility>

#include "core/gpu/cuda_device.hpp"

namespace switchyard {

/// Calls `prepare` at the first launch of `kernel` on the current device: attributes of a kernel
/// last, and to set them again takes the host longer than a launch.
template <typename Prepare>
void prepare_once(const void* kernel, Prepare&& prepare) {
  const int device = current_device();
  thread_local std::set<std::pair<const void*, int>> prepared;
  if (prepared.contains({kernel, device})) return;
  prepare();
  prepared.emplace(kernel, device);
}

}  // namespace switchyard
