// Exchanges chained in a graph: neither launches nor the host are in the times.
#include "bench/exchange/device_chain.hpp"

#include <array>

#include "core/gpu/cuda_check.hpp"

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

void time_each(Communicator& communicator, const ChainArgs& args,
               const std::function<void()>& enqueue, SlowestTimes& times) {
  const cudaStream_t stream = args.stream;
  std::array<cudaEvent_t, kChainLength + 1> events{};
  for (cudaEvent_t& event : events) SWITCHYARD_CUDA(cudaEventCreate(&event));
  const unsigned where = args.in_graph ? cudaEventRecordExternal : cudaEventRecordDefault;
  const auto chain = [&] {
    for (std::size_t i = 0; i < events.size(); ++i) {
      if (i > 0) enqueue();
      SWITCHYARD_CUDA(cudaEventRecordWithFlags(events[i], stream, where));
    }
  };
  const cudaGraphExec_t exec = args.in_graph ? capture(stream, chain) : nullptr;
  for (int repeat = -2; repeat < kTailRepeats; ++repeat) {
    communicator.barrier("repeat");
    if (exec != nullptr) {
      SWITCHYARD_CUDA(cudaGraphLaunch(exec, stream));
    } else {
      chain();
    }
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    args.check();
    // The first exchange also has the wait for the rank that was launched last.
    for (int i = 1; repeat >= 0 && i < kChainLength; ++i) {
      const auto at = static_cast<std::size_t>(i);
      float ms = 0;
      SWITCHYARD_CUDA(cudaEventElapsedTime(&ms, events[at], events[at + 1]));
      times.add(repeat * (kChainLength - 1) + i - 1, static_cast<double>(ms) * 1e3);
    }
  }
  communicator.barrier("measured");
  if (exec != nullptr) cudaGraphExecDestroy(exec);
  for (cudaEvent_t event : events) cudaEventDestroy(event);
}

}  // namespace switchyard
