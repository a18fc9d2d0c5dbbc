// Exchanges between GPUs that only enqueue: the host looks at what they found every few hundred.
#include "verify/device_soak.hpp"

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <vector>

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/device_buffer.hpp"
#include "switchyard/device.hpp"
#include "switchyard/device_dispatch.hpp"
#include "testkit/random.hpp"
#include "verify/soak_kernels.hpp"
#include "verify/soak_shapes.hpp"

namespace switchyard::verify {
namespace {

constexpr std::int64_t kBetweenLooks = 480;

int own_device(int rank) {
  use_gpu_of_rank(rank);
  int device = 0;
  SWITCHYARD_CUDA(cudaGetDevice(&device));
  return device;
}

/// Of this rank's device, in bytes.
std::int64_t device_memory_in_use() {
  std::size_t free = 0;
  std::size_t all = 0;
  SWITCHYARD_CUDA(cudaMemGetInfo(&free, &all));
  return static_cast<std::int64_t>(all - free);
}

class DeviceSoakingRank {
 public:
  DeviceSoakingRank(const VerifyOptions& options, Communicator& communicator)
      : options_(options), communicator_(communicator), device_(own_device(communicator.rank())) {
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    constexpr std::int64_t kValues = 64 * 1024;  // more than any shape has on 8 ranks
    for (DeviceBuffer* buffer : {&x_, &expert_, &weight_, &out_}) buffer->reserve(4 * kValues);
    partials_.reserve(4 * kValues * communicator.size());
    exchange_.status = reinterpret_cast<SoakStatus*>(status_.reserve(sizeof(SoakStatus)));
    *found_ = {.wrong = 0, .first = ~0ULL, .checksum = 0};
    SWITCHYARD_CUDA(
        cudaMemcpy(exchange_.status, &*found_, sizeof(SoakStatus), cudaMemcpyHostToDevice));
    for (int shape = 0; shape < kSoakShapes; ++shape) {
      // Neighbours in the list of shapes differ in type: both modes meet all types.
      const bool low_latency = shape / 2 % 2 == 0;
      exchanges_.emplace_back(communicator, soak_shape(shape, 8),
                              DeviceExchangeOptions{.device = device_,
                                                    .mode = low_latency ? ExchangeMode::kLowLatency
                                                                        : ExchangeMode::kThroughput,
                                                    .engine = options.device_engine,
                                                    .timeout = options.timeout});
    }
  }
  ~DeviceSoakingRank() {
    exchanges_.clear();
    cudaStreamDestroy(stream_);
  }
  DeviceSoakingRank(const DeviceSoakingRank&) = delete;
  DeviceSoakingRank& operator=(const DeviceSoakingRank&) = delete;

  SoakStory run() {
    SoakStory story;
    // Ranks that share a GPU wait for each exchange: nothing is queued behind a kernel that waits.
    const bool shared = exchanges_.front().ranks_on_device() > 1;
    for (std::int64_t i = 0; i < options_.soak; ++i) {
      if (i == options_.soak / 10) {
        look(story);
        story.before = resident_memory();
        story.device_before = device_memory_in_use();
      }
      enqueue(i);
      if (shared) SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
      if (i % kBetweenLooks == kBetweenLooks - 1) look(story);
      if (!story.wrong.empty()) break;
    }
    look(story);
    if (!story.wrong.empty()) {
      communicator_.give_up(story.wrong);  // the others need not wait for what will not come
      return story;
    }
    communicator_.barrier("end of the exchanges");
    story.after = resident_memory();
    story.device_after = device_memory_in_use();
    story.checksum = found_->checksum;
    return story;
  }

 private:
  void enqueue(std::int64_t index) {
    const auto shape = static_cast<int>(index % kSoakShapes);
    const ExpertParallelConfig config = soak_shape(shape, 8);
    Random random(options_.seed, static_cast<std::uint64_t>(index) * 64 +
                                     static_cast<std::uint64_t>(communicator_.rank()));
    SoakExchange& e = exchange_;
    e.num_tokens = random.between(0, config.max_tokens);
    e.seed = random.bits();
    e.index = static_cast<std::uint64_t>(index);
    e.hidden = config.hidden;
    e.num_experts = config.num_experts;
    e.top_k = config.top_k;
    e.dtype = config.dtype;
    e.partial_type = config.combine_wire;
    e.x = x_.data();
    e.expert = reinterpret_cast<std::int32_t*>(expert_.data());
    e.weight = reinterpret_cast<float*>(weight_.data());
    e.partials = partials_.data();
    e.out = reinterpret_cast<float*>(out_.data());
    const Execution execution{.backend = Backend::kCuda, .stream = stream_};
    DeviceExpertParallel& exchange = exchanges_[static_cast<std::size_t>(shape)];
    launch_soak_tokens(e, stream_);
    const DeviceReceived received =
        exchange.dispatch({.x = {x_.data(), e.dtype, e.num_tokens, e.hidden},
                           .expert = {e.expert, {e.num_tokens, e.top_k}},
                           .weight = {e.weight, {e.num_tokens, e.top_k}},
                           .execution = execution});
    launch_soak_partials(e, received, stream_);
    exchange.combine({.partials = {partials_.data(), e.partial_type, received.x.rows, e.hidden},
                      .out = {out_.data(), DType::kF32, e.num_tokens, e.hidden},
                      .execution = execution});
    launch_soak_check(e, stream_);
  }

  /// Waits for all that is enqueued.
  void look(SoakStory& story) {
    SWITCHYARD_CUDA(cudaMemcpyAsync(&*found_, exchange_.status, sizeof(SoakStatus),
                                    cudaMemcpyDeviceToHost, stream_));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    for (const DeviceExpertParallel& exchange : exchanges_) exchange.check();
    if (found_->wrong == 0) return;
    story.wrong = fmt::format("exchange {}: rank {}, element {} is the first of {} wrong ones",
                              found_->first >> 32, communicator_.rank(),
                              found_->first & 0xffffffffULL, found_->wrong);
  }

  const VerifyOptions& options_;
  Communicator& communicator_;
  const int device_;
  cudaStream_t stream_ = nullptr;
  DeviceBuffer x_, expert_, weight_, partials_, out_, status_;
  PinnedValue<SoakStatus> found_;
  SoakExchange exchange_;
  std::vector<DeviceExpertParallel> exchanges_;
};

}  // namespace

SoakStory soak_on_device(const VerifyOptions& options, Communicator& communicator) {
  return DeviceSoakingRank(options, communicator).run();
}

}  // namespace switchyard::verify
