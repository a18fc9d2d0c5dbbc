// Exchanges chained in a graph: neither launches nor the host are in the times.
#include "bench/device_chain.hpp"

#include "core/cuda_check.hpp"

namespace switchyard {

void time_chain(Communicator& communicator, cudaStream_t stream,
                const std::function<void()>& enqueue, const std::function<void()>& check,
                SlowestTimes& times) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  SWITCHYARD_CUDA(cudaEventCreate(&begin));
  SWITCHYARD_CUDA(cudaEventCreate(&end));
  SWITCHYARD_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kChainLength; ++i) enqueue();
  SWITCHYARD_CUDA(cudaStreamEndCapture(stream, &graph));
  SWITCHYARD_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  SWITCHYARD_CUDA(cudaGraphUpload(exec, stream));
  for (int repeat = -2; repeat < kChainRepeats; ++repeat) {
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    communicator.barrier("repeat");
    SWITCHYARD_CUDA(cudaEventRecord(begin, stream));
    SWITCHYARD_CUDA(cudaGraphLaunch(exec, stream));
    SWITCHYARD_CUDA(cudaEventRecord(end, stream));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    check();
    float ms = 0;
    SWITCHYARD_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (repeat >= 0) times.add(repeat, static_cast<double>(ms) * 1e3 / kChainLength);
  }
  communicator.barrier("measured");
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

}  // namespace switchyard
