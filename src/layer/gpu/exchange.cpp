// How ranks on GPUs share a layer. Ranks may share a GPU too, for tests: then every kernel that
// waits for another rank leaves room for the kernels that the other one must run first.
#include "layer/gpu/exchange.hpp"

#include <algorithm>

#include "comm/device/windows/sharing.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "core/gpu/stacks.hpp"
#include "layer/exchange_config.hpp"

namespace switchyard {
namespace {

int current_device() {
  int device = 0;
  SWITCHYARD_CUDA(cudaGetDevice(&device));
  return device;
}

/// The exchanges of the other ranks here may hold a multiprocessor a block while this rank's plan,
/// whose blocks wait for each other (at most one for 1024 assignments), has yet to find room.
void require_room(const DeviceExpertParallel& exchange, const LayerConfig& config,
                  const LayerOptions& options, int num_ranks) {
  constexpr std::int64_t kPlanThreads = 1024;
  const std::int64_t top_k = config.router.top_k();
  const std::int64_t of_a_block = std::max<std::int64_t>(1, kPlanThreads / top_k);
  const std::int64_t received = num_ranks * options.max_tokens;
  const std::int64_t plan_blocks = (received + of_a_block - 1) / of_a_block;
  const std::int64_t held = std::int64_t{exchange.ranks_on_device() - 1} * exchange.ctas();
  const std::int64_t room = num_multiprocessors();
  if (held + plan_blocks <= room) return;
  fail(ErrorCode::kUnsupported,
       "{} ranks share a GPU of {} multiprocessors: {} blocks of the others' exchanges and {} of a "
       "plan do not fit together, want fewer than max_tokens={} or a GPU for each rank",
       exchange.ranks_on_device(), room, held, plan_blocks, options.max_tokens);
}

}  // namespace

CudaExchange::CudaExchange(Communicator& communicator, const LayerConfig& config,
                           const LayerOptions& options, DType compute, bool each_group)
    : device_(current_device()),
      exchange_(communicator, exchange_config(config, options, compute, each_group),
                {.device = device_,
                 .engine = options.device_engine,
                 .one_place = true,
                 .timeout = communicator.timeout()}) {
  if (exchange_.ranks_on_device() > 1) {
    require_loaded_kernels();
    require_room(exchange_, config, options, communicator.size());
    make_room_for_stacks();
  }
  // Not the default stream: on it ranks that share a device would wait for each other in turn.
  SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking));
  communicator.barrier("device layer");
}

CudaExchange::~CudaExchange() {
  cudaStreamSynchronize(own_stream_);
  cudaStreamDestroy(own_stream_);
}

cudaStream_t CudaExchange::stream_for(const ForwardArgs& args) const {
  const int current = current_device();
  require(current == device_, "the current device is {}, the layer was made on {}", current,
          device_);
  if (args.stream != nullptr) return static_cast<cudaStream_t>(args.stream);
  const bool on_host =
      args.tokens.rows == 0 || (!is_on_device(args.tokens.data) && !is_on_device(args.out.data));
  if (on_host) return own_stream_;
  require(exchange_.ranks_on_device() == 1,
          "tokens or out lie on a GPU that ranks share: each wants a stream of its own for them");
  return nullptr;
}

void CudaExchange::settle(const Execution& execution) const {
  if (exchange_.ranks_on_device() == 1) return;
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  SWITCHYARD_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture == cudaStreamCaptureStatusNone) SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
}

DeviceReceived CudaExchange::dispatch(ConstRawMatrix tokens, const Routing& routing,
                                      Matrix<const std::uint8_t> kept,
                                      const DeviceExpertLists& lists, const Execution& execution) {
  const ScopedStage stage(execution, "exchange", {.bytes = static_cast<double>(tokens.bytes())});
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
  settle(execution);
  exchange_.combine({.partials = sums, .shared = shared, .out = out, .execution = execution});
  settle(execution);
}

void CudaExchange::combine_rows(ConstRawMatrix rows, const DeviceExpertLists& lists,
                                Matrix<const float> shared, RawMatrix out,
                                const Execution& execution) {
  const ScopedStage stage(execution, "exchange",
                          {.bytes = static_cast<double>(rows.bytes() + out.bytes())});
  settle(execution);
  exchange_.combine_rows({.partials = rows, .shared = shared, .out = out, .execution = execution},
                         lists);
  settle(execution);
}

}  // namespace switchyard
