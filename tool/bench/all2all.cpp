// `bench --suite all2all`: the tests and benchmarks of the published all-to-all, every variant in a
// row of its own, and the ranking by the geometric mean.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <span>

#include "bench/exchange/bars.hpp"
#include "bench/exchange/transport_run.hpp"
#include "bench/measure/wire_rate.hpp"
#include "bench/variants/transports.hpp"
#include "comm/ranks/launch.hpp"
#include "core/atomic_file.hpp"
#include "tool/bench/case_table.hpp"
#include "tool/bench/exchange.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"
#include "tool/progress.hpp"

namespace switchyard::tool {
namespace {

using bench::CaseResult;
using bench::ExchangeShape;
using bench::TransportCase;
using bench::TransportResult;
using Kind = ExchangeShape::Kind;

const bench::StageFigures& stage_of(const CaseResult& result, std::string_view name) {
  return *std::find_if(result.stages.begin(), result.stages.end(),
                       [&](const bench::StageFigures& f) { return f.stage == name; });
}

std::vector<std::string> chosen_variants(const Options& options) {
  const auto names = transport_names();
  for (const std::string& name : options.variants) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      throw UsageError("--variant: '{}' is unknown, want {}", name, fmt::join(names, ", "));
    }
  }
  if (!options.variants.empty()) return options.variants;
  // On a GPU those that only enqueue: with lists of the host the suite takes minutes.
  if (options.backend == "cuda") return {"flat", "bucketed", "native"};
  return {names.begin(), names.end()};
}

/// Logarithms of the benchmarks' times, to be averaged.
struct Ranking {
  double slowest_rank = 0, published = 0;
  int count = 0;
  void add(const CaseResult& result) {
    slowest_rank += std::log(stage_of(result, "round_trip").us.median);
    published += std::log(stage_of(result, "barrier_to_barrier").us.mean);
    ++count;
  }
};

class All2AllSuite {
 public:
  All2AllSuite(const Options& options, const World& world)
      : options_(options),
        world_(world),
        variants_(chosen_variants(options)),
        where_(exchange_backend(options)),
        peer_mpi_(mpi_peer_wanted(options, world)),
        machine_(bench::this_machine()),
        limits_(limits_of(world, where_.backend)) {}

  int run() {
    std::vector<TransportCase> cases;
    for (const ExchangeShape& shape : bench::exchange_shapes(options_.scale)) {
      cases.push_back(case_of(shape, false));
      if (shape.kind == Kind::kBenchmark) cases.push_back(case_of(shape, true));
    }
    if (peer_mpi_) cases.push_back(case_of(bench::bar_shape(options_.scale), true));
    if (world_.is_first()) {
      report_.emplace(options_, machine_, limits_);
      if (!options_.json) print_head();
    }
    ProgressBar bar(world_.is_first() ? static_cast<int>(cases.size()) : 0);
    for (std::size_t i = 0; i < cases.size(); ++i) {
      bar.show(static_cast<int>(i), "all2all");
      const std::vector<TransportResult> results = run_case(cases[i]);
      bar.clear();
      for (const TransportResult& result : results) add(cases[i], result, &result == &results[0]);
    }
    if (!world_.is_first()) return kFine;
    finish();
    return holds_ ? kFine : kCheckFailed;
  }

 private:
  [[nodiscard]] TransportCase case_of(const ExchangeShape& shape, bool every_token) const {
    TransportCase c{.shape = shape,
                    .every_token = every_token,
                    .variants = variants_,
                    .where = place_of(options_, world_, shape.world_size),
                    .backend = where_.backend,
                    .engine = where_.engine,
                    .peer_mpi = peer_mpi_,
                    .bucket_budget = machine_.memory_bytes / 4};
    // The small tests are about their number of ranks.
    if (shape.world_size <= 2) c.where.num_ranks = std::min(c.where.num_ranks, shape.world_size);
    if (shape.kind == Kind::kBar) c.variants = {"native"};
    const bool test = shape.kind == Kind::kTest;
    c.count = {.warmup = static_cast<int>(options_.warmup.value_or(test ? 1 : 10)),
               .iterations = static_cast<int>(options_.iterations.value_or(test ? 3 : 100)),
               .budget = std::chrono::seconds(options_.iterations || test ? 0 : 2)};
    return c;
  }

  /// With fewer ranks than processes the others wait for the next case.
  std::vector<TransportResult> run_case(TransportCase c) {
    if (c.where.world == nullptr || c.where.num_ranks == world_.num_ranks) {
      return run_transports(c);
    }
    const int ranks = c.where.num_ranks;
    if (!few_.contains(ranks)) few_[ranks] = make_launched_rank(ranks);
    Communicator* const few = few_[ranks].get();
    c.where.world = few;
    c.peer_mpi = false;
    std::vector<TransportResult> results;
    if (few != nullptr) results = run_transports(c);
    world_.launched->barrier("a test of few ranks");
    return results;
  }

  [[nodiscard]] std::string name_of(const TransportCase& c) {
    if (c.shape.kind == Kind::kBar) return "shape of R8";
    if (c.shape.kind == Kind::kTest) return fmt::format("test {}", tests_);
    return fmt::format("benchmark {}", benchmarks_);
  }

  static std::string tokens_text(const TransportCase& c) {
    if (c.every_token) return fmt::format("{} tokens on each", c.shape.max_tokens);
    return fmt::format("1 to {} tokens on each", std::max<std::int64_t>(1, c.shape.max_tokens - 1));
  }

  CaseResult to_result(const TransportCase& c, const TransportResult& run) {
    CaseResult result = start_exchange_result(c.where, limits_);
    result.what.name = "all2all " + run.variant;
    result.what.num_experts = c.shape.num_experts;
    result.what.top_k = c.shape.top_k;
    result.what.hidden = c.shape.hidden;
    result.what.num_tokens = run.num_tokens;
    result.what.compute = to_string(c.shape.dtype);
    result.what.wire = to_string(c.shape.dtype);
    result.what.layout = run.variant;
    result.seed = static_cast<std::int64_t>(c.shape.seed);
    if (where_.engine != DeviceEngine::kAuto) result.what.engine = to_string(where_.engine);
    result.backend = to_string(c.backend);
    result.whole = "dispatch+combine";
    result.stages = judge(run.stages, limits_, c.shape.dtype);
    if (c.backend == Backend::kCuda) judge_by_wire(result, run);
    result.holds = run.holds();
    result.verdict = fmt::format("largest error {:.2g} of atol 5e-3, rtol 1e-2", run.error);
    result.more = {{"variant", run.variant},
                   {"published", name_of(c)},
                   {"max_num_tokens", c.shape.max_tokens},
                   {"every_token", c.every_token},
                   {"scale", options_.scale},
                   {"wire_bytes", run.wire_bytes},
                   {"capacity", run.capacity},
                   {"error", run.error}};
    if (c.backend == Backend::kCuda) {
      const bool by_host = run.variant == "reference" || run.variant == "sorted";
      result.more["chain"] = by_host ? TransportCase::kHostChain : TransportCase::kChain;
      result.more["launch"] = by_host ? "host" : "graph";
      result.more["most_wire_bytes"] = run.most_there + run.most_back;
    }
    // The peer is no stage of ours.
    const auto peer =
        std::find_if(result.stages.begin(), result.stages.end(),
                     [](const bench::StageFigures& f) { return f.stage == "mpi_alltoallv"; });
    if (peer != result.stages.end()) {
      result.peers["mpi"] = peer->us.median;
      result.stages.erase(peer);
    }
    return result;
  }

  static void judge_by_wire(CaseResult& result, const TransportResult& run) {
    result.whole = "round_trip";
    for (bench::StageFigures& stage : result.stages) {
      const std::int64_t bytes = stage.stage == "dispatch"  ? run.most_there
                                 : stage.stage == "combine" ? run.most_back
                                 : stage.stage == "experts" ? 0
                                                            : run.most_there + run.most_back;
      limit_by_wire(stage, static_cast<double>(bytes));
    }
  }

  void add(const TransportCase& c, const TransportResult& run, bool first) {
    if (first && c.shape.kind == Kind::kTest) ++tests_;
    if (first && c.shape.kind == Kind::kBenchmark && !c.every_token) ++benchmarks_;
    CaseResult result = to_result(c, run);
    holds_ = holds_ && run.holds();
    if (c.shape.kind == Kind::kBenchmark) ranking_[run.variant][c.every_token].add(result);
    if (!options_.json) {
      if (first) print_case(c);
      print_row(result, run);
    }
    report_->record(result);
    results_.push_back(std::move(result));
  }

  void print_head() const {
    if (where_.backend == Backend::kCuda) {
      fmt::print(
          "on GPUs: a round trip is one of {} chained in a graph, of reference and sorted one of "
          "{} launched by the host; others are launched by the host\n",
          TransportCase::kChain, TransportCase::kHostChain);
    }
    fmt::print("variants {}; checked by allclose(rtol 1e-2, atol 5e-3) against plain loops\n",
               fmt::join(variants_, ", "));
    if (options_.scale != 1) {
      fmt::print(
          "sized down: tokens and hidden size are divided by {:g}, but for the small tests\n",
          options_.scale);
    }
  }

  void print_case(const TransportCase& c) {
    const std::string gpus = c.backend == Backend::kCuda ? " on GPUs" : "";
    const std::string other = c.where.num_ranks == c.shape.world_size
                                  ? ""
                                  : fmt::format("; published for {} ranks", c.shape.world_size);
    fmt::print("\n{}: E={} K={} H={} {}, {} of {}{}{}\n", name_of(c), c.shape.num_experts,
               c.shape.top_k, c.shape.hidden, to_string(c.shape.dtype), tokens_text(c),
               ranks_text(c.where), gpus, other);
    fmt::print("{:<10}{:>10}{:>10}{:>10}{:>12}{:>10}{:>14}{:>10}  {}\n", "variant", "dispatch",
               "experts", "combine", "round trip", "p95", "as published", "sent", "check");
  }

  void print_row(const CaseResult& result, const TransportResult& run) const {
    const auto us = [&](const char* stage) {
      return human_time(stage_of(result, stage).us.median);
    };
    fmt::print("{:<10}{:>10}{:>10}{:>10}{:>12}{:>10}{:>14}{:>10}  {} {:.2f}{}\n", run.variant,
               us("dispatch"), us("experts"), us("combine"), us("round_trip"),
               human_time(stage_of(result, "round_trip").us.p95),
               human_time(stage_of(result, "barrier_to_barrier").us.mean),
               human_count(static_cast<double>(run.wire_bytes), "B"),
               run.holds() ? "holds" : "MISS", run.error,
               run.capacity > 0 ? fmt::format(", buckets of {}", run.capacity) : "");
    if (result.backend == "cuda") {
      const bench::StageFigures& trip = stage_of(result, "round_trip");
      fmt::print(
          "{:<10}launched by the host {}; {} on the wire of the rank that sends most: {}, "
          "{:.0f}%\n",
          "", us("eager"), human_count(static_cast<double>(run.most_there + run.most_back), "B"),
          human_time(trip.limit_us), 100 * trip.share);
    }
    if (const auto peer = result.peers.find("mpi"); peer != result.peers.end()) {
      const double ours = stage_of(result, "dispatch+combine").us.median;
      fmt::print(
          "{:<10}dispatch+combine, plan and the sums over each rank's experts included: {};\n"
          "{:<10}two MPI_Alltoallv of the same bytes: {}, {:.2f}x\n",
          "", human_time(ours), "", human_time(peer->second), ours / peer->second);
    }
    std::fflush(stdout);
  }

  void finish() {
    nlohmann::json all = nlohmann::json::array();
    if (!options_.json) {
      fmt::print(
          "\ngeometric mean of {} benchmarks: of the slowest rank's medians, and as published "
          "(mean,"
          "\nrank 0's clock, barrier to barrier)\n{:<10}{:>26}{:>29}\n",
          benchmarks_, "variant", "every rank full", "tokens drawn, as published");
    }
    for (const std::string& variant : variants_) {
      const Ranking& full = ranking_[variant][true];
      const Ranking& drawn = ranking_[variant][false];
      const auto mean = [](double sum, int count) { return std::exp(sum / count); };
      all.push_back({{"variant", variant},
                     {"every_token",
                      {{"slowest_rank_median_us", mean(full.slowest_rank, full.count)},
                       {"published_mean_us", mean(full.published, full.count)}}},
                     {"drawn_tokens",
                      {{"slowest_rank_median_us", mean(drawn.slowest_rank, drawn.count)},
                       {"published_mean_us", mean(drawn.published, drawn.count)}}}});
      if (options_.json) continue;
      fmt::print("{:<10}{:>13}{:>13}{:>16}{:>13}\n", variant,
                 human_time(mean(full.slowest_rank, full.count)),
                 human_time(mean(full.published, full.count)),
                 human_time(mean(drawn.slowest_rank, drawn.count)),
                 human_time(mean(drawn.published, drawn.count)));
    }
    for (const CaseResult& bar : bench::judge_round_trips(results_)) report_->conclude(bar);
    if (!options_.csv.empty()) write_text(options_.csv, bench::to_csv(results_));
    report_->note("ranking", all);
    report_->finish();
  }

  const Options& options_;
  const World& world_;
  const std::vector<std::string> variants_;
  const ExchangeBackend where_;
  const bool peer_mpi_;
  const bench::Machine machine_;
  const bench::Limits limits_;
  std::optional<BenchReport> report_;
  std::map<int, std::unique_ptr<Communicator>> few_;
  std::map<std::string, std::map<bool, Ranking>> ranking_;
  std::vector<CaseResult> results_;
  int tests_ = 0;
  int benchmarks_ = 0;
  bool holds_ = true;
};

}  // namespace

int bench_all2all(const Options& options, const World& world) {
  check_exchange_options(options);
  return All2AllSuite(options, world).run();
}

}  // namespace switchyard::tool
