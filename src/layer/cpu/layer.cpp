// The layer on a CPU: the stages in order, each said in its own header, with buffers that are made
// once and only grow.
#include <algorithm>
#include <numeric>

#include "comm/host/wire.hpp"
#include "comm/ranks/engine_words.hpp"
#include "core/row_ops.hpp"
#include "core/select.hpp"
#include "experts/implementations.hpp"
#include "layer/cpu/backward.hpp"
#include "layer/cpu/buffers.hpp"
#include "layer/cpu/expert_tokens.hpp"
#include "layer/cpu/router.hpp"
#include "layer/cpu/saved_memory.hpp"
#include "layer/cpu/shared_experts.hpp"
#include "layer/cpu/zero_computation.hpp"
#include "layer/exchange_config.hpp"
#include "layer/expert_runner.hpp"
#include "layer/layer_runner.hpp"
#include "layer/saved_losses.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

/// Ranks that are threads each take a part of the cores, which one team of all would not.
ThreadRuntime runtime_for(const Communicator* communicator) {
  const bool threads =
      communicator != nullptr && communicator->engine() == std::string_view(kThreadsEngine);
  return threads ? ThreadRuntime::kOwn : ThreadRuntime::kAuto;
}

double bytes_of(ConstRawMatrix m) { return static_cast<double>(m.bytes()); }

class CpuLayer final : public LayerRunner {
 public:
  CpuLayer(const LayerModel& model, const LayerOptions& options, Communicator* communicator)
      : options_(options),
        router_(model, options),
        zero_computation_(model),
        expert_source_(model.experts),
        shared_source_(model.shared),
        shared_gate_(model.shared_gate),
        communicator_(communicator),
        pool_(options.num_threads, runtime_for(communicator)),
        num_ranks_(communicator == nullptr ? 1 : communicator->size()) {
    config = model.config;
    compute = options.compute.value_or(model.experts->dtype());
    execution_.pool = pool = pool_.num_threads() > 1 ? &pool_ : nullptr;
    execution_.batch_invariant = options.batch_invariant;
    const int rank = communicator == nullptr ? 0 : communicator->rank();
    const std::int32_t num_experts = config.experts.num_experts;
    const ReductionOrder whole{.num_experts = num_experts, .groups = config.reduction_groups};
    subtree_ = subtree_of_rank(whole, rank, num_ranks_);
    // With an f32 wire rounding a group's partial changes nothing: the sums travel as one row.
    each_group_ = options.rank_invariant && options.combine_wire != DType::kF32;
    first_expert_ = first_expert_of(num_experts, num_ranks_, rank);
    num_local_ = first_expert_of(num_experts, num_ranks_, rank + 1) - first_expert_;
    experts_ = load_experts(load_args(false));
    if (shared_source_) shared_.emplace(load_experts(load_args(true)), shared_gate_);
    if (num_ranks_ > 1) make_exchange();
  }

  void forward(const ForwardArgs& args) override {
    execution_.recorder = args.recorder;
    (void)weights();  // a reload may have failed
    SavedForward::State* const saved = args.saved == nullptr ? nullptr : &args.saved->state();
    if (saved != nullptr) {
      HostSavedMemory::prepare(saved->memory);
      saved->begin(number_, reloads_);
    }
    const ConstRawMatrix tokens = to_compute(args.tokens, args.tokens_stay, saved);
    const Assignments chosen = router_.run(args, tokens, execution_);
    if (saved != nullptr) save_routing(args, chosen, *saved);
    Assignments work = zero_computation_.without(chosen, execution_);
    RawMatrix preactivation{};
    if (saved != nullptr && shared_ && saved->recompute == Recompute::kNone) {
      preactivation = saved->shared_preactivation = saved->room(
          SavedMemory::kSharedPreactivation, compute, tokens.rows, shared_->preactivation_cols());
    }
    Matrix<const float> shared =
        shared_ ? shared_->run(tokens, preactivation, execution_) : Matrix<const float>{};
    if (zero_computation_.any()) shared = zero_computation_.around(chosen, shared, execution_);
    if (config.weight_on_input) work = tokens_.weighted(work, execution_);
    if (num_ranks_ == 1) {
      run_alone(work, shared, args.out, saved);
    } else {
      run_across_ranks(work, shared, args.out, saved);
    }
    if (saved != nullptr) saved->use = SavedForward::State::Use::kReady;
  }

  void backward(const BackwardArgs& args) override {
    SavedForward::State& saved = args.saved->state();
    saved.require_of(number_, reloads_);
    const bool alone = num_ranks_ == 1;
    require(alone || saved.received.recoveries == communicator_->recoveries(),
            "the ranks have recovered since this saved forward");
    execution_.recorder = args.recorder;
    saved.use = SavedForward::State::Use::kUsed;
    if (!alone) make_gradient_exchange();
    const SavedForward::State::Received& received = saved.received;
    const Assignments sent = zero_computation_.without(routing_of(saved), execution_);
    Assignments work{.x = received.x, .expert = received.expert, .weight = received.weight};
    if (alone) {
      work = config.weight_on_input ? tokens_.weighted(sent, execution_) : sent;
      work.x = crossed(work.x);
    }
    const PlanView view = make_plan(work);
    backward_.run({.args = &args,
                   .saved = &saved,
                   .x = work.x,
                   .plan = view,
                   .expert = work.expert,
                   .sent = sent,
                   .weight_on_input = config.weight_on_input,
                   .experts = experts_.get(),
                   .router = &router_,
                   .zero_computation = zero_computation_.any() ? &zero_computation_ : nullptr,
                   .shared = shared_ ? &*shared_ : nullptr,
                   .subtree = subtree_,
                   .ranks = gradient_exchange_.get(),
                   .losses = &options_.losses,
                   .execution = execution_});
  }

  void use_iteration(std::int32_t iteration) override { router_.use_iteration(iteration); }
  void reload_experts() override {
    ++reloads_;
    // Until all are new the layer has none: a call behind a source that fails is an error.
    std::unique_ptr<ExpertWeights> weights = std::move(experts_);
    if (shared_) reload_experts_cpu(load_args(true), shared_->weights());
    if (weights == nullptr) {
      weights = load_experts(load_args(false));
    } else {
      reload_experts_cpu(load_args(false), *weights);
    }
    experts_ = std::move(weights);
  }

  [[nodiscard]] metrics::Routing stats() override { return router_.stats(num_ranks_); }

  [[nodiscard]] const ExpertWeights& weights() const override {
    require(experts_ != nullptr, "the experts could not be reloaded; the layer has none");
    return *experts_;
  }

 private:
  void save_routing(const ForwardArgs& args, const Assignments& work,
                    SavedForward::State& saved) const {
    saved.num_tokens = work.x.rows;
    saved.routed = args.expert.data == nullptr && config.router.has_logits();
    saved.draws_upon(args.request);
    if (saved.routed)
      saved.logits = keep<float>(saved, SavedMemory::kLogits, router_.logits(work.x.rows));
    if (saved.routed && config.router.gating_residual) {
      const Matrix<const float> before{args.request.previous_logits.data, saved.logits.shape};
      saved.previous_logits = keep(saved, SavedMemory::kPreviousLogits, before);
    }
    saved.expert = keep(saved, SavedMemory::kExpert, work.expert);
    saved.weight = keep(saved, SavedMemory::kWeight, work.weight);
    if (options_.capacity_factor) saved.kept = keep(saved, SavedMemory::kKept, work.kept);
    save_losses(config.router, options_.losses, execution_, saved);
  }

  /// What partial sums are rounded to before they travel; the exchange itself quantises to fp8.
  [[nodiscard]] DType sums_type() const {
    return options_.combine_wire == DType::kF8E4M3 ? DType::kF32 : options_.combine_wire;
  }

  [[nodiscard]] LoadExpertsArgs load_args(bool shared) const {
    return {.config = shared ? config.shared : config.experts,
            .source = (shared ? shared_source_ : expert_source_).get(),
            .dtype = compute,
            .first_expert = shared ? 0 : first_expert_,
            .num_local = shared ? 1 : num_local_,
            .format = options_.weights,
            .execution = execution_,
            .progress = options_.progress};
  }

  void make_exchange() {
    exchange_ = std::make_unique<ExpertParallel>(
        *communicator_, exchange_config(config, options_, compute, each_group_));
    exchange_name_ = fmt::format("cpu.{}", communicator_->engine());
  }

  /// Made by the first backward, so that who never learns pays nothing; and anew after a recovery,
  /// as one rank may have failed to make it where another has not.
  void make_gradient_exchange() {
    if (gradient_exchange_ != nullptr && gradient_exchange_->usable()) return;
    gradient_exchange_.reset();
    gradient_exchange_ = std::make_unique<GradientExchange>(
        *communicator_, exchange_config(config, options_, compute, false), compute,
        ReplicatedParts::most(config));
  }

  /// What is saved is a copy, so that the caller's tokens may change, but where they stay.
  ConstRawMatrix to_compute(ConstRawMatrix tokens, bool stay, SavedForward::State* saved) {
    if (tokens.dtype == compute && stay && saved != nullptr) saved->refer_to(tokens);
    if (tokens.dtype == compute && (stay || saved == nullptr)) return tokens;
    const RawMatrix converted =
        saved == nullptr ? converted_.matrix(compute, tokens.rows, tokens.cols)
                         : saved->room(SavedMemory::kTokens, compute, tokens.rows, tokens.cols);
    if (saved != nullptr) saved->tokens = converted;
    const ScopedStage stage(execution_, "pack", {.bytes = bytes_of(tokens) + bytes_of(converted)});
    parallel_for(execution_.pool, tokens.rows, [&](std::int64_t t, int) {
      row_ops::convert(tokens.dtype, tokens.row(t), compute, converted.row(t), tokens.cols);
    });
    return converted;
  }

  /// Rows that each expert of the padded layout has: its capacity over all source ranks, or,
  /// without a limit, as many as the fullest expert needs.
  [[nodiscard]] std::int64_t padded_rows(const Assignments& work) const {
    if (options_.layout.kind != LayoutKind::kPadded) return 0;
    if (options_.capacity_factor) {
      const std::int64_t most = num_ranks_ == 1 ? work.x.rows : options_.max_tokens;
      return num_ranks_ * capacity_for(config.router, *options_.capacity_factor, most).computing;
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
    switchyard::plan({.assignments = DenseAssignments{.expert = work.expert, .weight = work.weight},
                      .kept = flat(work.kept),
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

  void run_experts(const PlanView& view, ConstRawMatrix x, const ReducedRows& reduced,
                   RawMatrix preactivation = {}) {
    runner_.run({.x = x,
                 .plan = view,
                 .layout = options_.layout,
                 .weights = experts_.get(),
                 .reduced = reduced,
                 .preactivation = preactivation,
                 .execution = execution_},
                execution_);
  }

  /// What a dispatch leaves of the tokens where there is one.
  ConstRawMatrix crossed(ConstRawMatrix tokens) {
    return tokens_.crossed(tokens, options_.dispatch_wire.value_or(compute), execution_);
  }

  /// For the rows of the plan that was just made; empty where it is not kept.
  RawMatrix room_for_preactivation(SavedForward::State* saved) const {
    if (saved == nullptr || saved->recompute != Recompute::kNone) return {};
    const std::int64_t cols = (config.experts.gated ? 2 : 1) * config.experts.inner;
    saved->preactivation = saved->room(SavedMemory::kPreactivation, compute, rows_executed, cols);
    return saved->preactivation;
  }

  /// What came lies in the exchange's window, where the next call's rows will be.
  void save_received(const Received& from, SavedForward::State& saved) const {
    SavedForward::State::Received& kept = saved.received;
    kept.x = saved.room(SavedMemory::kReceived, compute, from.x.rows, from.x.cols);
    std::copy_n(from.x.data, from.x.bytes(), kept.x.data);
    kept.expert = keep(saved, SavedMemory::kReceivedExpert, from.expert);
    kept.weight = keep(saved, SavedMemory::kReceivedWeight, from.weight);
    const Matrix<const std::int64_t> sent{exchange_->traffic().rows.data(),
                                          {num_ranks_, num_ranks_}};
    kept.sent = keep(saved, SavedMemory::kSent, sent);
    kept.forward = forwards_;
    kept.recoveries = recoveries_;
  }

  void run_alone(Assignments work, Matrix<const float> shared, RawMatrix out,
                 SavedForward::State* saved) {
    work.x = crossed(work.x);
    const PlanView view = make_plan(work);
    const RawMatrix preactivation = room_for_preactivation(saved);
    const std::int64_t num_tokens = work.x.rows, hidden = work.x.cols;
    if (shared.data == nullptr && !each_group_) {
      run_experts(view, work.x, {.sums = out, .subtree = subtree_}, preactivation);
      return;
    }
    const std::int32_t groups = each_group_ ? subtree_.num_groups : 1;
    const RawMatrix sums =
        sums_.matrix(each_group_ ? sums_type() : DType::kF32, num_tokens * groups, hidden);
    run_experts(view, work.x, {.sums = sums, .subtree = subtree_, .each_group = each_group_},
                preactivation);
    const ScopedStage stage(execution_, "combine", {.bytes = bytes_of(sums) + bytes_of(out)});
    if (each_group_ && sums.dtype != options_.combine_wire) {
      // Across ranks the exchange would do this: the bits may not depend on R.
      parallel_for(execution_.pool, sums.rows, [&](std::int64_t row, int) {
        round_to_wire(options_.combine_wire, reinterpret_cast<float*>(sums.row(row)), hidden);
      });
    }
    finish({.partials = sums,
            .groups_per_row = groups,
            .shared = shared,
            .out = out,
            .execution = execution_});
  }

  void run_across_ranks(const Assignments& work, Matrix<const float> shared, RawMatrix out,
                        SavedForward::State* saved) {
    Received received;
    {
      ScopedStage stage(execution_, "exchange", {});
      tell_exchange(work.x);
      received = exchange_->dispatch({.x = work.x,
                                      .expert = work.expert,
                                      .weight = work.weight,
                                      .kept = work.kept,
                                      .execution = execution_});
      stage.set_work({.bytes = bytes_of(work.x) + bytes_of(received.x)});
    }
    count_forward();
    if (saved != nullptr) save_received(received, *saved);
    const Assignments local{.x = received.x, .expert = received.expert, .weight = received.weight};
    const PlanView view = make_plan(local);
    const std::int32_t groups = each_group_ ? subtree_.num_groups : 1;
    const RawMatrix sums = sums_.matrix(sums_type(), received.x.rows * groups, received.x.cols);
    run_experts(view, received.x, {.sums = sums, .subtree = subtree_, .each_group = each_group_},
                room_for_preactivation(saved));
    const ScopedStage stage(execution_, "exchange", {.bytes = bytes_of(sums) + bytes_of(out)});
    tell_exchange(sums);
    exchange_->combine({.partials = sums, .shared = shared, .out = out, .execution = execution_});
    traffic = exchange_->traffic();
  }

  /// All ranks count alike: a dispatch that fails on one is followed by a recovery.
  void count_forward() {
    if (recoveries_ != communicator_->recoveries()) {
      recoveries_ = communicator_->recoveries();
      forwards_ = 0;
    }
    ++forwards_;
  }

  void tell_exchange(ConstRawMatrix rows) {
    tell_choice(execution_, "exchange", exchange_name_.c_str(), [&] {
      return fmt::format("{} rows x {} {}", rows.rows, rows.cols, to_string(rows.dtype));
    });
  }

  LayerOptions options_;
  CpuRouter router_;
  CpuZeroComputation zero_computation_;
  std::shared_ptr<const ExpertSource> expert_source_, shared_source_;
  Parameter shared_gate_;
  Communicator* communicator_;
  ThreadPool pool_;
  int num_ranks_;
  Execution execution_;
  Subtree subtree_;
  bool each_group_ = false;
  std::int32_t first_expert_ = 0, num_local_ = 0;
  const std::uint64_t number_ = next_layer_number();
  std::int64_t reloads_ = 0;
  std::unique_ptr<ExpertWeights> experts_;
  std::optional<SharedExperts> shared_;
  std::unique_ptr<ExpertParallel> exchange_;
  std::unique_ptr<GradientExchange> gradient_exchange_;
  std::uint64_t forwards_ = 0;    ///< Over ranks, since the recovery
  std::uint64_t recoveries_ = 0;  ///< of this number.
  std::string exchange_name_{};   ///< By the engine between the ranks.

  // Kept from call to call.
  Plan plan_;
  ExpertRunner<RawBuffer> runner_;
  ExpertTokens tokens_;
  RawBuffer converted_, sums_;
  LayerBackward backward_;
};

}  // namespace

std::unique_ptr<LayerRunner> make_cpu_layer(const LayerModel& model, const LayerOptions& options,
                                            Communicator* communicator) {
  return std::make_unique<CpuLayer>(model, options, communicator);
}

}  // namespace switchyard
