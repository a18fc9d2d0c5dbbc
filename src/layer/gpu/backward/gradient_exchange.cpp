// How ranks on GPUs share the way back through a layer.
#include "layer/gpu/backward/gradient_exchange.hpp"

#include <algorithm>

#include "core/gpu/cuda_check.hpp"
#include "layer/exchange_config.hpp"
#include "layer/gpu/backward/kernels.hpp"

namespace switchyard {
namespace {

/// No wire rounds a gradient.
ExpertParallelConfig exact_config(const LayerConfig& config, const LayerOptions& options,
                                  DType compute) {
  ExpertParallelConfig exact = exchange_config(config, options, compute, false);
  exact.dispatch_wire = compute;
  exact.combine_wire = DType::kF32;
  return exact;
}

}  // namespace

CudaGradientExchange::CudaGradientExchange(Communicator& communicator, const LayerConfig& config,
                                           const LayerOptions& options, DType compute,
                                           const CudaExchange& forward)
    : exchange_(communicator, exact_config(config, options, compute),
                {.device = forward.device(),
                 .mode = forward.mode(),  // so that rows have the places of the forward's
                 .engine = forward.engine(),
                 .one_place = true,
                 .timeout = forward.timeout()},
                {.most_summed = std::max<std::int64_t>(
                     ReplicatedParts::most(config), std::int64_t{2} * config.router.num_experts)}),
      shared_gpu_(SharedGpu::of(exchange_, config, options, communicator.size())) {
  int least = 0;
  int greatest = 0;  // its few blocks go before those of products that would fill the device
  SWITCHYARD_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  SWITCHYARD_CUDA(cudaStreamCreateWithPriority(&beside_, cudaStreamNonBlocking, greatest));
  SWITCHYARD_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
}

CudaGradientExchange::~CudaGradientExchange() {
  cudaStreamSynchronize(beside_);
  cudaStreamDestroy(beside_);
  cudaEventDestroy(event_);
}

void CudaGradientExchange::settle(const Execution& execution) const {
  if (shared_gpu_ != nullptr || !has_run_) SharedGpu::settle(execution);
}

DeviceReceived CudaGradientExchange::send(ConstRawMatrix dout, const Routing& sent,
                                          const SavedForward::State& saved,
                                          const Execution& execution) {
  const ScopedStage stage(execution, "exchange", {.bytes = static_cast<double>(dout.bytes())});
  settle(execution);
  const DeviceReceived received = exchange_.dispatch({.x = dout,
                                                      .expert = sent.expert,
                                                      .weight = sent.weight,
                                                      .kept = saved.kept,
                                                      .execution = execution},
                                                     {}, saved.received.sent.data);
  settle(execution);
  return received;
}

void CudaGradientExchange::bring_weights_home(const Routing& sent, const SavedForward::State& saved,
                                              Matrix<float> dweight, const Execution& execution) {
  const ScopedStage stage(execution, "exchange",
                          {.bytes = 4 * static_cast<double>(sent.expert.size())});
  settle(execution);
  exchange_.bring_weights_home({.expert = sent.expert,
                                .kept = saved.kept,
                                .dweight = dweight,
                                .forward = saved.received.forward,
                                .parameters = parts_.wanted(),
                                .execution = execution});
  settle(execution);
}

void CudaGradientExchange::let_follow(cudaStream_t from, cudaStream_t to) {
  SWITCHYARD_CUDA(cudaEventRecord(event_, from));
  SWITCHYARD_CUDA(cudaStreamWaitEvent(to, event_, 0));
}

void CudaGradientExchange::wait_for_home(const Execution& execution) {
  if (under_way_) let_follow(beside_, static_cast<cudaStream_t>(execution.stream));
  under_way_ = false;
}

void CudaGradientExchange::bring_home(ConstRawMatrix sums, Matrix<const float> rest, RawMatrix out,
                                      bool beside, const Execution& execution) {
  // Sums that are pushed go through kernels that are launched ahead of their stream's last one.
  if (beside && has_run_ && shared_gpu_ == nullptr && sums.data == place_of_sums().data) {
    let_follow(static_cast<cudaStream_t>(execution.stream), beside_);
    under_way_ = true;
    Execution own = execution;
    own.stream = beside_;
    own.recorder = nullptr;
    exchange_.combine({.partials = sums, .shared = rest, .out = out, .execution = own});
    return;
  }
  const ScopedStage stage(execution, "exchange",
                          {.bytes = static_cast<double>(sums.bytes() + out.bytes())});
  settle(execution);
  exchange_.combine({.partials = sums, .shared = rest, .out = out, .execution = execution});
  settle(execution);
}

void CudaGradientExchange::add_up_counts(Vector<const std::int64_t> own, Vector<std::int64_t> all,
                                         const Execution& execution) {
  const std::int64_t count = 2 * own.shape[0];
  const ScopedStage stage(execution, "exchange", {.bytes = 16 * static_cast<double>(count)});
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  float* const parts = exchange_.place_of_summed().data;
  split_counts(own, parts, stream);
  settle(execution);
  exchange_.sum_over_ranks(count, execution);
  settle(execution);
  join_counts(parts, all, stream);
}

BackwardArgs CudaGradientExchange::parts_of(const BackwardArgs& args) {
  parts_.lay_out(args);
  return parts_.in(exchange_.place_of_summed().data, args);
}

void CudaGradientExchange::add_up_parts(bool accumulate, const Execution& execution) {
  const ScopedStage stage(execution, "exchange",
                          {.bytes = 16 * static_cast<double>(parts_.total())});
  settle(execution);
  exchange_.sum_over_ranks(parts_.total(), execution);
  settle(execution);
  const float* const sums = exchange_.place_of_summed().data;
  for (const ReplicatedParts::Piece& piece : parts_.pieces()) {
    write_gradient_on_gpu({sums + piece.begin, {piece.count}}, piece.dtype, piece.out, accumulate,
                          static_cast<cudaStream_t>(execution.stream));
  }
  has_run_ = true;
}

}  // namespace switchyard
