#include "bench/measure/graph_times.hpp"

#include <algorithm>
#include <vector>

#include "testkit/gpu/captured_graph.hpp"

namespace switchyard::bench {

double median_graph_us(int calls, int repeats, cudaStream_t stream,
                       const std::function<void(int)>& call) {
  const CapturedGraph graph(stream, [&] {
    for (int i = 0; i < calls; ++i) call(i);
  });
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  SWITCHYARD_CUDA(cudaEventCreate(&begin));
  SWITCHYARD_CUDA(cudaEventCreate(&end));
  std::vector<double> times;
  for (int i = -3; i < repeats; ++i) {
    SWITCHYARD_CUDA(cudaEventRecord(begin, stream));
    graph.launch();
    SWITCHYARD_CUDA(cudaEventRecord(end, stream));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    float ms = 0;
    SWITCHYARD_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 0) times.push_back(1e3 * static_cast<double>(ms) / calls);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::ranges::sort(times);
  return times[times.size() / 2];
}

}  // namespace switchyard::bench
