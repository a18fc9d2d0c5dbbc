#pragma once

#include <cstdint>
#include <string_view>

namespace switchyard {

class ThreadPool;
struct DeviceStatus;

/// Where a stage runs. All pointers in a stage's arguments live there.
enum class Backend : std::uint8_t { kCpu, kCuda };

/// "cpu", "cuda".
[[nodiscard]] const char* to_string(Backend backend) noexcept;

/// What one stage moved and computed; its times are taken by the recorder.
struct StageWork {
  double bytes = 0;           ///< The fewest bytes the stage must move: inputs once, outputs once.
  double flops = 0;           ///< Useful floating-point operations (kept rows only).
  double flops_executed = 0;  ///< With the padding that the layout makes the stage compute.
  /// Where only the device knows how many rows there are, the numbers above are of the most there
  /// can be, and each row that is not there takes this off. 0 rows: they are exact.
  std::int64_t most_rows = 0;
  double bytes_per_row = 0;
  double flops_per_row = 0;

  /// Of two parts of a stage.
  StageWork& operator+=(const StageWork& other) {
    bytes += other.bytes;
    flops += other.flops;
    flops_executed += other.flops_executed;
    most_rows = most_rows > other.most_rows ? most_rows : other.most_rows;
    bytes_per_row += other.bytes_per_row;
    flops_per_row += other.flops_per_row;
    return *this;
  }

  /// The exact numbers. @param used, executed  As MoeLayer::rows_used() and rows_executed().
  [[nodiscard]] StageWork of_rows(std::int64_t used, std::int64_t executed) const {
    const auto absent = static_cast<double>(most_rows - used);
    const auto idle = static_cast<double>(most_rows - executed);
    return {.bytes = bytes - absent * bytes_per_row,
            .flops = flops - absent * flops_per_row,
            .flops_executed = flops_executed - idle * flops_per_row};
  }
};

/// Told when each stage of the flow starts and ends, in order; never nested. `stage` is a name of
/// the tool's table ("router_gemm", "plan", ...); fused stages give one joined name
/// ("gemm1+activation"). On CUDA the calls only enqueue (events, ranges): nothing waits.
class StageRecorder {
 public:
  virtual ~StageRecorder() = default;
  virtual void begin(std::string_view stage, void* stream) = 0;
  virtual void end(std::string_view stage, const StageWork& work, void* stream) = 0;
  /// Which implementation runs the call `call` ("router_gemm", "route", "capacity", "plan", "pack",
  /// "experts", "combine", "finish", "exchange"; "plan+experts": see ForwardArgs::recorder), before
  /// it enqueues anything. A call's own stages may have other names.
  virtual void chose(std::string_view call, std::string_view implementation) {
    (void)call, (void)implementation;
  }
};

/// How a stage runs; the same for all stages of one call.
struct Execution {
  Backend backend = Backend::kCpu;
  ThreadPool* pool = nullptr;  ///< CPU: who helps; null: the calling thread alone.
  void* stream = nullptr;      ///< CUDA: the stream on which everything is enqueued.
  void* workspace = nullptr;   ///< CUDA: see stage_workspace_bytes(); device.hpp.
  std::int64_t workspace_bytes = 0;
  DeviceStatus* status = nullptr;  ///< CUDA: device memory; null: findings are dropped.
  /// No choice of path depends on the number of tokens, rows or ranks, so that a token's bits do
  /// not depend on the rest of the batch (dropless).
  bool batch_invariant = false;
  StageRecorder* recorder = nullptr;  ///< Not owned; null: nothing is recorded.
};

/// Reports one stage to the recorder of `execution`, if there is one, for as long as it lives.
class ScopedStage {
 public:
  ScopedStage(const Execution& execution, std::string_view stage, const StageWork& work)
      : recorder_(execution.recorder), stream_(execution.stream), stage_(stage), work_(work) {
    if (recorder_ != nullptr) recorder_->begin(stage_, stream_);
  }
  ~ScopedStage() {
    if (recorder_ != nullptr) recorder_->end(stage_, work_, stream_);
  }
  ScopedStage(const ScopedStage&) = delete;
  ScopedStage& operator=(const ScopedStage&) = delete;
  /// What is known only once the stage has run.
  void set_work(const StageWork& work) { work_ = work; }

 private:
  StageRecorder* recorder_;
  void* stream_;
  std::string_view stage_;
  StageWork work_;
};

}  // namespace switchyard
