#include "bench/measure/graph_times.hpp"

#include <algorithm>
#include <vector>

#include "core/gpu/cuda_check.hpp"

namespace switchyard::bench {

double median_graph_us(int calls, int repeats, cudaStream_t stream,
                       const std::function<void(int)>& call) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  SWITCHYARD_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    for (int i = 0; i < calls; ++i) call(i);
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    cudaGetLastError();
    throw;
  }
  SWITCHYARD_CUDA(cudaStreamEndCapture(stream, &graph));
  SWITCHYARD_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  SWITCHYARD_CUDA(cudaEventCreate(&begin));
  SWITCHYARD_CUDA(cudaEventCreate(&end));
  std::vector<double> times;
  for (int i = -3; i < repeats; ++i) {
    SWITCHYARD_CUDA(cudaEventRecord(begin, stream));
    SWITCHYARD_CUDA(cudaGraphLaunch(replay, stream));
    SWITCHYARD_CUDA(cudaEventRecord(end, stream));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    float ms = 0;
    SWITCHYARD_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 0) times.push_back(1e3 * static_cast<double>(ms) / calls);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  std::ranges::sort(times);
  return times[times.size() / 2];
}

}  // namespace switchyard::bench
