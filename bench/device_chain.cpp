// Exchanges chained in a graph: neither launches nor the host are in the times.
#include "bench/device_chain.hpp"

#include "core/cuda_check.hpp"

namespace switchyard {
namespace {

void enqueue_chain(const ChainArgs& args) {
  for (int i = 0; i < kChainLength; ++i) args.enqueue();
}

/// What a chain is replayed from; empty without one.
class ChainGraph {
 public:
  explicit ChainGraph(const ChainArgs& args) {
    if (!args.graph) return;
    SWITCHYARD_CUDA(cudaStreamBeginCapture(args.stream, cudaStreamCaptureModeThreadLocal));
    try {
      enqueue_chain(args);
    } catch (...) {
      cudaStreamEndCapture(args.stream, &graph_);
      cudaGraphDestroy(graph_);
      throw;
    }
    SWITCHYARD_CUDA(cudaStreamEndCapture(args.stream, &graph_));
    SWITCHYARD_CUDA(cudaGraphInstantiate(&exec_, graph_, 0));
    SWITCHYARD_CUDA(cudaGraphUpload(exec_, args.stream));
  }
  ~ChainGraph() {
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  ChainGraph(const ChainGraph&) = delete;
  ChainGraph& operator=(const ChainGraph&) = delete;

  void run(const ChainArgs& args) const {
    if (exec_ == nullptr) return enqueue_chain(args);
    SWITCHYARD_CUDA(cudaGraphLaunch(exec_, args.stream));
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace

void time_chain(Communicator& communicator, const ChainArgs& args, SlowestTimes& times) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  SWITCHYARD_CUDA(cudaEventCreate(&begin));
  SWITCHYARD_CUDA(cudaEventCreate(&end));
  const ChainGraph graph(args);
  for (int repeat = -2; repeat < kChainRepeats; ++repeat) {
    SWITCHYARD_CUDA(cudaStreamSynchronize(args.stream));
    communicator.barrier("repeat");
    SWITCHYARD_CUDA(cudaEventRecord(begin, args.stream));
    graph.run(args);
    SWITCHYARD_CUDA(cudaEventRecord(end, args.stream));
    SWITCHYARD_CUDA(cudaStreamSynchronize(args.stream));
    args.check();
    float ms = 0;
    SWITCHYARD_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (repeat >= 0) times.add(repeat, static_cast<double>(ms) * 1e3 / kChainLength);
  }
  communicator.barrier("measured");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

}  // namespace switchyard
