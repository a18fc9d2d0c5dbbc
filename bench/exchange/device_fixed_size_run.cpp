// The fixed-size exchange on the GPU of a rank: chains of exchanges in a graph, all ranks at once,
// and NCCL's all-to-all of the same messages in turn with them.
#include "bench/exchange/device_fixed_size_run.hpp"

#include <cuda_runtime_api.h>

#include <optional>

#include "bench/measure/run_clock.hpp"
#include "bench/variants/device_fixed_size.hpp"
#include "comm/nccl/pairs/pairs.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/device_buffer.hpp"
#include "switchyard/device.hpp"

namespace switchyard::bench {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// NCCL's sends and receives of M rows to and from every other rank, and a copy of the own.
class NcclMessages {
 public:
  NcclMessages(Communicator& communicator, std::int64_t message)
      : message_(message), rank_(communicator.rank()), pairs_(communicator) {
    const int ranks = communicator.size();
    from_.reserve(ranks * message);
    to_.reserve(ranks * message);
    for (int i = 1; i < ranks; ++i) {
      const int to = (rank_ + i) % ranks;
      const int from = (rank_ + ranks - i) % ranks;
      sends_.push_back({.rank = to, .data = from_.data() + to * message, .bytes = at(message)});
      receives_.push_back(
          {.rank = from, .data = to_.data() + from * message, .bytes = at(message)});
    }
  }
  void run(void* stream) {
    const std::int64_t own = rank_ * message_;
    SWITCHYARD_CUDA(cudaMemcpyAsync(to_.data() + own, from_.data() + own, at(message_),
                                    cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
    pairs_.exchange(sends_, receives_, stream);
  }
  void check() const { pairs_.check(); }

 private:
  const std::int64_t message_;
  const int rank_;
  DeviceBuffer from_, to_;
  std::vector<RankBytes> sends_, receives_;
  NcclPairs pairs_;
};

}  // namespace

DeviceFixedSizeRun measure_device_fixed_size(Communicator& communicator, const FixedSizeCase& c,
                                             const FixedSizeRouting& routing, ConstRawMatrix tokens,
                                             StageTimes& times) {
  int device = 0;
  SWITCHYARD_CUDA(cudaGetDevice(&device));
  DeviceBuffer x_memory;
  const RawMatrix x = x_memory.matrix(tokens.dtype, tokens.rows, tokens.cols);
  SWITCHYARD_CUDA(cudaMemcpy(x.data, tokens.data, at(tokens.bytes()), cudaMemcpyHostToDevice));
  DeviceFixedSize exchange(communicator, routing, tokens.cols, tokens.dtype,
                           {.device = device, .engine = c.engine, .timeout = c.where.timeout});
  std::optional<NcclMessages> peer;
  if (c.peer_nccl) peer.emplace(communicator, routing.rows_per_pair * tokens.row_bytes());
  const auto clock = make_run_clock(Backend::kCuda, times, [&] { communicator.barrier("graphs"); });
  const auto chain_of = [](StageRecorder* recorder, const auto& call) {
    for (int i = 0; i < (recorder == nullptr ? FixedSizeCase::kChain : 1); ++i) call();
  };
  for (int run = 0; run < c.count.warmup + c.count.iterations; ++run) {
    if (run == c.count.warmup) times.forget();
    times.start_run();
    communicator.barrier("start of an exchange");
    const double us = clock->run(&exchange, [&](StageRecorder* recorder, void* stream) {
      const ScopedStage stage({.backend = Backend::kCuda, .stream = stream, .recorder = recorder},
                              "eager", {});
      chain_of(recorder, [&] { exchange.exchange(x, stream); });
    });
    exchange.check();
    times.add("exchange", {}, us / FixedSizeCase::kChain);
    if (!peer) continue;
    communicator.barrier("peer");
    const double peer_us = clock->run(&*peer, [&](StageRecorder* recorder, void* stream) {
      chain_of(recorder, [&] { peer->run(stream); });
    });
    peer->check();
    times.add("nccl_all_to_all", {}, peer_us / FixedSizeCase::kChain);
  }
  DeviceFixedSizeRun result{.wire_bytes = exchange.wire_bytes()};
  const ConstRawMatrix got = exchange.received();
  result.received.resize(at(got.bytes()));
  SWITCHYARD_CUDA(
      cudaMemcpy(result.received.data(), got.data, at(got.bytes()), cudaMemcpyDeviceToHost));
  communicator.barrier("end of a point");  // what follows waits for the device
  return result;
}

}  // namespace switchyard::bench
