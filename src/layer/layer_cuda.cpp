// The layer on one GPU: route, plan, experts, combine, shared experts, enqueued on one stream. All
// memory is made once for max_tokens (or grows, where that is 0); nothing waits, and what kernels
// find wrong stands in a status record that the next call, or status(), raises. Tokens, output and
// routing may also lie in host memory: then they are copied and the call waits for its result.
#include "core/check.hpp"
#include "core/stage_ranges.hpp"
#include "layer/cuda_router.hpp"
#include "layer/device_plan.hpp"
#include "layer/layer_kernels.hpp"
#include "layer/layer_runner.hpp"
#include "switchyard/device.hpp"
#include "switchyard/dispatch.hpp"

namespace switchyard {
namespace {

bool is_on_device(const void* p) {
  cudaPointerAttributes attributes{};
  SWITCHYARD_CUDA(cudaPointerGetAttributes(&attributes, p));
  return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
}

/// What a call leaves for the host to look at.
struct Findings {
  DeviceStatus status;
  std::int32_t rows_used = 0;
  std::int32_t rows_executed = 0;
};

/// Experts of one kind with what they need to run.
struct DeviceExperts {
  std::unique_ptr<ExpertWeights> weights{};
  DevicePlan plan{};
  DeviceBuffer workspace{};
  DeviceBuffer rows{};
};

class CudaLayer final : public LayerRunner {
 public:
  CudaLayer(const LayerModel& model, const LayerOptions& options)
      : options_(options),
        subtree_{.order = {.num_experts = model.config.experts.num_experts,
                           .groups = model.config.reduction_groups},
                 .num_groups = model.config.reduction_groups},
        router_(model, options, options.compute.value_or(model.experts->dtype())) {
    config = model.config;
    compute = options.compute.value_or(model.experts->dtype());
    if (options.rank_invariant && options.wire == DType::kF8E4M3) {
      fail(ErrorCode::kUnsupported,
           "rank_invariant with a wire of fp8 runs on the backend cpu only");
    }
    each_group_ = options.rank_invariant && options.wire != DType::kF32;
    execution_.backend = Backend::kCuda;
    execution_.batch_invariant = options.batch_invariant;
    experts_.weights = load(*model.experts, config.experts);
    if (model.shared) shared_.weights = load(*model.shared, config.shared);
    upload(model.shared_gate, shared_gate_);
    status_.reserve(sizeof(DeviceStatus));
    reset_status();
    if (options.max_tokens > 0) reserve(options.max_tokens);
  }

  ~CudaLayer() override { cudaDeviceSynchronize(); }
  CudaLayer(const CudaLayer&) = delete;
  CudaLayer& operator=(const CudaLayer&) = delete;

  void forward(const ForwardArgs& args) override {
    raise_findings();
    const auto stream = static_cast<cudaStream_t>(args.stream);
    stream_ = stream;
    execution_.stream = stream;
    ranges_.forward_to(args.recorder);
    execution_.recorder = &ranges_;
    const std::int64_t num_tokens = args.tokens.rows;
    reserve(num_tokens);
    const ConstRawMatrix tokens = to_compute(to_device(args.tokens, host_tokens_), stream);
    const bool host_out = num_tokens > 0 && !is_on_device(args.out.data);
    const RawMatrix out =
        host_out ? host_out_.matrix(args.out.dtype, num_tokens, args.out.cols) : args.out;

    router_.run(args, tokens, execution_);
    make_plan();
    const Matrix<const float> shared = run_shared(tokens);
    run_experts(tokens, shared, out);
    copy_findings(stream);
    if (host_out) {
      SWITCHYARD_CUDA(cudaMemcpyAsync(args.out.data, out.data,
                                      static_cast<std::size_t>(out.bytes()), cudaMemcpyDeviceToHost,
                                      stream));
    }
    if (args.record != nullptr) router_.download(*args.record, stream);
    if (host_out || args.record != nullptr) status();
  }

  void status() override {
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    rows_used = findings_->rows_used;
    rows_executed = findings_->rows_executed;
    raise_findings();
  }

 private:
  std::unique_ptr<ExpertWeights> load(const ExpertSource& source, const ExpertConfig& experts) {
    return load_experts({.config = experts,
                         .source = &source,
                         .dtype = compute,
                         .num_local = experts.num_experts,
                         .quantize_q8 = options_.quantize_q8,
                         .execution = execution_,
                         .progress = options_.progress});
  }

  /// Rows an expert of the padded layout has for a call of so many tokens.
  [[nodiscard]] std::int64_t padded_rows(std::int64_t num_tokens) const {
    if (options_.layout.kind != LayoutKind::kPadded) return 0;
    const std::int64_t capacity = router_.capacity_for(num_tokens);
    // Without a limit the host does not know the fullest expert: room for all of them.
    return capacity > 0 ? capacity : num_tokens * config.router.top_k;
  }

  [[nodiscard]] std::int64_t layout_rows(std::int64_t num_tokens) const {
    return max_rows(options_.layout, num_tokens, config.router.top_k, config.experts.num_experts,
                    padded_rows(num_tokens));
  }

  /// All memory that calls of so many tokens need.
  void reserve(std::int64_t num_tokens) {
    if (num_tokens <= reserved_tokens_) return;
    const std::int64_t hidden = config.experts.hidden;
    const std::int64_t experts = config.router.num_experts;
    const std::int64_t top_k = config.router.top_k;
    const std::int64_t rows = layout_rows(num_tokens);
    const std::int64_t groups = each_group_ ? subtree_.num_groups : 1;
    stage_workspace_.reserve(stage_workspace_bytes(num_tokens, top_k, experts, hidden));
    router_.reserve(num_tokens);
    (void)converted_.matrix(compute, num_tokens, hidden);
    (void)sums_.matrix(DType::kF32, num_tokens * groups, hidden);
    if (options_.layout.kind != LayoutKind::kCompact) (void)packed_.matrix(compute, rows, hidden);
    reserve(experts_, config.experts, num_tokens, top_k, rows);
    if (shared_.weights) {
      reserve(shared_, config.shared, num_tokens, 1, num_tokens);
      (void)shared_sums_.matrix<float>(num_tokens, hidden);
    }
    execution_.workspace = stage_workspace_.data();
    execution_.workspace_bytes = stage_workspace_.bytes();
    execution_.status = reinterpret_cast<DeviceStatus*>(status_.data());
    reserved_tokens_ = num_tokens;
  }

  void reserve(DeviceExperts& experts, const ExpertConfig& shape, std::int64_t num_tokens,
               std::int64_t top_k, std::int64_t rows) const {
    experts.plan.reserve(num_tokens, top_k, shape.num_experts, rows);
    experts.workspace.reserve(experts_workspace_bytes(rows, shape.inner, compute));
    (void)experts.rows.matrix(compute, rows, shape.hidden);
  }

  ConstRawMatrix to_device(ConstRawMatrix tokens, DeviceBuffer& buffer) const {
    if (tokens.rows == 0 || is_on_device(tokens.data)) return tokens;
    const RawMatrix copy = buffer.matrix(tokens.dtype, tokens.rows, tokens.cols);
    SWITCHYARD_CUDA(cudaMemcpyAsync(copy.data, tokens.data, static_cast<std::size_t>(copy.bytes()),
                                    cudaMemcpyHostToDevice, stream_));
    return copy;
  }

  ConstRawMatrix to_compute(ConstRawMatrix tokens, cudaStream_t stream) {
    if (tokens.dtype == compute) return tokens;
    const RawMatrix converted = converted_.matrix(compute, tokens.rows, tokens.cols);
    const ScopedStage stage(execution_, "pack", {});
    convert(tokens, converted, stream);
    return converted;
  }

  void make_plan() {
    const Routing& routing = router_.routing();
    const std::int64_t num_tokens = routing.expert.shape[0];
    const ScopedStage stage(execution_, "plan",
                            {.bytes = 21 * static_cast<double>(routing.expert.size())});
    const PlanView view = experts_.plan.reserve(num_tokens, config.router.top_k,
                                                config.router.num_experts, layout_rows(num_tokens));
    switchyard::plan({.expert = routing.expert,
                      .weight = routing.weight,
                      .kept = router_.kept(),
                      .total_experts = config.router.num_experts,
                      .layout = options_.layout,
                      .padded_rows = padded_rows(num_tokens),
                      .plan = view,
                      .execution = execution_});
  }

  [[nodiscard]] Execution with_workspace(const DeviceExperts& experts) const {
    Execution execution = execution_;
    execution.workspace = experts.workspace.data();
    execution.workspace_bytes = experts.workspace.bytes();
    return execution;
  }

  void run_experts(ConstRawMatrix tokens, Matrix<const float> shared, RawMatrix out) {
    const bool direct = shared.data == nullptr && !each_group_;
    const std::int32_t groups = each_group_ ? subtree_.num_groups : 1;
    const RawMatrix sums = direct ? out
                                  : sums_.matrix(each_group_ ? options_.wire : DType::kF32,
                                                 tokens.rows * groups, tokens.cols);
    reduce_experts(tokens, {.sums = sums, .subtree = subtree_, .each_group = each_group_});
    if (direct) return;
    const ScopedStage stage(execution_, "combine",
                            {.bytes = static_cast<double>(sums.bytes() + out.bytes())});
    finish({.partials = sums,
            .groups_per_row = groups,
            .shared = shared,
            .out = out,
            .execution = execution_});
  }

  /// Weighted sums of the experts' outputs: fused where an implementation combines.
  void reduce_experts(ConstRawMatrix tokens, const ReducedRows& reduced) {
    const PlanView& view = experts_.plan.view();
    const std::int64_t rows = view.row_token.shape[0];
    const std::int64_t hidden = tokens.cols;
    ExpertsArgs args{.x = tokens,
                     .plan = view,
                     .layout = options_.layout,
                     .weights = experts_.weights.get(),
                     .reduced = reduced,
                     .execution = with_workspace(experts_)};
    if (options_.layout.kind != LayoutKind::kCompact) {
      const RawMatrix packed = packed_.matrix(compute, rows, hidden);
      const ScopedStage stage(execution_, "pack",
                              {.bytes = 2 * static_cast<double>(packed.bytes())});
      pack({.x = tokens, .plan = view, .rows = packed, .execution = execution_});
      args.x = packed;
      args.x_is_packed = true;
    } else if (experts_supported(args)) {
      experts(args);
      return;
    }
    args.reduced = {};
    args.rows = experts_.rows.matrix(compute, rows, hidden);
    experts(args);
    const ScopedStage stage(
        execution_, "combine",
        {.bytes = static_cast<double>(args.rows.bytes() + reduced.sums.bytes())});
    combine({.rows = args.rows, .plan = view, .reduced = reduced, .execution = execution_});
  }

  /// [T, H] of the shared experts, or empty.
  Matrix<const float> run_shared(ConstRawMatrix tokens) {
    if (!shared_.weights) return {};
    const std::int64_t num_tokens = tokens.rows;
    const double flops = (config.shared.gated ? 6.0 : 4.0) *
                         static_cast<double>(num_tokens * tokens.cols * config.shared.inner);
    const ScopedStage stage(execution_, "shared", {.flops = flops, .flops_executed = flops});
    Execution quiet = with_workspace(shared_);
    quiet.recorder = nullptr;
    const PlanView view = shared_.plan.reserve(num_tokens, 1, 1, num_tokens);
    plan_one_expert(tokens, uploaded(shared_gate_).data, view, stream_);
    const RawMatrix rows = shared_.rows.matrix(compute, num_tokens, tokens.cols);
    experts({.x = tokens,
             .x_is_packed = true,
             .plan = view,
             .weights = shared_.weights.get(),
             .rows = rows,
             .execution = quiet});
    const Matrix<float> sums = shared_sums_.matrix<float>(num_tokens, tokens.cols);
    combine({.rows = rows,
             .plan = view,
             .reduced = {.sums = {reinterpret_cast<std::byte*>(sums.data), DType::kF32, num_tokens,
                                  tokens.cols},
                         .subtree = {.order = {.num_experts = 1, .groups = 1}, .num_groups = 1}},
             .execution = quiet});
    return sums;
  }

  void copy_findings(cudaStream_t stream) {
    const PlanView& view = experts_.plan.view();
    const auto copy = [stream](void* to, const void* from, std::size_t bytes) {
      SWITCHYARD_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
    };
    copy(&findings_->status, status_.data(), sizeof(DeviceStatus));
    copy(&findings_->rows_used, view.token_begin.data + view.num_tokens(), 4);
    copy(&findings_->rows_executed, view.expert_begin.data + view.num_experts, 4);
  }

  void reset_status() {
    const DeviceStatus fresh;
    SWITCHYARD_CUDA(cudaMemcpy(status_.data(), &fresh, sizeof(fresh), cudaMemcpyHostToDevice));
    findings_->status = fresh;
  }

  /// Throws what an earlier call has left, once.
  void raise_findings() {
    const DeviceStatus found = findings_->status;
    if (found.ok()) return;
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    reset_status();
    require(found.nan_logit == DeviceStatus::kNone, "the logit of token {} for expert {} is NaN",
            found.nan_logit >> 32, found.nan_logit & 0xffffffffU);
    require(found.bad_ids == 0, "{} expert ids are not in -1 to {}", found.bad_ids,
            config.router.num_experts - 1);
    require(found.lost_rows == 0, "{} rows are more than the padded layout has room for",
            found.lost_rows);
  }

  LayerOptions options_;
  Subtree subtree_;
  CudaRouter router_;
  bool each_group_ = false;
  Execution execution_;
  StageRanges ranges_;
  cudaStream_t stream_ = nullptr;
  DeviceExperts experts_, shared_;
  DeviceBuffer shared_gate_;
  PinnedValue<Findings> findings_;
  std::int64_t reserved_tokens_ = -1;

  DeviceBuffer stage_workspace_, status_, host_tokens_, host_out_;
  DeviceBuffer converted_, packed_, sums_, shared_sums_;
};

}  // namespace

std::unique_ptr<LayerRunner> make_cuda_layer(const LayerModel& model, const LayerOptions& options) {
  return std::make_unique<CudaLayer>(model, options);
}

}  // namespace switchyard
