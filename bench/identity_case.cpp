// Experts that give back what they get: what is left are plan, pack, exchange and combine.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "bench/cases.hpp"
#include "bench/layer_run.hpp"
#include "bench/router_alone.hpp"
#include "bench/synthetic.hpp"
#include "comm/gather.hpp"
#include "core/half.hpp"
#include "switchyard/switchyard.hpp"

namespace switchyard::bench {
namespace {

using Clock = std::chrono::steady_clock;

/// The data of all ranks.
struct Problem {
  const LayerCase& c;
  LayerModel model;
  std::vector<std::byte> tokens;
  SyntheticRouting routing;
  std::vector<std::byte> out;
};

/// The flow of one rank without experts, buffers made once.
class IdentityRank {
 public:
  IdentityRank(Problem& problem, Communicator* communicator, int num_threads)
      : c_(problem.c),
        pool_(num_threads),
        num_ranks_(c_.num_ranks),
        rank_(communicator == nullptr ? 0 : communicator->rank()),
        begin_(first_token(c_.num_tokens, rank_, num_ranks_)),
        end_(first_token(c_.num_tokens, rank_ + 1, num_ranks_)) {
    execution_.pool = &pool_;
    execution_.recorder = &times;
    const std::int64_t hidden = c_.config.experts.hidden;
    const std::int64_t top_k = c_.config.router.top_k;
    const std::int64_t row_bytes = hidden * size_of(c_.dtype);
    x_ = {problem.tokens.data() + begin_ * row_bytes, c_.dtype, end_ - begin_, hidden};
    out_ = {problem.out.data() + begin_ * row_bytes, c_.dtype, end_ - begin_, hidden};
    expert_ = {problem.routing.expert.data() + begin_ * top_k, {end_ - begin_, top_k}};
    weight_ = {problem.routing.weight.data() + begin_ * top_k, {end_ - begin_, top_k}};
    router_ = std::make_unique<RouterAlone>(problem.model, x_, Backend::kCpu, num_threads);
    subtree_ = subtree_of_rank({.num_experts = c_.config.router.num_experts}, rank_, num_ranks_);
    if (communicator != nullptr) make_exchange(*communicator);
  }

  void run() {
    const auto start = Clock::now();
    router_->run(&times, nullptr);
    Received received{.x = x_, .expert = expert_, .weight = weight_};
    if (exchange_) {
      ScopedStage stage(execution_, "exchange", {});
      received = exchange_->dispatch(
          {.x = x_, .expert = expert_, .weight = weight_, .kept = {}, .execution = execution_});
      stage.set_work({.bytes = static_cast<double>(x_.bytes() + received.x.bytes())});
    }
    const PlanView view = make_plan(received);
    const RawMatrix sums = pack_and_combine(received.x, view);
    const char* last = exchange_ ? "exchange" : "combine";
    {
      const ScopedStage stage(execution_, last,
                              {.bytes = static_cast<double>(sums.bytes() + out_.bytes())});
      if (exchange_) {
        exchange_->combine({.partials = sums, .shared = {}, .out = out_, .execution = execution_});
      } else {
        finish({.partials = sums,
                .partial_row = {},
                .shared = {},
                .out = out_,
                .execution = execution_});
      }
    }
    const std::chrono::duration<double, std::micro> time = Clock::now() - start;
    times.add("layer", {}, time.count());
  }

  StageTimes times;

 private:
  void make_exchange(Communicator& communicator) {
    exchange_ = std::make_unique<ExpertParallel>(
        communicator, ExpertParallelConfig{.num_experts = c_.config.router.num_experts,
                                           .top_k = c_.config.router.top_k,
                                           .hidden = c_.config.experts.hidden,
                                           .max_tokens = std::max<std::int64_t>(
                                               1, (c_.num_tokens + num_ranks_ - 1) / num_ranks_),
                                           .dtype = c_.dtype,
                                           .dispatch_wire = std::nullopt,
                                           .combine_wire = c_.options.wire});
  }

  PlanView make_plan(const Received& received) {
    const RouterConfig& router = c_.config.router;
    const std::int32_t first = border(rank_);
    const std::int32_t local = border(rank_ + 1) - first;
    const std::int64_t assignments = received.expert.size();
    const std::int64_t padded =
        c_.options.layout.kind == LayoutKind::kPadded ? fullest(received) : 0;
    const std::int64_t rows =
        max_rows(c_.options.layout, received.x.rows, router.top_k, local, padded);
    const ScopedStage stage(execution_, "plan", {.bytes = 21 * static_cast<double>(assignments)});
    const PlanView view = plan_.reserve(received.x.rows, router.top_k, local, rows);
    plan({.expert = received.expert,
          .weight = received.weight,
          .kept = {},
          .first_expert = first,
          .layout = c_.options.layout,
          .padded_rows = padded,
          .plan = view,
          .execution = execution_});
    return view;
  }

  RawMatrix pack_and_combine(ConstRawMatrix x, const PlanView& view) {
    const std::int64_t rows = view.expert_begin[view.num_experts];
    packed_.resize(static_cast<std::size_t>(rows * x.row_bytes()));
    const RawMatrix packed{packed_.data(), x.dtype, rows, x.cols};
    {
      const ScopedStage stage(execution_, "pack",
                              {.bytes = 2 * static_cast<double>(packed.bytes())});
      pack({.x = x, .plan = view, .rows = packed, .execution = execution_});
    }
    sums_.resize(static_cast<std::size_t>(x.rows * x.cols));
    const RawMatrix sums{reinterpret_cast<std::byte*>(sums_.data()), DType::kF32, x.rows, x.cols};
    const double flops = 2 * static_cast<double>(view.token_begin[x.rows] * x.cols);
    const ScopedStage stage(execution_, "combine",
                            {.bytes = static_cast<double>(packed.bytes() + sums.bytes()),
                             .flops = flops,
                             .flops_executed = flops});
    combine({.rows = packed,
             .plan = view,
             .first_expert = border(rank_),
             .reduced = {.sums = sums, .subtree = subtree_},
             .execution = execution_});
    return sums;
  }

  [[nodiscard]] std::int32_t border(int rank) const {
    return static_cast<std::int32_t>(std::int64_t{rank} * c_.config.router.num_experts /
                                     num_ranks_);
  }

  /// Rows of the fullest expert here.
  [[nodiscard]] std::int64_t fullest(const Received& received) const {
    std::vector<std::int64_t> rows(static_cast<std::size_t>(c_.config.router.num_experts));
    for (std::int64_t i = 0; i < received.expert.size(); ++i) {
      const std::int32_t expert = received.expert.data[i];
      if (expert >= 0) ++rows[static_cast<std::size_t>(expert)];
    }
    return *std::max_element(rows.begin(), rows.end());
  }

  const LayerCase& c_;
  ThreadPool pool_;
  Execution execution_;
  int num_ranks_;
  int rank_;
  std::int64_t begin_;
  std::int64_t end_;
  ConstRawMatrix x_;
  RawMatrix out_;
  Matrix<const std::int32_t> expert_;
  Matrix<const float> weight_;
  Subtree subtree_;
  std::unique_ptr<RouterAlone> router_;
  std::unique_ptr<ExpertParallel> exchange_;
  Plan plan_;
  std::vector<std::byte> packed_;
  std::vector<float> sums_;
};

void run_rank(Problem& problem, Communicator* communicator, int threads, StageTimes& times) {
  RunCounter counter(problem.c.count);
  IdentityRank rank(problem, communicator, threads);
  for (int run = 0; run < counter.total(); ++run) {
    if (communicator != nullptr) communicator->barrier("start of a run");
    if (run == counter.warmup()) rank.times.forget();
    rank.times.start_run();
    const auto start = Clock::now();
    rank.run();
    if (run == 0 && counter.wants_time()) {
      const std::chrono::duration<double> time = Clock::now() - start;
      counter.set_time(communicator == nullptr ? time
                                               : std::chrono::duration<double>(
                                                     from_first(*communicator, time.count())));
    }
  }
  times = std::move(rank.times);
}

/// Largest difference to the input, relative to max(1, |x|).
double largest_error(const Problem& problem) {
  double largest = 0;
  const std::int64_t size = problem.c.num_tokens * problem.c.config.experts.hidden;
  for (std::int64_t i = 0; i < size; ++i) {
    const double x = load_float(problem.tokens.data(), problem.c.dtype, i);
    const double y = load_float(problem.out.data(), problem.c.dtype, i);
    largest = std::max(largest, std::abs(x - y) / std::max(1.0, std::abs(x)));
  }
  return largest;
}

}  // namespace

CaseResult run_identity_case(const LayerCase& c, const Machine&, const Limits& limits) {
  CaseResult result = start_result(c, limits);
  result.what.experts = "identity";
  const RouterConfig& router = c.config.router;
  const std::int64_t hidden = c.config.experts.hidden;
  LayerConfig config = c.config;
  config.shared = {};
  Problem problem{
      .c = c,
      .model = synthetic_layer(config, c.router_bias, c.selection_bias, c.dtype, c.seed),
      .tokens = synthetic_tokens(c.num_tokens, hidden, c.dtype, c.seed),
      .routing = synthetic_routing(c.num_tokens, router.num_experts, router.top_k, c.skew, c.seed),
      .out = {}};
  problem.out.resize(problem.tokens.size());
  std::vector<StageTimes> times(static_cast<std::size_t>(c.num_ranks));
  if (c.num_ranks == 1) {
    run_rank(problem, nullptr, c.num_threads, times[0]);
  } else {
    const int threads = std::max(1, c.num_threads / c.num_ranks);
    run_ranks(
        c.num_ranks,
        [&](Communicator& communicator) {
          run_rank(problem, &communicator, threads,
                   times[static_cast<std::size_t>(communicator.rank())]);
        },
        c.timeout);
  }
  std::vector<StageSamples> stages = merge_ranks(times);
  layer_last(stages);
  result.stages = judge(stages, limits, c.dtype);
  std::vector<std::int64_t> counts(static_cast<std::size_t>(router.num_experts));
  for (const std::int32_t expert : problem.routing.expert)
    ++counts[static_cast<std::size_t>(expert)];
  result.load = load_of(counts, counts);
  result.routing_share = 1;
  // Weights 1/K sum to 1 within rounding; 16-bit outputs are rounded once.
  const double bound = c.dtype == DType::kF32 ? 1e-5 : c.dtype == DType::kF16 ? 1e-3 : 4e-3;
  const double error = largest_error(problem);
  result.holds = error <= bound;
  result.verdict = fmt::format("combine(pack(x)) = x within {:.2g} of {:.0e}", error, bound);
  return result;
}

}  // namespace switchyard::bench
