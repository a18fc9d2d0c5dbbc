// Drops of uniform routings against their closed form.
#include "bench/sweep/capacity_case.hpp"

#include <fmt/core.h>

#include <cmath>

#include "bench/measure/run_clock.hpp"
#include "bench/measure/stage_memory.hpp"
#include "bench/sweep/uniform_drops.hpp"
#include "core/check.hpp"
#include "switchyard/device.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {
namespace {

constexpr double kMostDeviations = 3;

/// Routings drawn on the host, one after the other, and what is kept of each on the backend.
class CapacityRuns {
 public:
  CapacityRuns(const LayerCase& c, std::int64_t capacity)
      : c_(c), pool_(c.num_threads), memory_(c.options.backend), host_(Backend::kCpu) {
    const std::int64_t top_k = c.config.router.top_k();
    const std::int32_t num_experts = c.config.router.num_experts;
    drawn_ = {.expert = host_.make_matrix<std::int32_t>(c.num_tokens, top_k),
              .weight = host_.make_matrix<float>(c.num_tokens, top_k)};
    const bool on_host = c.options.backend == Backend::kCpu;
    const Matrix<std::int32_t> expert =
        on_host ? drawn_.expert : memory_.make_matrix<std::int32_t>(c.num_tokens, top_k);
    const Matrix<float> weight =
        on_host ? drawn_.weight : memory_.make_matrix<float>(c.num_tokens, top_k);
    expert_ = expert;
    args_ = {.assignments = DenseAssignments{.expert = {expert.data, expert.shape},
                                             .weight = {weight.data, weight.shape}},
             .num_experts = num_experts,
             .capacity = capacity,
             .policy = c.options.drop_policy,
             .kept = flat(memory_.make_matrix<std::uint8_t>(c.num_tokens, top_k)),
             .counts = flat(memory_.make_matrix<std::int64_t>(num_experts, 1)),
             .counts_kept = flat(memory_.make_matrix<std::int64_t>(num_experts, 1)),
             .execution = {.backend = c.options.backend, .pool = &pool_}};
#ifdef SWITCHYARD_WITH_CUDA
    if (!on_host) {
      args_.execution.workspace_bytes =
          stage_workspace_bytes(c.num_tokens, top_k, num_experts, c.config.experts.hidden);
      args_.execution.workspace = memory_.make(args_.execution.workspace_bytes);
    }
#endif
  }

  void draw(int number) {
    route({.config = c_.config.router,
           .routing = drawn_,
           .request = {.seed = c_.seed, .step = static_cast<std::uint64_t>(number)},
           .execution = {.pool = &pool_}});
    memory_.put(expert_.data, drawn_.expert.data,
                drawn_.expert.size() * std::int64_t{sizeof(std::int32_t)});
  }

  void keep(StageRecorder* recorder, void* stream) {
    args_.execution.recorder = recorder;
    args_.execution.stream = stream;
    const ScopedStage stage(args_.execution, "plan",
                            {.bytes = 9 * static_cast<double>(args_.kept.size())});
    apply_capacity(args_);
  }

  /// Of the last routing.
  [[nodiscard]] Load load() const {
    return load_of(fetched(args_.counts), fetched(args_.counts_kept));
  }

 private:
  [[nodiscard]] std::vector<std::int64_t> fetched(Vector<std::int64_t> counts) const {
    std::vector<std::int64_t> out(static_cast<std::size_t>(counts.size()));
    memory_.fetch(out.data(), reinterpret_cast<const std::byte*>(counts.data),
                  counts.size() * std::int64_t{sizeof(std::int64_t)});
    return out;
  }

  const LayerCase& c_;
  ThreadPool pool_;
  StageMemory memory_, host_;
  Routing drawn_;
  Matrix<std::int32_t> expert_;
  CapacityArgs args_;
};

}  // namespace

CaseResult run_capacity_case(const LayerCase& c, const Limits& limits) {
  require(c.options.capacity_factor && c.num_tokens > 0 && c.num_ranks == 1,
          "a case of capacity wants a factor, tokens, and one rank");
  const RouterConfig& router = c.config.router;
  const std::int64_t capacity =
      capacity_of(*c.options.capacity_factor, c.num_tokens, router.top_k(), router.num_experts);
  const int draws = c.count.budget.count() > 0 ? kCapacityDraws : c.count.iterations;
  CapacityRuns runs(c, capacity);
  StageTimes times;
  const auto clock = make_run_clock(c.options.backend, times);
  CaseResult result = start_result(c, limits);
  double dropped = 0;
  for (int draw = 0; draw < draws; ++draw) {
    runs.draw(draw);
    times.start_run();
    clock->run(&runs, [&](StageRecorder* recorder, void* stream) { runs.keep(recorder, stream); });
    result.load = runs.load();
    dropped += result.load.dropped / draws;
  }
  result.load.dropped = dropped;
  result.stages = judge(times.samples(), limits, c.dtype);
  const UniformDrops drops =
      uniform_drops(c.num_tokens, router.num_experts, router.top_k(), capacity);
  const double error = drops.deviation / std::sqrt(draws);
  // Sums of shares are off by their own rounding; that of what cannot vary is all there is.
  const double off = std::max(0.0, std::abs(dropped - drops.expected) - 1e-12);
  const double deviations = off == 0 ? 0 : off / std::max(error, 1e-300);
  result.holds = deviations <= kMostDeviations;
  result.verdict = fmt::format(
      "dropped {:.4f}% of uniform routings, closed form {:.4f}%, {:.1f} standard errors of {:.2g}% "
      "({} slots, {} draws)",
      100 * dropped, 100 * drops.expected, deviations, 100 * error, capacity, draws);
  result.more = {{"capacity",
                  {{"slots", capacity},
                   {"draws", draws},
                   {"dropped", dropped},
                   {"expected", drops.expected},
                   {"standard_error", error},
                   {"deviations", deviations}}}};
  return result;
}

}  // namespace switchyard::bench
