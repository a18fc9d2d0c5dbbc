// The clocks of both backends.
#include "bench/measure/run_clock.hpp"

#include <chrono>
#include <utility>

#include "core/check.hpp"

#ifdef SWITCHYARD_WITH_CUDA
#include "bench/measure/device_clock.hpp"
#endif

namespace switchyard::bench {
namespace {

class HostClock final : public RunClock {
 public:
  explicit HostClock(StageTimes& times) : times_(times) {}

  double run(const void*, const MeasuredCall& call) override { return time(&times_, call); }
  double run_whole(const void*, const MeasuredCall& call) override { return time(nullptr, call); }
  std::optional<ChainTimes> run_chain(int, int, const ChainedCall&) override {
    return std::nullopt;
  }

 private:
  double time(StageRecorder* recorder, const MeasuredCall& call) const {
    prepare();
    const auto start = std::chrono::steady_clock::now();
    call(recorder, nullptr);
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    return time.count();
  }

  StageTimes& times_;
};

}  // namespace

std::unique_ptr<RunClock> make_run_clock(Backend backend, StageTimes& times,
                                         [[maybe_unused]] std::function<void()> meet) {
  if (backend == Backend::kCpu) return std::make_unique<HostClock>(times);
#ifdef SWITCHYARD_WITH_CUDA
  return make_device_clock(times, std::move(meet));
#else
  fail(ErrorCode::kUnsupported, "this build has no backend cuda");
#endif
}

}  // namespace switchyard::bench
