#pragma once

#include <cuda_runtime_api.h>

#include <set>
#include <utility>

#include "core/gpu/cuda_check.hpp"

namespace switchyard {

/// Calls `prepare` at the first launch of `kernel` on the current device: attributes of a kernel
/// last, and to set them again takes the host longer than a launch.
template <typename Prepare>
void prepare_once(const void* kernel, Prepare&& prepare) {
  int device = 0;
  SWITCHYARD_CUDA(cudaGetDevice(&device));
  thread_local std::set<std::pair<const void*, int>> prepared;
  if (prepared.contains({kernel, device})) return;
  prepare();
  prepared.emplace(kernel, device);
}

}  // namespace switchyard
