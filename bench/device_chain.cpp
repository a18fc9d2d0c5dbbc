// Exchanges chained in a graph: neither launches nor the host are in the times.
#include "bench/device_chain.hpp"

#include "core/cuda_check.hpp"

namespace switchyard {
namespace {

cudaGraphExec_t capture(cudaStream_t stream, const std::function<void()>& enqueue) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  SWITCHYARD_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue();
  SWITCHYARD_CUDA(cudaStreamEndCapture(stream, &graph));
  SWITCHYARD_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  SWITCHYARD_CUDA(cudaGraphUpload(exec, stream));
  cudaGraphDestroy(graph);
  return exec;
}

}  // namespace

void time_chain(Communicator& communicator, const ChainArgs& args,
                const std::function<void()>& enqueue, SlowestTimes& times) {
  const cudaStream_t stream = args.stream;
  const auto chain = [&] {
    for (int i = 0; i < kChainLength; ++i) enqueue();
  };
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  SWITCHYARD_CUDA(cudaEventCreate(&begin));
  SWITCHYARD_CUDA(cudaEventCreate(&end));
  const cudaGraphExec_t exec = args.in_graph ? capture(stream, chain) : nullptr;
  for (int repeat = -2; repeat < kChainRepeats; ++repeat) {
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    communicator.barrier("repeat");
    SWITCHYARD_CUDA(cudaEventRecord(begin, stream));
    if (exec != nullptr) {
      SWITCHYARD_CUDA(cudaGraphLaunch(exec, stream));
    } else {
      chain();
    }
    SWITCHYARD_CUDA(cudaEventRecord(end, stream));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    args.check();
    float ms = 0;
    SWITCHYARD_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (repeat >= 0) times.add(repeat, static_cast<double>(ms) * 1e3 / kChainLength);
  }
  communicator.barrier("measured");
  if (exec != nullptr) cudaGraphExecDestroy(exec);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

}  // namespace switchyard
