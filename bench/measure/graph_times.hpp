#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace switchyard::bench {

/// Median microseconds of one of `calls` calls that follow each other in a graph: captured once,
/// replayed `repeats` times after three that do not count; launches by the host are not in it.
/// @param call  call(i) enqueues the i-th. What it throws is passed on, the capture ended.
/// @throws Error{kDevice}.
[[nodiscard]] double median_graph_us(int calls, int repeats, cudaStream_t stream,
                                     const std::function<void(int)>& call);

}  // namespace switchyard::bench
