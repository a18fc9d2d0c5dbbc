#pragma once

// Owners of what a step's order is made of: a stream, an event, a captured graph.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/device_wide.hpp"

namespace switchyard::models::gpu {

class Stream {
 public:
  Stream() { SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }
  void wait() const { SWITCHYARD_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event() { SWITCHYARD_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) const { SWITCHYARD_CUDA(cudaEventRecord(event_, stream)); }
  void wait() const { SWITCHYARD_CUDA(cudaEventSynchronize(event_)); }

 private:
  cudaEvent_t event_ = nullptr;
};

/// What `body` enqueues on a stream, to be launched as often as wanted.
class Graph {
 public:
  template <class Body>
  Graph(cudaStream_t stream, const Body& body) {
    const CaptureTurn turn;
    cudaGraph_t graph = nullptr;
    SWITCHYARD_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
      body();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      cudaGetLastError();
      throw;
    }
    SWITCHYARD_CUDA(cudaStreamEndCapture(stream, &graph));
    const cudaError_t status = cudaGraphInstantiate(&graph_, graph, 0);
    cudaGraphDestroy(graph);
    if (status != cudaSuccess) throw_cuda_error(status, "cudaGraphInstantiate");
  }
  ~Graph() { cudaGraphExecDestroy(graph_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(cudaStream_t stream) const { SWITCHYARD_CUDA(cudaGraphLaunch(graph_, stream)); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace switchyard::models::gpu
