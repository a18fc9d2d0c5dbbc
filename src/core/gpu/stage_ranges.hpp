#pragma once

// Ranges that a profiler of the GPU shows (nsys): which part of the flow has enqueued a kernel.
// They cost a look at a pointer where no profiler is attached.

#include <nvtx3/nvToolsExt.h>

#include "switchyard/execution.hpp"

namespace switchyard {

/// The part of the flow that a stage of the tool's table belongs to: "route", "plan", "dispatch",
/// "experts" or "combine"; "exchange" around those two of ranks.
[[nodiscard]] constexpr const char* flow_part(std::string_view stage) {
  if (stage == "router_gemm" || stage == "select") return "route";
  if (stage == "plan") return "plan";
  if (stage == "pack") return "dispatch";
  if (stage == "combine") return "combine";
  if (stage == "exchange") return "exchange";
  return "experts";  // "shared" too
}
static_assert(std::string_view(flow_part("gemm1+activation+gemm2+combine")) == "experts");

/// A range of the calling thread for as long as the object lives.
class FlowRange {
 public:
  explicit FlowRange(const char* part) { nvtxRangePushA(part); }
  ~FlowRange() { nvtxRangePop(); }
  FlowRange(const FlowRange&) = delete;
  FlowRange& operator=(const FlowRange&) = delete;
};

/// Opens a range for each stage, and tells another recorder of it, if there is one.
class StageRanges final : public StageRecorder {
 public:
  void forward_to(StageRecorder* recorder) { recorder_ = recorder; }

  void begin(std::string_view stage, void* stream) override {
    nvtxRangePushA(flow_part(stage));
    if (recorder_ != nullptr) recorder_->begin(stage, stream);
  }
  void end(std::string_view stage, const StageWork& work, void* stream) override {
    if (recorder_ != nullptr) recorder_->end(stage, work, stream);
    nvtxRangePop();
  }
  void chose(std::string_view call, std::string_view implementation) override {
    if (recorder_ != nullptr) recorder_->chose(call, implementation);
  }

 private:
  StageRecorder* recorder_ = nullptr;  // of the call
};

}  // namespace switchyard
