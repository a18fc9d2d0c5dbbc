// The layer on a CPU: route, plan, exchange, experts, combine, shared experts, with buffers that
// are made once and only grow. What each stage computes is said in its own header; here is the
// order.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/check.hpp"
#include "core/half.hpp"
#include "layer/layer_runner.hpp"
#include "switchyard/dispatch.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

/// Bytes that are kept from call to call and handed out as matrices.
class Buffer {
 public:
  RawMatrix matrix(DType dtype, std::int64_t rows, std::int64_t cols) {
    const auto bytes = static_cast<std::size_t>(rows * cols * size_of(dtype));
    if (bytes > bytes_.size()) bytes_.resize(bytes);
    return {bytes_.data(), dtype, rows, cols};
  }

 private:
  std::vector<std::byte> bytes_;
};

template <typename T>
Matrix<T> matrix(std::vector<T>& storage, std::int64_t rows, std::int64_t cols) {
  if (storage.size() < static_cast<std::size_t>(rows * cols)) {
    storage.resize(static_cast<std::size_t>(rows * cols));
  }
  return {storage.data(), {rows, cols}};
}

template <typename T>
Vector<T> vector(std::vector<T>& storage, std::int64_t size) {
  const Matrix<T> whole = matrix(storage, size, 1);
  return {whole.data, {size}};
}

double bytes_of(ConstRawMatrix m) { return static_cast<double>(m.bytes()); }

/// What the experts of one plan work on.
struct Assignments {
  ConstRawMatrix x{};                   ///< [N, H] compute type.
  Matrix<const std::int32_t> expert{};  ///< [N, K].
  Matrix<const float> weight{};         ///< [N, K].
  Matrix<const std::uint8_t> kept{};    ///< [N, K], or empty.
};

class CpuLayer final : public LayerRunner {
 public:
  CpuLayer(const LayerModel& model, const LayerOptions& options, Communicator* communicator)
      : model_(model),
        options_(options),
        communicator_(communicator),
        pool_(options.num_threads),
        num_ranks_(communicator == nullptr ? 1 : communicator->size()) {
    config = model.config;
    compute = options.compute.value_or(model.experts->dtype());
    execution_.pool = options.num_threads > 1 ? &pool_ : nullptr;
    execution_.batch_invariant = options.batch_invariant;
    const int rank = communicator == nullptr ? 0 : communicator->rank();
    const std::int32_t num_experts = config.experts.num_experts;
    const ReductionOrder whole{.num_experts = num_experts, .groups = config.reduction_groups};
    subtree_ = subtree_of_rank(whole, rank, num_ranks_);
    // With an f32 wire rounding a group's partial changes nothing: the sums travel as one row.
    each_group_ = options.rank_invariant && options.wire != DType::kF32;
    first_expert_ = border(rank);
    experts_ =
        load(*model.experts, config.experts, first_expert_, border(rank + 1) - first_expert_);
    if (model.shared) shared_ = load(*model.shared, config.shared, 0, 1);
    if (num_ranks_ > 1) make_exchange();
    // The sources are read; keeping them would keep the checkpoint mapped.
    model_.experts.reset();
    model_.shared.reset();
  }

  void forward(const ForwardArgs& args) override {
    execution_.recorder = args.recorder;
    const ConstRawMatrix tokens = to_compute(args.tokens);
    Assignments work = route_tokens(args, tokens);
    limit(work, args.record);
    if (args.record != nullptr) fill(*args.record, work);
    const Matrix<const float> shared = run_shared(tokens);
    if (num_ranks_ == 1) {
      run_alone(work, shared, args.out);
    } else {
      run_across_ranks(work, shared, args.out);
    }
  }

 private:
  [[nodiscard]] std::int32_t border(int rank) const {
    return static_cast<std::int32_t>(std::int64_t{rank} * config.experts.num_experts / num_ranks_);
  }

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

  void make_exchange() {
    exchange_ = std::make_unique<ExpertParallel>(
        *communicator_, ExpertParallelConfig{.num_experts = config.experts.num_experts,
                                             .top_k = config.router.top_k,
                                             .hidden = config.experts.hidden,
                                             .max_tokens = options_.max_tokens,
                                             .dtype = compute,
                                             .dispatch_wire = std::nullopt,
                                             .combine_wire = options_.wire,
                                             .reduction_groups = config.reduction_groups,
                                             .rank_invariant = each_group_});
  }

  ConstRawMatrix to_compute(ConstRawMatrix tokens) {
    if (tokens.dtype == compute) return tokens;
    const RawMatrix converted = converted_.matrix(compute, tokens.rows, tokens.cols);
    const ScopedStage stage(execution_, "pack", {.bytes = bytes_of(tokens) + bytes_of(converted)});
    parallel_for(execution_.pool, tokens.rows, [&](std::int64_t t, int) {
      for (std::int64_t h = 0; h < tokens.cols; ++h) {
        store_float(converted.row(t), compute, h, load_float(tokens.row(t), tokens.dtype, h));
      }
    });
    return converted;
  }

  Assignments route_tokens(const ForwardArgs& args, ConstRawMatrix tokens) {
    Assignments work{.x = tokens};
    top_score_ = {};
    if (args.expert.data != nullptr) {
      work.expert = args.expert;
      work.weight = args.weight;
      return work;
    }
    const std::int64_t num_tokens = tokens.rows;
    const std::int64_t num_experts = config.router.num_experts;
    const std::int64_t top_k = config.router.top_k;
    const auto t = static_cast<double>(num_tokens);
    const auto e = static_cast<double>(num_experts);
    const Matrix<float> logits = matrix(logits_, num_tokens, num_experts);
    const ConstRawMatrix gate{reinterpret_cast<const std::byte*>(model_.gate.data()), DType::kF32,
                              num_experts, tokens.cols};
    {
      const double flops = 2 * t * e * static_cast<double>(tokens.cols);
      const ScopedStage stage(execution_, "router_gemm",
                              {.bytes = bytes_of(tokens) + bytes_of(gate) + 4 * t * e,
                               .flops = flops,
                               .flops_executed = flops});
      router_gemm({.tokens = tokens,
                   .gate = gate,
                   .bias = {model_.router_bias.data(), {std::ssize(model_.router_bias)}},
                   .logits = logits,
                   .execution = execution_});
    }
    const Routing routing{.expert = matrix(expert_, num_tokens, top_k),
                          .weight = matrix(weight_, num_tokens, top_k),
                          .top_score = vector(score_, num_tokens)};
    const ScopedStage stage(execution_, "select",
                            {.bytes = 4 * t * e + 8 * t * static_cast<double>(top_k)});
    switchyard::route(
        {.logits = logits,
         .selection_bias = {model_.selection_bias.data(), {std::ssize(model_.selection_bias)}},
         .config = config.router,
         .routing = routing,
         .execution = execution_});
    work.expert = routing.expert;
    work.weight = routing.weight;
    top_score_ = routing.top_score;
    return work;
  }

  /// Decide what is kept. Without a limit this only counts, for those who ask.
  void limit(Assignments& work, const RoutingRecord* record) {
    if (!options_.capacity_factor && record == nullptr) return;
    const std::int64_t num_tokens = work.expert.shape[0];
    const std::int64_t top_k = work.expert.shape[1];
    const std::int32_t num_experts = config.router.num_experts;
    capacity_ = options_.capacity_factor
                    ? capacity_of(*options_.capacity_factor, num_tokens, top_k, num_experts)
                    : 0;
    const Matrix<std::uint8_t> kept = matrix(kept_, num_tokens, top_k);
    const ScopedStage stage(execution_, "plan",
                            {.bytes = 9 * static_cast<double>(num_tokens * top_k)});
    apply_capacity({.expert = work.expert,
                    .weight = work.weight,
                    .top_score = top_score_,
                    .num_experts = num_experts,
                    .capacity = capacity_,
                    .policy = options_.drop_policy,
                    .kept = kept,
                    .counts = vector(counts_, num_experts),
                    .counts_kept = vector(counts_kept_, num_experts),
                    .execution = execution_});
    work.kept = kept;
  }

  void fill(RoutingRecord& record, const Assignments& work) const {
    const auto picks = static_cast<std::ptrdiff_t>(work.expert.size());
    record.expert.assign(work.expert.data, work.expert.data + picks);
    record.weight.assign(work.weight.data, work.weight.data + picks);
    record.kept.assign(work.kept.data, work.kept.data + picks);
    record.counts.assign(counts_.begin(), counts_.begin() + config.router.num_experts);
    record.counts_kept.assign(counts_kept_.begin(),
                              counts_kept_.begin() + config.router.num_experts);
  }

  /// Rows that each expert of the padded layout has: its capacity over all source ranks, or,
  /// without a limit, as many as the fullest expert needs.
  [[nodiscard]] std::int64_t padded_rows(const Assignments& work) const {
    if (options_.layout.kind != LayoutKind::kPadded) return 0;
    if (options_.capacity_factor) {
      if (num_ranks_ == 1) return capacity_;
      return num_ranks_ * capacity_of(*options_.capacity_factor, options_.max_tokens,
                                      config.router.top_k, config.router.num_experts);
    }
    std::vector<std::int64_t> rows(static_cast<std::size_t>(experts_->num_local()) + 1);
    for (std::int64_t i = 0; i < work.expert.size(); ++i) {
      const std::int32_t local = work.expert.data[i] - first_expert_;
      if (local >= 0 && local < experts_->num_local()) ++rows[static_cast<std::size_t>(local)];
    }
    return *std::max_element(rows.begin(), rows.end());
  }

  PlanView make_plan(const Assignments& work) {
    const std::int64_t num_rows = work.expert.shape[0];
    const std::int64_t top_k = work.expert.shape[1];
    const std::int64_t padded = padded_rows(work);
    const std::int64_t rows =
        max_rows(options_.layout, num_rows, top_k, experts_->num_local(), padded);
    ScopedStage stage(execution_, "plan", {});
    const PlanView view = plan_.reserve(num_rows, top_k, experts_->num_local(), rows);
    switchyard::plan({.expert = work.expert,
                      .weight = work.weight,
                      .kept = work.kept,
                      .first_expert = first_expert_,
                      .layout = options_.layout,
                      .padded_rows = padded,
                      .plan = view,
                      .execution = execution_});
    rows_used = std::accumulate(view.expert_rows.data, view.expert_rows.data + view.num_experts,
                                std::int64_t{0});
    rows_executed = view.expert_begin[view.num_experts];
    stage.set_work(
        {.bytes = 9 * static_cast<double>(num_rows * top_k) + 12 * static_cast<double>(rows_used)});
    return view;
  }

  /// Weighted sums of the experts' outputs for each row of x, into `reduced`.
  void run_experts(const ExpertWeights& weights, const PlanView& view, Layout layout,
                   ConstRawMatrix x, const ReducedRows& reduced, const Execution& execution) {
    ExpertsArgs args{.x = x,
                     .plan = view,
                     .layout = layout,
                     .weights = &weights,
                     .reduced = reduced,
                     .execution = execution};
    const std::int64_t rows = view.expert_begin[view.num_experts];
    if (layout.kind != LayoutKind::kCompact) {
      const RawMatrix packed = packed_.matrix(x.dtype, rows, x.cols);
      const ScopedStage stage(execution, "pack", {.bytes = 2 * bytes_of(packed)});
      pack({.x = x, .plan = view, .rows = packed, .execution = execution});
      args.x = packed;
      args.x_is_packed = true;
    } else if (experts_supported(args)) {
      experts(args);
      return;
    }
    const RawMatrix out = rows_.matrix(DType::kF32, rows, x.cols);
    args.reduced = {};
    args.rows = out;
    experts(args);
    const ScopedStage stage(execution, "combine",
                            {.bytes = bytes_of(out) + bytes_of(reduced.sums),
                             .flops = 2 * static_cast<double>(rows_used * x.cols)});
    combine({.rows = out,
             .plan = view,
             .first_expert = weights.first_expert(),
             .reduced = reduced,
             .execution = execution});
  }

  void run_alone(const Assignments& work, Matrix<const float> shared, RawMatrix out) {
    const PlanView view = make_plan(work);
    const std::int64_t num_tokens = work.x.rows;
    const std::int64_t hidden = work.x.cols;
    if (shared.data == nullptr && !each_group_) {
      run_experts(*experts_, view, options_.layout, work.x, {.sums = out, .subtree = subtree_},
                  execution_);
      return;
    }
    const std::int32_t groups = each_group_ ? subtree_.num_groups : 1;
    const RawMatrix sums =
        sums_.matrix(each_group_ ? options_.wire : DType::kF32, num_tokens * groups, hidden);
    run_experts(*experts_, view, options_.layout, work.x,
                {.sums = sums, .subtree = subtree_, .each_group = each_group_}, execution_);
    const ScopedStage stage(execution_, "combine", {.bytes = bytes_of(sums) + bytes_of(out)});
    finish({.partials = sums,
            .groups_per_row = groups,
            .shared = shared,
            .out = out,
            .execution = execution_});
  }

  void run_across_ranks(const Assignments& work, Matrix<const float> shared, RawMatrix out) {
    Received received;
    {
      ScopedStage stage(execution_, "exchange", {});
      received = exchange_->dispatch({.x = work.x,
                                      .expert = work.expert,
                                      .weight = work.weight,
                                      .kept = work.kept,
                                      .execution = execution_});
      stage.set_work({.bytes = bytes_of(work.x) + bytes_of(received.x)});
    }
    const Assignments local{.x = received.x, .expert = received.expert, .weight = received.weight};
    const PlanView view = make_plan(local);
    const std::int32_t groups = each_group_ ? subtree_.num_groups : 1;
    const RawMatrix sums = sums_.matrix(options_.wire, received.x.rows * groups, received.x.cols);
    run_experts(*experts_, view, options_.layout, received.x,
                {.sums = sums, .subtree = subtree_, .each_group = each_group_}, execution_);
    const ScopedStage stage(execution_, "exchange", {.bytes = bytes_of(sums) + bytes_of(out)});
    exchange_->combine({.partials = sums, .shared = shared, .out = out, .execution = execution_});
    traffic = exchange_->traffic();
  }

  /// [T, H] of the shared experts, or empty. They are one dense expert of all tokens.
  Matrix<const float> run_shared(ConstRawMatrix tokens) {
    if (!shared_) return {};
    const std::int64_t num_tokens = tokens.rows;
    const auto matrices = config.shared.gated ? 6.0 : 4.0;
    const double flops = matrices * static_cast<double>(num_tokens * tokens.cols) *
                         static_cast<double>(config.shared.inner);
    const ScopedStage stage(execution_, "shared",
                            {.bytes = bytes_of(tokens) + shared_->bytes_per_expert(),
                             .flops = flops,
                             .flops_executed = flops});
    Execution quiet = execution_;
    quiet.recorder = nullptr;
    const Matrix<std::int32_t> expert = matrix(shared_expert_, num_tokens, 1);
    std::fill_n(expert.data, num_tokens, 0);
    const Matrix<float> weight = matrix(shared_weight_, num_tokens, 1);
    parallel_for(quiet.pool, num_tokens,
                 [&](std::int64_t t, int) { weight.data[t] = shared_weight(tokens.row(t)); });
    const PlanView view = shared_plan_.reserve(num_tokens, 1, 1, num_tokens);
    switchyard::plan(
        {.expert = expert, .weight = weight, .layout = {}, .plan = view, .execution = quiet});
    const RawMatrix sums = shared_sums_.matrix(DType::kF32, num_tokens, tokens.cols);
    const Subtree one{.order = {.num_experts = 1, .groups = 1}, .num_groups = 1};
    run_experts(*shared_, view, {}, tokens, {.sums = sums, .subtree = one}, quiet);
    return {reinterpret_cast<const float*>(sums.data), {num_tokens, tokens.cols}};
  }

  /// 1, or sigmoid(x . shared_gate) as in Qwen2-MoE; fp32, ascending h.
  [[nodiscard]] float shared_weight(const std::byte* token) const {
    if (!config.shared_gated) return 1.0F;
    float dot = 0.0F;
    for (std::size_t h = 0; h < model_.shared_gate.size(); ++h) {
      dot = std::fma(load_float(token, compute, static_cast<std::int64_t>(h)),
                     model_.shared_gate[h], dot);
    }
    return 1.0F / (1.0F + std::exp(-dot));
  }

  LayerModel model_;
  LayerOptions options_;
  Communicator* communicator_;
  ThreadPool pool_;
  int num_ranks_;
  Execution execution_;
  Subtree subtree_;
  bool each_group_ = false;
  std::int32_t first_expert_ = 0;
  std::unique_ptr<ExpertWeights> experts_;
  std::unique_ptr<ExpertWeights> shared_;
  std::unique_ptr<ExpertParallel> exchange_;

  // Kept from call to call.
  Plan plan_;
  Plan shared_plan_;
  Buffer converted_, packed_, rows_, sums_, shared_sums_;
  std::vector<float> logits_, weight_, score_, shared_weight_;
  std::vector<std::int32_t> expert_, shared_expert_;
  std::vector<std::uint8_t> kept_;
  std::vector<std::int64_t> counts_, counts_kept_;
  Vector<const float> top_score_;
  std::int64_t capacity_ = 0;
};

}  // namespace

std::unique_ptr<LayerRunner> make_cpu_layer(const LayerModel& model, const LayerOptions& options,
                                            Communicator* communicator) {
  return std::make_unique<CpuLayer>(model, options, communicator);
}

}  // namespace switchyard
