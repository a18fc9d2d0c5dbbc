// The layer on a GPU: route, plan, experts, combine, shared experts, enqueued on one stream; across
// ranks the tokens go to their experts before the plan, and sums come home after the combine. All
// memory is made once for max_tokens (or grows, where that is 0); nothing waits, and what kernels
// find wrong stands in a status record that the next call, or status(), raises. Tokens, output and
// routing may also lie in host memory: then they are copied and the call waits for its result.
#include <algorithm>
#include <optional>

#include "core/check.hpp"
#include "core/stage_ranges.hpp"
#include "layer/cuda_exchange.hpp"
#include "layer/cuda_memory.hpp"
#include "layer/cuda_router.hpp"
#include "layer/cuda_shared_experts.hpp"
#include "layer/device_plan.hpp"
#include "layer/layer_kernels.hpp"
#include "layer/layer_runner.hpp"
#include "switchyard/device.hpp"
#include "switchyard/dispatch.hpp"

namespace switchyard {
namespace {

class CudaLayer final : public LayerRunner {
 public:
  CudaLayer(const LayerModel& model, const LayerOptions& options, Communicator* communicator)
      : options_(options),
        num_ranks_(communicator == nullptr ? 1 : communicator->size()),
        router_(model, options, options.compute.value_or(model.experts->dtype())) {
    config = model.config;
    const int rank = communicator == nullptr ? 0 : communicator->rank();
    const std::int32_t num_experts = config.experts.num_experts;
    subtree_ = subtree_of_rank({num_experts, config.reduction_groups}, rank, num_ranks_);
    first_expert_ = first_expert_of(num_experts, num_ranks_, rank);
    num_local_ = first_expert_of(num_experts, num_ranks_, rank + 1) - first_expert_;
    compute = options.compute.value_or(model.experts->dtype());
    if (options.rank_invariant && options.wire == DType::kF8E4M3) {
      fail(ErrorCode::kUnsupported,
           "rank_invariant with a wire of fp8 runs on the backend cpu only");
    }
    each_group_ = options.rank_invariant && options.wire != DType::kF32;
    execution_.backend = Backend::kCuda;
    execution_.batch_invariant = options.batch_invariant;
    weights_ = load(*model.experts, config.experts, first_expert_, num_local_);
    if (model.shared) {
      shared_.emplace(load(*model.shared, config.shared, 0, 1), model.shared_gate);
    }
    status_.reserve(sizeof(DeviceStatus));
    reset_status();
    if (options.max_tokens > 0) reserve(options.max_tokens);
    if (num_ranks_ == 1) return;
    // Growing would wait for the device, on which the exchange of another rank may wait for this.
    (void)host_tokens_.matrix(DType::kF32, options.max_tokens, config.experts.hidden);
    (void)host_out_.matrix(DType::kF32, options.max_tokens, config.experts.hidden);
    staging_.emplace(staging_bytes());
    rehearse();
    exchange_.emplace(*communicator, config, options, compute, each_group_);
  }

  ~CudaLayer() override { cudaDeviceSynchronize(); }
  CudaLayer(const CudaLayer&) = delete;
  CudaLayer& operator=(const CudaLayer&) = delete;

  void forward(const ForwardArgs& args) override {
    raise_findings();
    const cudaStream_t stream =
        exchange_ ? exchange_->stream_for(args) : static_cast<cudaStream_t>(args.stream);
    stream_ = stream;
    execution_.stream = stream;
    ranges_.forward_to(args.recorder);
    execution_.recorder = &ranges_;
    const std::int64_t num_tokens = args.tokens.rows;
    reserve(num_tokens);
    if (staging_) staging_->begin();
    const ConstRawMatrix tokens = to_compute(to_device(args.tokens, host_tokens_), stream);
    const bool host_out = num_tokens > 0 && !is_on_device(args.out.data);
    const RawMatrix out =
        host_out ? host_out_.matrix(args.out.dtype, num_tokens, args.out.cols) : args.out;

    router_.run(staged(args), tokens, execution_);
    const Matrix<const float> shared =
        shared_ ? shared_->run(tokens, execution_) : Matrix<const float>{};
    if (exchange_) {
      run_across_ranks(tokens, shared, out);
    } else {
      run_alone(tokens, shared, out);
    }
    report_findings(stream);
    // Copies of ranks share queues: not before the exchange is over, or one would stand before what
    // another rank wants to send.
    const bool to_host = host_out || args.record != nullptr;
    if (staging_ && to_host) SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    if (host_out) {
      const auto bytes = static_cast<std::size_t>(out.bytes());
      if (staging_) {
        staging_->download(args.out.data, out.data, bytes, stream);
      } else {
        SWITCHYARD_CUDA(
            cudaMemcpyAsync(args.out.data, out.data, bytes, cudaMemcpyDeviceToHost, stream));
      }
    }
    if (args.record != nullptr) {
      router_.download(*args.record, stream, staging_ ? &*staging_ : nullptr);
    }
    if (to_host || (staging_ && staging_->used())) {
      status();
      if (staging_) staging_->finish();
    }
  }

  void status() override {
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    raise_findings();
    rows_used = findings_->rows_used;
    rows_executed = findings_->rows_executed;
    if (exchange_) traffic = exchange_->traffic(findings_->rows_between_ranks);
  }

 private:
  std::unique_ptr<ExpertWeights> load(const ExpertSource& source, const ExpertConfig& experts,
                                      std::int32_t first, std::int32_t count) {
    return load_experts({.config = experts,
                         .source = &source,
                         .dtype = compute,
                         .first_expert = first,
                         .num_local = count,
                         .quantize_q8 = options_.quantize_q8,
                         .execution = execution_,
                         .progress = options_.progress});
  }

  /// Tokens that this rank's experts may have to work on when a rank has `num_tokens`: the host
  /// does not know how many come.
  [[nodiscard]] std::int64_t most_received(std::int64_t num_tokens) const {
    return num_ranks_ == 1 ? num_tokens : num_ranks_ * options_.max_tokens;
  }

  /// Rows an expert of the padded layout has for a call of so many tokens.
  [[nodiscard]] std::int64_t padded_rows(std::int64_t num_tokens) const {
    if (options_.layout.kind != LayoutKind::kPadded) return 0;
    const std::int64_t capacity =
        num_ranks_ * router_.capacity_for(num_ranks_ == 1 ? num_tokens : options_.max_tokens);
    // Without a limit the host does not know the fullest expert: room for all of them.
    return capacity > 0 ? capacity : most_received(num_tokens) * config.router.top_k;
  }

  [[nodiscard]] std::int64_t layout_rows(std::int64_t num_tokens) const {
    return max_rows(options_.layout, most_received(num_tokens), config.router.top_k, num_local_,
                    padded_rows(num_tokens));
  }

  [[nodiscard]] std::int32_t groups_per_row() const {
    return each_group_ ? subtree_.num_groups : 1;
  }

  /// Of what the experts' rank sums up: an exchange itself quantises to fp8.
  [[nodiscard]] DType sums_type() const {
    const bool travels = num_ranks_ > 1 || each_group_;
    return travels && options_.wire != DType::kF8E4M3 ? options_.wire : DType::kF32;
  }

  /// All memory that calls of so many tokens need.
  void reserve(std::int64_t num_tokens) {
    if (num_tokens <= reserved_tokens_) return;
    const std::int64_t hidden = config.experts.hidden;
    const std::int64_t experts = config.router.num_experts;
    const std::int64_t top_k = config.router.top_k;
    const std::int64_t rows = layout_rows(num_tokens);
    const std::int64_t received = most_received(num_tokens);
    stage_workspace_.reserve(stage_workspace_bytes(received, top_k, experts, hidden));
    router_.reserve(num_tokens);
    (void)converted_.matrix(compute, num_tokens, hidden);
    (void)sums_.matrix(DType::kF32, received * groups_per_row(), hidden);
    if (options_.layout.kind != LayoutKind::kCompact) (void)packed_.matrix(compute, rows, hidden);
    (void)plan_.reserve(received, top_k, num_local_, rows);
    experts_workspace_.reserve(experts_workspace_bytes(rows, config.experts.inner, compute));
    (void)rows_.matrix(compute, rows, hidden);
    if (shared_) shared_->reserve(num_tokens);
    execution_.workspace = stage_workspace_.data();
    execution_.workspace_bytes = stage_workspace_.bytes();
    execution_.status = reinterpret_cast<DeviceStatus*>(status_.data());
    reserved_tokens_ = num_tokens;
  }

  /// Of tokens, output, given routing and record of one call.
  [[nodiscard]] std::size_t staging_bytes() const {
    constexpr std::int64_t kPieces = 9 * 256;
    const std::int64_t picks = options_.max_tokens * config.router.top_k;
    return static_cast<std::size_t>(2 * 4 * options_.max_tokens * config.experts.hidden +
                                    (8 + 9) * picks + 16 * config.router.num_experts + kPieces);
  }

  /// Runs all stages but the exchange, on no rows: what the driver does at a first launch (loading,
  /// room for stacks) may wait for the device, and so for ranks that wait for this one.
  void rehearse() {
    const std::int64_t hidden = config.experts.hidden;
    // The router has a kernel for few tokens, some, many: doubling meets them all.
    for (std::int64_t doubled = 1; doubled < 2 * options_.max_tokens; doubled *= 2) {
      const std::int64_t num_tokens = std::min(doubled, options_.max_tokens);
      const RawMatrix tokens = converted_.matrix(compute, num_tokens, hidden);  // zeros
      router_.run({}, tokens, execution_);
      if (shared_) (void)shared_->run(tokens, execution_);
    }
    if (num_local_ > 0) {
      const std::int64_t received = most_received(options_.max_tokens);
      DeviceBuffer ids, weights;
      const Matrix<std::int32_t> nobody = ids.matrix<std::int32_t>(received, config.router.top_k);
      SWITCHYARD_CUDA(
          cudaMemset(nobody.data, 0xff, static_cast<std::size_t>(4 * nobody.size())));  // -1
      make_plan({.expert = nobody, .weight = weights.matrix<float>(received, config.router.top_k)},
                options_.max_tokens);
      const RawMatrix sums = sums_.matrix(sums_type(), received * groups_per_row(), hidden);
      reduce_experts({rows_.data(), compute, received, hidden},
                     {.sums = sums, .subtree = subtree_, .each_group = each_group_});
      SWITCHYARD_CUDA(cudaDeviceSynchronize());  // before ids and weights go
    }
  }

  ConstRawMatrix to_device(ConstRawMatrix tokens, DeviceBuffer& buffer) {
    if (tokens.rows == 0 || is_on_device(tokens.data)) return tokens;
    const RawMatrix copy = buffer.matrix(tokens.dtype, tokens.rows, tokens.cols);
    const auto bytes = static_cast<std::size_t>(copy.bytes());
    const void* const from = staging_ ? staging_->keep(tokens.data, bytes) : tokens.data;
    SWITCHYARD_CUDA(cudaMemcpyAsync(copy.data, from, bytes, cudaMemcpyHostToDevice, stream_));
    return copy;
  }

  /// With given routing where copies of it need no lock, if ranks wait for each other.
  ForwardArgs staged(ForwardArgs args) {
    if (!staging_ || args.expert.data == nullptr || args.expert.size() == 0 ||
        is_on_device(args.expert.data)) {
      return args;
    }
    const auto bytes = static_cast<std::size_t>(4 * args.expert.size());
    args.expert.data = static_cast<const std::int32_t*>(staging_->keep(args.expert.data, bytes));
    args.weight.data = static_cast<const float*>(staging_->keep(args.weight.data, bytes));
    return args;
  }

  ConstRawMatrix to_compute(ConstRawMatrix tokens, cudaStream_t stream) {
    if (tokens.dtype == compute) return tokens;
    const RawMatrix converted = converted_.matrix(compute, tokens.rows, tokens.cols);
    const ScopedStage stage(execution_, "pack", {});
    convert(tokens, converted, stream);
    return converted;
  }

  struct Assignments {
    Matrix<const std::int32_t> expert{};
    Matrix<const float> weight{};
    Matrix<const std::uint8_t> kept{};
    std::int32_t total_experts = 0;  ///< 0: ids of other ranks' experts are none.
  };

  void make_plan(const Assignments& work, std::int64_t num_tokens) {
    const ScopedStage stage(execution_, "plan",
                            {.bytes = 21 * static_cast<double>(work.expert.size())});
    const PlanView view = plan_.reserve(work.expert.shape[0], config.router.top_k, num_local_,
                                        layout_rows(num_tokens));
    switchyard::plan({.expert = work.expert,
                      .weight = work.weight,
                      .kept = work.kept,
                      .first_expert = first_expert_,
                      .total_experts = work.total_experts,
                      .layout = options_.layout,
                      .padded_rows = padded_rows(num_tokens),
                      .plan = view,
                      .execution = execution_});
  }

  void run_alone(ConstRawMatrix tokens, Matrix<const float> shared, RawMatrix out) {
    const Routing& routing = router_.routing();
    make_plan({.expert = routing.expert,
               .weight = routing.weight,
               .kept = router_.kept(),
               .total_experts = config.router.num_experts},
              tokens.rows);
    const bool direct = shared.data == nullptr && !each_group_;
    const RawMatrix sums =
        direct ? out : sums_.matrix(sums_type(), tokens.rows * groups_per_row(), tokens.cols);
    reduce_experts(tokens, {.sums = sums, .subtree = subtree_, .each_group = each_group_});
    if (direct) return;
    const ScopedStage stage(execution_, "combine",
                            {.bytes = static_cast<double>(sums.bytes() + out.bytes())});
    finish({.partials = sums,
            .groups_per_row = groups_per_row(),
            .shared = shared,
            .out = out,
            .execution = execution_});
  }

  /// Places without a row have no expert, so the plan takes all places, and the experts gather rows
  /// where they have arrived; what they make of a row is one row of sums, at the same place.
  void run_across_ranks(ConstRawMatrix tokens, Matrix<const float> shared, RawMatrix out) {
    const DeviceReceived received =
        exchange_->dispatch(tokens, router_.routing(), router_.kept(), execution_);
    rows_between_ranks_ = received.counts;
    const RawMatrix sums =
        sums_.matrix(sums_type(), received.x.rows * groups_per_row(), tokens.cols);
    if (num_local_ > 0) {
      make_plan({.expert = received.expert, .weight = received.weight}, tokens.rows);
      reduce_experts(received.x, {.sums = sums, .subtree = subtree_, .each_group = each_group_});
    }
    exchange_->combine(sums, shared, out, execution_);
  }

  /// Weighted sums of the experts' outputs: fused where an implementation combines.
  void reduce_experts(ConstRawMatrix tokens, const ReducedRows& reduced) {
    const PlanView& view = plan_.view();
    const std::int64_t rows = view.row_token.shape[0];
    const std::int64_t hidden = tokens.cols;
    ExpertsArgs args{.x = tokens,
                     .plan = view,
                     .layout = options_.layout,
                     .weights = weights_.get(),
                     .reduced = reduced,
                     .execution = with_workspace(execution_, experts_workspace_)};
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
    args.rows = rows_.matrix(compute, rows, hidden);
    experts(args);
    const ScopedStage stage(
        execution_, "combine",
        {.bytes = static_cast<double>(args.rows.bytes() + reduced.sums.bytes())});
    combine({.rows = args.rows,
             .plan = view,
             .first_expert = first_expert_,
             .reduced = reduced,
             .execution = execution_});
  }

  void report_findings(cudaStream_t stream) {
    const PlanView& view = plan_.view();
    report({.status = execution_.status,
            .rows_used = view.token_begin.data + view.num_tokens(),
            .rows_executed = view.expert_begin.data + view.num_experts,
            .rows_between_ranks = rows_between_ranks_,
            .num_pairs = exchange_ ? num_ranks_ * num_ranks_ : 0},
           &*findings_, stream);
  }

  void reset_status() {
    const DeviceStatus fresh;
    SWITCHYARD_CUDA(cudaMemcpy(status_.data(), &fresh, sizeof(fresh), cudaMemcpyHostToDevice));
    findings_->status = fresh;
  }

  /// Throws what an earlier call has left, once.
  void raise_findings() {
    if (exchange_) exchange_->check();
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
  int num_ranks_;
  Subtree subtree_;
  std::int32_t first_expert_ = 0;
  std::int32_t num_local_ = 0;  ///< Experts of this rank.
  CudaRouter router_;
  bool each_group_ = false;
  Execution execution_;
  StageRanges ranges_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<ExpertWeights> weights_;
  DevicePlan plan_;
  std::optional<CudaSharedExperts> shared_;
  PinnedValue<Findings> findings_;
  const std::int64_t* rows_between_ranks_ = nullptr;  ///< On the device.
  std::int64_t reserved_tokens_ = -1;

  DeviceBuffer stage_workspace_, status_, host_tokens_, host_out_;
  DeviceBuffer converted_, packed_, sums_, rows_, experts_workspace_;
  std::optional<HostStaging> staging_;    ///< Where there is an exchange.
  std::optional<CudaExchange> exchange_;  ///< Ends first: all ranks' kernels have left then.
};

}  // namespace

std::unique_ptr<LayerRunner> make_cuda_layer(const LayerModel& model, const LayerOptions& options,
                                             Communicator* communicator) {
  return std::make_unique<CudaLayer>(model, options, communicator);
}

}  // namespace switchyard
