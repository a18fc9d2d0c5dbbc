#pragma once

#include <cuda_runtime_api.h>

#include "core/gpu/cuda_check.hpp"

namespace switchyard {

/// What a call enqueues on a stream, captured once in a graph and launched as often as wanted.
class CapturedGraph {
 public:
  template <typename Call>
  CapturedGraph(cudaStream_t stream, const Call& call) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    SWITCHYARD_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
      call();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      cudaGetLastError();
      throw;
    }
    SWITCHYARD_CUDA(cudaStreamEndCapture(stream, &graph));
    SWITCHYARD_CUDA(cudaGraphInstantiate(&replay_, graph, 0));
    SWITCHYARD_CUDA(cudaGraphDestroy(graph));
  }
  ~CapturedGraph() { cudaGraphExecDestroy(replay_); }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  /// Waits for nothing.
  void launch() const { SWITCHYARD_CUDA(cudaGraphLaunch(replay_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t replay_ = nullptr;
};

}  // namespace switchyard
