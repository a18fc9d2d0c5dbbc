// How ranks on GPUs share a layer.
#include "layer/gpu/exchange.hpp"

#include "core/check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "core/gpu/stacks.hpp"
#include "core/select.hpp"
#include "layer/exchange_config.hpp"

namespace switchyard {

CudaExchange::CudaExchange(Communicator& communicator, const LayerConfig& config,
                           const LayerOptions& options, DType compute, bool each_group)
    : device_(current_device()),
      timeout_(communicator.timeout()),
      exchange_(communicator, exchange_config(config, options, compute, each_group),
                {.device = device_,
                 .engine = options.device_engine,
                 .one_place = true,
                 .timeout = timeout_}) {
  shared_gpu_ = SharedGpu::of(exchange_, config, options, communicator.size());
  // Not the default stream: on it ranks that share a device would wait for each other in turn.
  SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking));
  communicator.barrier("device layer");
}

CudaExchange::~CudaExchange() {
  cudaStreamSynchronize(own_stream_);
  cudaStreamDestroy(own_stream_);
}

void CudaExchange::require_device() const {
  const int current = current_device();
  require(current == device_, "the current device is {}, the layer was made on {}", current,
          device_);
}

cudaStream_t CudaExchange::stream_for(const BackwardArgs& args, cudaStream_t last) const {
  require_device();
  require(args.stream != nullptr || shared_gpu_ == nullptr,
          "a backward on a GPU that ranks share: each wants a stream of its own");
  if (last == own_stream_) SWITCHYARD_CUDA(cudaStreamSynchronize(own_stream_));
  return static_cast<cudaStream_t>(args.stream);
}

cudaStream_t CudaExchange::stream_for(const ForwardArgs& args) const {
  require_device();
  if (args.stream != nullptr) return static_cast<cudaStream_t>(args.stream);
  const bool on_host =
      args.tokens.rows == 0 || (!is_on_device(args.tokens.data) && !is_on_device(args.out.data));
  if (on_host) return own_stream_;
  require(shared_gpu_ == nullptr,
          "tokens or out lie on a GPU that ranks share: each wants a stream of its own for them");
  return nullptr;
}

void CudaExchange::tell(const ConstRawMatrix& rows, const Execution& execution) const {
  const bool low_latency = exchange_.mode() == ExchangeMode::kLowLatency;
  const char* const name =
      exchange_.engine() == DeviceEngine::kNcclPairs
          ? (low_latency ? "cuda.nccl_pairs_low_latency" : "cuda.nccl_pairs_throughput")
          : (low_latency ? "cuda.low_latency" : "cuda.throughput");
  tell_choice(execution, "exchange", name, [&] {
    return fmt::format("{} rows x {} {}", rows.rows, rows.cols, to_string(rows.dtype));
  });
}

void CudaExchange::settle(const Execution& execution) const {
  if (shared_gpu_) SharedGpu::settle(execution);
}

DeviceReceived CudaExchange::dispatch(ConstRawMatrix tokens, const Routing& routing,
                                      Matrix<const std::uint8_t> kept,
                                      const DeviceExpertLists& lists, const Execution& execution) {
  const ScopedStage stage(execution, "exchange", {.bytes = static_cast<double>(tokens.bytes())});
  tell(tokens, execution);
  settle(execution);
  const DeviceReceived received = exchange_.dispatch({.x = tokens,
                                                      .expert = routing.expert,
                                                      .weight = routing.weight,
                                                      .kept = kept,
                                                      .execution = execution},
                                                     lists);
  settle(execution);
  return received;
}

void CudaExchange::combine(ConstRawMatrix sums, Matrix<const float> shared, RawMatrix out,
                           const Execution& execution) {
  const ScopedStage stage(execution, "exchange",
                          {.bytes = static_cast<double>(sums.bytes() + out.bytes())});
  tell(sums, execution);
  settle(execution);
  exchange_.combine({.partials = sums, .shared = shared, .out = out, .execution = execution});
  settle(execution);
}

void CudaExchange::combine_rows(ConstRawMatrix rows, const DeviceExpertLists& lists,
                                Matrix<const float> shared, RawMatrix out,
                                const Execution& execution) {
  const ScopedStage stage(execution, "exchange",
                          {.bytes = static_cast<double>(rows.bytes() + out.bytes())});
  tell(rows, execution);
  settle(execution);
  exchange_.combine_rows({.partials = rows, .shared = shared, .out = out, .execution = execution},
                         lists);
  settle(execution);
}

}  // namespace switchyard
