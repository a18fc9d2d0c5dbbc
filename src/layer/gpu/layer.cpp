// The layer on a GPU: route, plan, experts, combine, shared experts, enqueued on one stream; across
// ranks the tokens go to their experts before the plan, and sums come home after the combine. All
// memory is made once for max_tokens (or grows, where that is 0); nothing waits, and what kernels
// find wrong stands in a status record that the next call, or check(), raises. Tokens, output and
// routing may also lie in host memory: then they are copied and the call waits for its result.
#include <algorithm>
#include <optional>

#include "core/check.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "core/gpu/stage_ranges.hpp"
#include "layer/gpu/call_findings.hpp"
#include "layer/gpu/exchange.hpp"
#include "layer/gpu/experts.hpp"
#include "layer/gpu/kernels.hpp"
#include "layer/gpu/router.hpp"
#include "layer/gpu/shared_experts.hpp"
#include "layer/gpu/wire_rows.hpp"
#include "layer/layer_runner.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

class CudaLayer final : public LayerRunner {
 public:
  CudaLayer(const LayerModel& model, const LayerOptions& options, Communicator* communicator)
      : options_(options),
        num_ranks_(communicator == nullptr ? 1 : communicator->size()),
        router_(model, options, options.compute.value_or(model.experts->dtype())) {
    config = model.config;
    compute = options.compute.value_or(model.experts->dtype());
    if (options.rank_invariant && options.combine_wire == DType::kF8E4M3) {
      fail(ErrorCode::kUnsupported,
           "rank_invariant with a wire of fp8 runs on the backend cpu only");
    }
    each_group_ = options.rank_invariant && options.combine_wire != DType::kF32;
    execution_.backend = Backend::kCuda;
    execution_.batch_invariant = options.batch_invariant;
    experts_.emplace(model, options_, router_, compute, execution_,
                     communicator == nullptr ? 0 : communicator->rank(), num_ranks_);
    if (model.shared) {
      shared_.emplace(
          load_device_experts(*model.shared, config.shared, 0, 1, compute, options_, execution_),
          model.shared_gate);
    }
    if (options.max_tokens > 0) reserve(options.max_tokens);
    if (num_ranks_ == 1) return;
    // Growing would wait for the device, on which the exchange of another rank may wait for this.
    (void)host_tokens_.matrix(DType::kF32, options.max_tokens, config.experts.hidden);
    (void)host_out_.matrix(DType::kF32, options.max_tokens, config.experts.hidden);
    staging_.emplace(staging_bytes());
    rehearse();
    exchange_.emplace(*communicator, config, options, compute, each_group_);
    by_lists_ = exchange_->makes_lists() && experts_->offer_lists(execution_);
    if (!by_lists_ && exchange_->place_of_partials().data == nullptr) {
      (void)sums_.matrix(sums_type(), rows_of_sums(options.max_tokens), config.experts.hidden);
    }
    communicator->barrier("all memory is taken");
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
    stages_apart_ = args.recorder != nullptr;
    reported_ = false;
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
    if (!reported_) report_findings(stream);
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
      check();
      if (staging_) staging_->finish();
    }
  }

  void check() override {
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    raise_findings();
    rows_used = findings_.told().rows_used;
    rows_executed = findings_.told().rows_executed;
    if (exchange_) traffic = exchange_->traffic(findings_.told().rows_between_ranks);
  }

 private:
  [[nodiscard]] std::int32_t groups_per_row() const {
    return each_group_ ? experts_->subtree().num_groups : 1;
  }

  [[nodiscard]] std::int64_t rows_of_sums(std::int64_t num_tokens) const {
    return experts_->most_received(num_tokens) * groups_per_row();
  }

  /// Of what the experts' rank sums up: an exchange itself quantises to fp8.
  [[nodiscard]] DType sums_type() const {
    const bool travels = num_ranks_ > 1 || each_group_;
    return travels && options_.combine_wire != DType::kF8E4M3 ? options_.combine_wire : DType::kF32;
  }

  /// All memory that calls of so many tokens need.
  void reserve(std::int64_t num_tokens) {
    if (num_tokens <= reserved_tokens_) return;
    const std::int64_t hidden = config.experts.hidden;
    const std::int64_t experts = config.router.num_experts;
    const std::int64_t top_k = config.router.top_k();
    const std::int64_t received = experts_->most_received(num_tokens);
    stage_workspace_.reserve(stage_workspace_bytes(received, top_k, experts, hidden));
    router_.reserve(num_tokens);
    (void)converted_.matrix(compute, num_tokens, hidden);
    if (num_ranks_ == 1 && (shared_ || each_group_)) {
      (void)sums_.matrix(sums_type(), rows_of_sums(num_tokens), hidden);
    }
    if (crosses()) (void)crossed_.matrix(compute, received, hidden);
    experts_->reserve(num_tokens);
    if (shared_) shared_->reserve(num_tokens);
    execution_.workspace = stage_workspace_.data();
    execution_.workspace_bytes = stage_workspace_.bytes();
    execution_.status = findings_.counted();
    reserved_tokens_ = num_tokens;
  }

  /// Of tokens, output, given routing and record of one call.
  [[nodiscard]] std::size_t staging_bytes() const {
    constexpr std::int64_t kPieces = 9 * 256;
    const std::int64_t picks = options_.max_tokens * config.router.top_k();
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
    if (crosses()) load_wire_kernels(compute, *options_.dispatch_wire);
    DeviceBuffer sums;  // gone before the window is made
    experts_->rehearse(sums.matrix(sums_type(), rows_of_sums(options_.max_tokens), hidden),
                       each_group_, execution_);
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

  void run_alone(ConstRawMatrix tokens, Matrix<const float> shared, RawMatrix out) {
    const Routing& routing = router_.routing();
    const RowAssignments work{.expert = routing.expert,
                              .weight = routing.weight,
                              .kept = router_.kept(),
                              .total_experts = config.router.num_experts};
    const bool direct = shared.data == nullptr && !each_group_;
    const RawMatrix sums =
        direct ? out : sums_.matrix(sums_type(), rows_of_sums(tokens.rows), tokens.cols);
    const ReducedRows reduced{.sums = sums, .each_group = each_group_};
    const ConstRawMatrix x = crossed(tokens);
    reported_ = experts_->plan_and_reduce(work, tokens.rows, x, reduced,
                                          findings_.place_of_report(), stages_apart_, execution_);
    if (!reported_) {
      experts_->make_plan(work, tokens.rows, execution_);
      experts_->reduce(x, reduced, execution_);
    }
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
  /// where they have arrived; what they make of a row is one row of sums, at the same place, in the
  /// window where the tokens' ranks read it. In low latency the dispatch makes the experts' lists,
  /// and what they make of a row is summed while it is sent home: no plan, no combine between.
  void run_across_ranks(ConstRawMatrix tokens, Matrix<const float> shared, RawMatrix out) {
    const DeviceExpertLists lists = by_lists_ ? experts_->lists() : DeviceExpertLists{};
    const DeviceReceived received =
        exchange_->dispatch(tokens, router_.routing(), router_.kept(), lists, execution_);
    rows_between_ranks_ = received.counts;
    if (by_lists_) {
      const ConstRawMatrix rows = experts_->rows_by_lists(decoded(received), execution_);
      exchange_->combine_rows(rows, lists, shared, out, execution_);
      return;
    }
    const RawMatrix read_there = exchange_->place_of_partials();
    const RawMatrix sums =
        read_there.data != nullptr
            ? read_there
            : sums_.matrix(sums_type(), received.x.rows * groups_per_row(), tokens.cols);
    if (experts_->num_local() > 0) {
      experts_->make_plan({.expert = received.expert, .weight = received.weight}, tokens.rows,
                          execution_);
      experts_->reduce(decoded(received), {.sums = sums, .each_group = each_group_}, execution_);
    }
    exchange_->combine(sums, shared, out, execution_);
  }

  /// Tokens reach the experts in another type than the experts compute with.
  [[nodiscard]] bool crosses() const { return options_.dispatch_wire.value_or(compute) != compute; }

  /// What the dispatch leaves of the tokens where there is one.
  ConstRawMatrix crossed(ConstRawMatrix tokens) {
    if (!crosses()) return tokens;
    const RawMatrix out = crossed_.matrix(compute, tokens.rows, tokens.cols);
    const ScopedStage stage(execution_, "dequantize",
                            {.bytes = 2 * static_cast<double>(tokens.bytes())});
    cross_wire(tokens, *options_.dispatch_wire, out, stream_);
    return out;
  }

  /// Rows that have come, in the type that the experts compute with: there is no fp8 product yet.
  ConstRawMatrix decoded(const DeviceReceived& received) {
    if (!crosses()) return received.x;
    const RawMatrix out = crossed_.matrix(compute, received.x.rows, received.x.cols);
    const ScopedStage stage(execution_, "dequantize",
                            {.bytes = static_cast<double>(received.x.bytes() + out.bytes())});
    decode_rows({.x = received.x, .scale = received.scale, .expert = received.expert}, out,
                stream_);
    return out;
  }

  void report_findings(cudaStream_t stream) {
    const PlanView& view = experts_->plan();
    const std::int32_t* const end = view.expert_begin.data + view.num_experts;
    report({.status = execution_.status,
            // A dispatch's lists are compact: all rows of the experts are used.
            .rows_used = by_lists_ ? end : view.token_begin.data + view.num_tokens(),
            .rows_executed = end,
            .rows_between_ranks = rows_between_ranks_,
            .num_pairs = exchange_ ? num_ranks_ * num_ranks_ : 0},
           &findings_.told(), stream);
  }

  /// Throws what an earlier call has left, once.
  void raise_findings() {
    if (exchange_) exchange_->check();
    const std::optional<DeviceStatus> found = findings_.take(stream_);
    if (!found) return;
    require(found->nan_logit == DeviceStatus::kNone, "the logit of token {} for expert {} is NaN",
            found->nan_logit >> 32, found->nan_logit & 0xffffffffU);
    require(found->bad_ids == 0, "{} expert ids are not in -1 to {}", found->bad_ids,
            config.router.num_experts - 1);
    require(found->lost_rows == 0, "{} rows are more than the padded layout has room for",
            found->lost_rows);
  }

  LayerOptions options_;
  int num_ranks_;
  CudaRouter router_;
  bool each_group_ = false;
  bool stages_apart_ = false;  ///< The call wants the time of each stage.
  bool reported_ = false;      ///< The call's experts report its findings.
  bool by_lists_ = false;      ///< The exchange makes the experts' lists, and adds up their rows.
  Execution execution_;
  StageRanges ranges_;
  cudaStream_t stream_ = nullptr;
  std::optional<CudaExperts> experts_;
  std::optional<CudaSharedExperts> shared_;
  CallFindings findings_;
  const std::int64_t* rows_between_ranks_ = nullptr;  ///< On the device.
  std::int64_t reserved_tokens_ = -1;

  DeviceBuffer stage_workspace_, host_tokens_, host_out_;
  DeviceBuffer converted_, crossed_, sums_;
  std::optional<HostStaging> staging_;    ///< Where there is an exchange.
  std::optional<CudaExchange> exchange_;  ///< Ends first: all ranks' kernels have left then.
};

}  // namespace

std::unique_ptr<LayerRunner> make_cuda_layer(const LayerModel& model, const LayerOptions& options,
                                             Communicator* communicator) {
  return std::make_unique<CudaLayer>(model, options, communicator);
}

}  // namespace switchyard
