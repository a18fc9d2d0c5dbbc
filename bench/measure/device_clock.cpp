// Times of work on a GPU, by events on its stream.
#include "bench/measure/device_clock.hpp"

#include <cuda_runtime_api.h>

#include <chrono>
#include <deque>
#include <map>
#include <string>
#include <utility>

#include "bench/measure/stage_times.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/device_buffer.hpp"

namespace switchyard::bench {
namespace {

class Event {
 public:
  Event() { SWITCHYARD_CUDA(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { SWITCHYARD_CUDA(cudaEventRecord(event_, stream)); }
  /// Both have happened.
  [[nodiscard]] double us_since(const Event& start) const {
    float ms = 0;
    SWITCHYARD_CUDA(cudaEventElapsedTime(&ms, start.event_, event_));
    return 1e3 * static_cast<double>(ms);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Marks the borders of stages on the stream; reads them once the stream has come to its end.
class StageEvents final : public StageRecorder {
 public:
  void begin(std::string_view stage, void* stream) override {
    if (used_ == spans_.size()) spans_.emplace_back();
    spans_[used_].stage = stage;
    spans_[used_].start.record(static_cast<cudaStream_t>(stream));
  }
  void end(std::string_view, const StageWork& work, void* stream) override {
    spans_[used_].work = work;
    spans_[used_].stop.record(static_cast<cudaStream_t>(stream));
    ++used_;
  }
  void chose(std::string_view call, std::string_view implementation) override {
    chosen_.emplace_back(call, implementation);
  }
  void collect(StageTimes& times) {
    for (const auto& [call, implementation] : chosen_) times.chose(call, implementation);
    chosen_.clear();
    for (std::size_t i = 0; i < used_; ++i) {
      const Span& span = spans_[i];
      times.add(span.stage, span.work, span.stop.us_since(span.start));
    }
    used_ = 0;
  }

 private:
  struct Span {
    std::string stage{};
    StageWork work{};
    Event start{}, stop{};
  };
  std::deque<Span> spans_;  // events do not move
  std::vector<std::pair<std::string, std::string>> chosen_;
  std::size_t used_ = 0;
};

class DeviceClock final : public RunClock {
 public:
  DeviceClock(StageTimes& times, std::function<void()> meet)
      : times_(times), meet_(std::move(meet)) {
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    flush_.reserve(2 * std::int64_t{device_attribute(cudaDevAttrL2CacheSize)});
  }
  ~DeviceClock() override {
    for (const auto& [key, graph] : graphs_) cudaGraphExecDestroy(graph);
    cudaStreamDestroy(stream_);
  }
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;

  double run(const void* key, const MeasuredCall& call) override {
    prepare();
    flush();
    call(&events_, stream_);
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    events_.collect(times_);
    return run_whole(key, call);
  }

  double run_whole(const void* key, const MeasuredCall& call) override {
    const cudaGraphExec_t graph = graph_of(key, call);
    prepare();
    flush();
    if (meet_) meet_();
    start_.record(stream_);
    SWITCHYARD_CUDA(cudaGraphLaunch(graph, stream_));
    stop_.record(stream_);
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    return stop_.us_since(start_);
  }

  std::optional<ChainTimes> run_chain(int calls, int repeats, const ChainedCall& call) override {
    constexpr int kWarmup = 3;
    const auto chain = [&] {
      for (int i = 0; i < calls; ++i) call(i, stream_);
    };
    const auto median_of = [&](const std::function<void()>& enqueue) {
      std::vector<double> us;
      for (int i = -kWarmup; i < repeats; ++i) {
        start_.record(stream_);
        enqueue();
        stop_.record(stream_);
        SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
        if (i >= 0) us.push_back(stop_.us_since(start_) / calls);
      }
      return statistics(us).median;
    };
    const cudaGraphExec_t graph = captured([&](StageRecorder*, void*) { chain(); });
    ChainTimes times{.calls = calls};
    times.graph_us = median_of([&] { SWITCHYARD_CUDA(cudaGraphLaunch(graph, stream_)); });
    cudaGraphExecDestroy(graph);
    std::vector<double> host;
    times.eager_us = median_of([&] {
      const auto start = std::chrono::steady_clock::now();
      chain();
      const std::chrono::duration<double, std::micro> time =
          std::chrono::steady_clock::now() - start;
      host.push_back(time.count() / calls);
    });
    times.host_us = statistics(host).median;
    return times;
  }

 private:
  /// So that nothing is in the L2 cache because the same call has just run.
  void flush() {
    SWITCHYARD_CUDA(
        cudaMemsetAsync(flush_.data(), 1, static_cast<std::size_t>(flush_.bytes()), stream_));
  }

  cudaGraphExec_t graph_of(const void* key, const MeasuredCall& call) {
    if (const auto found = graphs_.find(key); found != graphs_.end()) return found->second;
    prepare();
    return graphs_[key] = captured(call);
  }

  cudaGraphExec_t captured(const MeasuredCall& call) {
    cudaGraph_t graph = nullptr;
    SWITCHYARD_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    try {
      call(nullptr, stream_);
    } catch (...) {
      cudaStreamEndCapture(stream_, &graph);
      cudaGraphDestroy(graph);
      cudaGetLastError();
      throw;
    }
    SWITCHYARD_CUDA(cudaStreamEndCapture(stream_, &graph));
    cudaGraphExec_t executable = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    if (status != cudaSuccess) throw_cuda_error(status, "cudaGraphInstantiate");
    return executable;
  }

  StageTimes& times_;
  std::function<void()> meet_;
  cudaStream_t stream_ = nullptr;
  DeviceBuffer flush_;
  StageEvents events_;
  Event start_, stop_;
  std::map<const void*, cudaGraphExec_t> graphs_;
};

}  // namespace

std::unique_ptr<RunClock> make_device_clock(StageTimes& times, std::function<void()> meet) {
  return std::make_unique<DeviceClock>(times, std::move(meet));
}

}  // namespace switchyard::bench
