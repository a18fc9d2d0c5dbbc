// Routing, the plan, and plan, experts and combine, on a GPU: bound by what the stages are bound
// by, for memory is kept from call to call and nothing waits.
#include "layer/gpu/stage_calls.hpp"

#include <algorithm>
#include <map>
#include <mutex>

#include "core/check.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "core/gpu/device_wide.hpp"
#include "experts/gpu/planned_experts.hpp"
#include "experts/gpu/weights.hpp"
#include "layer/expert_runner.hpp"
#include "layer/gpu/kernels.hpp"
#include "layer/gpu/status_of_calls.hpp"
#include "plan/gpu/device_plan.hpp"
#include "plan/implementations.hpp"

namespace switchyard {
namespace {

/// Memory and status of plans.
class Planner {
 public:
  explicit Planner(std::int32_t num_experts) : num_experts_(num_experts) {}
  ~Planner() { (void)wait_for_device(); }
  Planner(const Planner&) = delete;
  Planner& operator=(const Planner&) = delete;

  /// Raises what was found, and is ready for a call of such a size; true if it had to grow.
  bool begin(std::int64_t num_tokens, std::int64_t top_k, void* stream) {
    raise_status();
    stream_ = static_cast<cudaStream_t>(stream);
    if (num_tokens <= tokens_ && top_k <= top_k_) return false;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    SWITCHYARD_CUDA(cudaStreamIsCapturing(stream_, &capture));
    require(capture == cudaStreamCaptureStatusNone,
            "{} tokens with {} experts each need memory, which is not to be had while a stream is "
            "captured: make such a call before",
            num_tokens, top_k);
    tokens_ = std::max(tokens_, num_tokens);
    top_k_ = std::max(top_k_, top_k);
    workspace_.reserve(plan_workspace_bytes(tokens_, top_k_, num_experts_));
    return true;
  }
  [[nodiscard]] std::int64_t tokens() const { return tokens_; }
  [[nodiscard]] std::int64_t top_k() const { return top_k_; }

  [[nodiscard]] Execution execution() {
    return {.backend = Backend::kCuda,
            .stream = stream_,
            .workspace = workspace_.data(),
            .workspace_bytes = workspace_.bytes(),
            .status = status_.counted()};
  }
  [[nodiscard]] PlanView reserve(const PlanArgs& args) {
    const auto [tokens, top_k] = std::get<DenseAssignments>(args.assignments).expert.shape;
    return plan_.reserve(tokens, top_k, num_experts_,
                         max_rows(args.layout, tokens, top_k, num_experts_, args.padded_rows));
  }
  [[nodiscard]] PlanReport place_of_report() { return status_.place_of_report(); }
  void end(const PlanView& view) {
    report({.status = status_.counted(),
            .rows_used = view.token_begin.data + view.num_tokens(),
            .rows_executed = view.expert_begin.data + view.num_experts},
           &status_.place(), stream_);
  }
  void check() {
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    raise_status();
  }

 private:
  /// Throws what an earlier call has left, once.
  void raise_status() {
    const std::optional<DeviceStatus> found = status_.take(stream_);
    if (!found) return;
    require(found->bad_ids == 0, "{} expert ids are out of range", found->bad_ids);
    require(found->lost_rows == 0, "{} rows are more than the padded layout has room for",
            found->lost_rows);
  }

  std::int32_t num_experts_;
  std::int64_t tokens_ = 0, top_k_ = 0;  ///< That there is memory for.
  cudaStream_t stream_ = nullptr;
  DevicePlan plan_;
  DeviceBuffer workspace_;
  StatusOfCalls status_{1};
};

class CudaPlanCalls final : public PlanCalls {
 public:
  explicit CudaPlanCalls(std::int32_t num_experts) : planner_(num_experts) {}

  PlanView run(PlanArgs args, void* stream) override {
    const auto [tokens, top_k] = std::get<DenseAssignments>(args.assignments).expert.shape;
    planner_.begin(tokens, top_k, stream);
    args.plan = planner_.reserve(args);
    args.execution = planner_.execution();
    plan(args);
    planner_.end(args.plan);
    return args.plan;
  }
  void check() override { planner_.check(); }

 private:
  Planner planner_;
};

/// Scratch of Soft-MoE's calls, and what they find: in pinned memory, as RouteStatus has it.
class Mixer {
 public:
  /// Raises what was found. @param bytes  Of scratch.
  [[nodiscard]] Execution begin(std::int64_t bytes, void* stream) {
    raise_status();
    stream_ = static_cast<cudaStream_t>(stream);
    if (bytes > workspace_.bytes()) {
      cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
      SWITCHYARD_CUDA(cudaStreamIsCapturing(stream_, &capture));
      require(capture == cudaStreamCaptureStatusNone,
              "Soft-MoE needs {} bytes, which are not to be had while a stream is captured: make "
              "such a call before",
              bytes);
      workspace_.reserve(bytes);
    }
    return with_workspace({.backend = Backend::kCuda, .stream = stream, .status = &*status_},
                          workspace_);
  }
  void check() {
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    raise_status();
  }

 private:
  void raise_status() {
    const DeviceStatus found = *status_;
    if (found.ok()) return;
    *status_ = DeviceStatus{};
    fail(ErrorCode::kInvalidArgument, "the logit of token {} and slot {} is not finite",
         found.nan_logit >> 32, found.nan_logit & 0xffffffffU);
  }

  cudaStream_t stream_ = nullptr;
  DeviceBuffer workspace_;
  PinnedValue<DeviceStatus> status_;
};

class CudaFusedExperts final : public FusedExperts {
 public:
  explicit CudaFusedExperts(std::unique_ptr<const ExpertWeights> weights)
      : weights_(std::move(weights)), planner_(weights_->config().num_experts) {}

  void run(const FusedCall& call, void* stream) override {
    const auto [num_tokens, top_k] = call.expert.shape;
    if (planner_.begin(num_tokens, top_k, stream)) grow();
    if (num_tokens == 0) return;
    const std::int32_t num_experts = weights_->config().num_experts;
    PlanArgs plan{.assignments = DenseAssignments{.expert = call.expert, .weight = call.weight},
                  .total_experts = num_experts,
                  .execution = planner_.execution()};
    plan.plan = planner_.reserve(plan);
    const ExpertsArgs args{
        .x = call.x,
        .plan = plan.plan,
        .weights = weights_.get(),
        .reduced = {.sums = call.y, .subtree = {.order = {.num_experts = num_experts}}},
        .execution = with_workspace(plan.execution, workspace_)};
    const PlannedExpertsArgs planned{plan, args, planner_.place_of_report(), plan.execution};
    if (const auto* const at_once = find_planned_experts(planned)) return at_once->run(planned);
    switchyard::plan(plan);
    runner_.run(args, plan.execution);
    planner_.end(plan.plan);
  }
  void mix(SoftMoeArgs args, void* stream) override {
    args.weights = weights_.get();
    args.execution =
        mixer_.begin(soft_moe_workspace_bytes(*weights_, args.config, args.x.rows), stream);
    soft_moe(args);
  }
  void mix_backward(const SoftMoeConfig& config, std::int64_t num_tokens, SoftMoeBackwardArgs args,
                    void* stream) override {
    args.weights = weights_.get();
    args.execution =
        mixer_.begin(soft_moe_backward_workspace_bytes(*weights_, config, num_tokens), stream);
    soft_moe_backward(args);
  }
  void check() override {
    planner_.check();
    mixer_.check();
  }

 private:
  void grow() {
    const std::int64_t rows = planner_.tokens() * planner_.top_k();
    workspace_.reserve(experts_workspace_bytes(rows, *weights_));
    runner_.reserve({}, weights_->dtype(), rows, weights_->config().hidden);
    const Matrix<const std::int32_t> most{nullptr, {planner_.tokens(), planner_.top_k()}};
    (void)planner_.reserve({.assignments = DenseAssignments{.expert = most}});
  }

  std::unique_ptr<const ExpertWeights> weights_;
  Planner planner_;
  Mixer mixer_;
  DeviceBuffer workspace_;
  ExpertRunner<DeviceBuffer> runner_;
};

/// What calls of route_on_gpu() find on one GPU. It lies in pinned memory, which kernels write only
/// where there is something to report: a call needs no copy, and a graph may hold it.
class RouteStatus {
 public:
  /// Of a device, which is the current one. Never freed: graphs may hold the address.
  static RouteStatus& of(int device) {
    static std::mutex mutex;
    static auto* all = new std::map<int, RouteStatus>;
    const std::lock_guard lock(mutex);
    return (*all)[device];
  }

  [[nodiscard]] DeviceStatus* place() { return &*status_; }
  void raise() {
    const std::lock_guard lock(mutex_);
    const DeviceStatus found = *status_;
    if (found.ok()) return;
    *status_ = DeviceStatus{};
    require(found.nan_logit == DeviceStatus::kNone, "the logit of token {} for expert {} is NaN",
            found.nan_logit >> 32, found.nan_logit & 0xffffffffU);
    require(found.bad_token_id == DeviceStatus::kNone,
            "token_ids[{}] is {}, for which the hash router has no experts",
            found.bad_token_id >> 32, static_cast<std::int32_t>(found.bad_token_id & 0xffffffffU));
  }

 private:
  PinnedValue<DeviceStatus> status_;
  std::mutex mutex_;
};

}  // namespace

void route_on_gpu(int device, const RouteArgs& args) {
  RouteStatus& status = RouteStatus::of(device);
  status.raise();
  RouteArgs told = args;
  told.execution.status = status.place();
  route(told);
}

void check_routes(int device, void* stream) {
  SWITCHYARD_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
  RouteStatus::of(device).raise();
}

std::unique_ptr<PlanCalls> make_plan_calls(std::int32_t num_experts) {
  return std::make_unique<CudaPlanCalls>(num_experts);
}

std::unique_ptr<FusedExperts> make_fused_experts(const ExpertsOnDevice& experts) {
  const WeightsOnDevice weights{
      .w13 = experts.w13, .w2 = experts.w2, .b13 = experts.b13, .b2 = experts.b2};
  return std::make_unique<CudaFusedExperts>(std::make_unique<CudaExpertWeights>(
      experts.config, experts.dtype, weights, 0, experts.config.num_experts));
}

std::unique_ptr<FusedExperts> make_fused_experts(std::unique_ptr<ExpertWeights> weights) {
  return std::make_unique<CudaFusedExperts>(std::move(weights));
}

}  // namespace switchyard
