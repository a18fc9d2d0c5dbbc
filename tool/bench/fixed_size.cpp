// `bench --suite fixed-size`: the four sweeps, and what they say about the published findings.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>

#include "bench/exchange/bars.hpp"
#include "bench/exchange/fixed_size_run.hpp"
#include "bench/measure/wire_rate.hpp"
#include "core/atomic_file.hpp"
#include "switchyard/device.hpp"
#include "tool/bench/case_table.hpp"
#include "tool/bench/exchange.hpp"
#include "tool/bench/fixed_size_findings.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"
#include "tool/progress.hpp"

namespace switchyard::tool {
namespace {

using bench::CaseResult;
using bench::FixedSizeResult;

class FixedSizeSuite {
 public:
  FixedSizeSuite(const Options& options, const World& world)
      : options_(options),
        world_(world),
        where_(exchange_backend(options)),
        peer_(!options.peers.empty() ? options.peers.front() : ""),
        peer_mpi_(mpi_peer_wanted(options, world)),
        sweeps_(bench::fixed_size_sweeps(options.scale)),
        place_(place_of(options, world, sweeps_.world_size)),
        machine_(bench::this_machine()),
        limits_(limits_of(world, where_.backend)) {}

  int run() {
    check_sizes();
    if (world_.is_first()) {
      report_.emplace(options_, machine_, limits_);
      if (!options_.json) print_head();
    }
    ProgressBar bar(world_.is_first() ? static_cast<int>(sweeps_.points.size()) : 0);
    for (std::size_t i = 0; i < sweeps_.points.size(); ++i) {
      const bench::SweepPoint& point = sweeps_.points[i];
      bar.show(static_cast<int>(i), fmt::format("{} {}", point.sweep, point.value));
      const FixedSizeResult result = bench::run_fixed_size(
          {.config = point.config,
           .where = place_,
           .backend = where_.backend,
           .engine = where_.engine,
           .count = {.warmup = static_cast<int>(options_.warmup.value_or(3)),
                     .iterations = static_cast<int>(options_.iterations.value_or(10))},
           .peer_mpi = peer_mpi_,
           .peer_nccl = peer_ == "nccl",
           .memory_budget = memory_budget()});
      bar.clear();
      if (world_.is_first()) add(point, result);
    }
    if (!world_.is_first()) return kFine;
    finish();
    return holds_ ? kFine : kCheckFailed;
  }

 private:
  [[nodiscard]] bool on_gpus() const { return where_.backend == Backend::kCuda; }
  [[nodiscard]] const char* ranks_kind() const { return on_gpus() ? "GPUs" : "CPU ranks"; }

  /// Two thirds of the memory there is for all ranks.
  [[nodiscard]] std::int64_t memory_budget() const {
    if (!on_gpus()) return machine_.memory_bytes / 3 * 2;
    const auto gpus = static_cast<std::int64_t>(find_gpus().list.size());
    return machine_.gpu_memory_bytes / 3 * 2 * std::min<std::int64_t>(gpus, place_.num_ranks);
  }

  void check_sizes() const {
    for (const bench::SweepPoint& point : sweeps_.points) {
      const std::int64_t experts = std::int64_t{place_.num_ranks} * point.config.local_experts;
      if (point.config.top_k > experts) {
        throw UsageError("--ranks: {} of them have {} experts at a point with top-k {}, want {}",
                         place_.num_ranks, experts, point.config.top_k, sweeps_.world_size);
      }
    }
  }

  void print_head() const {
    fmt::print("every pair of {} exchanges M rows of bf16, zeros after its own; on {}{}\n",
               ranks_text(place_), ranks_kind(),
               place_.num_ranks == sweeps_.world_size
                   ? ""
                   : fmt::format(" (pinned: {} ranks)", sweeps_.world_size));
    if (options_.scale != 1) {
      fmt::print("sized down: tokens and hidden size are divided by {:g}\n", options_.scale);
    }
  }

  CaseResult to_result(const bench::SweepPoint& point, const FixedSizeResult& run) const {
    CaseResult result = start_exchange_result(place_, limits_);
    result.what.name = "fixed-size " + point.sweep;
    result.what.num_experts = point.config.local_experts * place_.num_ranks;
    result.what.top_k = point.config.top_k;
    result.what.hidden = point.config.hidden;
    result.what.num_tokens = point.config.tokens * place_.num_ranks;
    result.what.compute = "bf16";
    result.what.wire = "bf16";
    result.what.layout = "fixed-size";
    result.seed = point.config.seed;
    result.whole = "exchange";
    if (where_.engine != DeviceEngine::kAuto) result.what.engine = to_string(where_.engine);
    result.backend = to_string(where_.backend);
    result.stages = judge(run.stages, limits_, DType::kBF16);
    // The exchange first, then the rest.
    std::stable_partition(result.stages.begin(), result.stages.end(),
                          [](const bench::StageFigures& f) { return f.stage == "exchange"; });
    if (on_gpus()) {
      for (bench::StageFigures& f : result.stages) {
        limit_by_wire(f, static_cast<double>(run.wire_bytes / place_.num_ranks));
      }
    }
    result.holds = run.holds;
    result.verdict = run.holds ? "every message came as it was sent" : "a message is not as sent";
    result.more = {{"sweep", point.sweep},         {"value", point.value},
                   {"M", run.rows_per_pair},       {"padding", run.padding},
                   {"wire_bytes", run.wire_bytes}, {"scale", options_.scale}};
    const auto peer =
        std::find_if(result.stages.begin(), result.stages.end(), [](const bench::StageFigures& f) {
          return f.stage == "mpi_alltoallv" || f.stage == "nccl_all_to_all";
        });
    if (peer != result.stages.end()) {
      result.peers[peer_] = peer->us.median;
      result.stages.erase(peer);
    }
    return result;
  }

  void add(const bench::SweepPoint& point, const FixedSizeResult& run) {
    if (!options_.json && point.sweep != sweep_) print_sweep(point);
    sweep_ = point.sweep;
    if (run.bytes_wanted > 0) {
      const std::string why = fmt::format(
          "left out: buffers of {} for M = {} rows a pair, and two thirds of the memory are {}: "
          "want a larger --scale",
          human_count(static_cast<double>(run.bytes_wanted), "B"), run.rows_per_pair,
          human_count(static_cast<double>(memory_budget()), "B"));
      if (!options_.json) fmt::print("{:>13}  {}\n", point.value, why);
      left_out_.push_back({{"sweep", point.sweep}, {"value", point.value}, {"why", why}});
      return;
    }
    CaseResult result = to_result(point, run);
    holds_ = holds_ && run.holds;
    const bench::Statistics& us = result.stages[0].us;
    const auto peer = result.peers.find(peer_);
    points_.push_back({.sweep = point.sweep,
                       .value = static_cast<double>(point.value),
                       .rows_per_pair = static_cast<double>(run.rows_per_pair),
                       .padding = run.padding,
                       .us = us.median,
                       .peer_us = peer == result.peers.end() ? 0 : peer->second});
    if (!options_.json) print_row(point, run, us);
    report_->record(result);
    results_.push_back(std::move(result));
  }

  void print_sweep(const bench::SweepPoint& point) const {
    fmt::print("\n{:>13}{:>8}{:>9}{:>10}{:>11}{:>11}{:>9}{}  check\n", point.sweep, "M", "padding",
               "sent", "mean", "median", "GB/s",
               peer_.empty() ? "" : fmt::format("{:>14}{:>7}", peer_ + " median", "/ours"));
  }

  void print_row(const bench::SweepPoint& point, const FixedSizeResult& run,
                 const bench::Statistics& us) const {
    const auto bytes = static_cast<double>(run.wire_bytes);
    std::string peer;
    if (!peer_.empty()) {
      const double median = points_.back().peer_us;
      peer = fmt::format("{:>11}{:>10.2f}", human_time(median), median / us.median);
    }
    fmt::print("{:>13}{:>8}{:>8.1f}%{:>10}{:>11}{:>11}{:>9.3g}{}  {}\n", point.value,
               run.rows_per_pair, 100 * run.padding, human_count(bytes, "B"), human_time(us.mean),
               human_time(us.median), bytes / us.median * 1e-3, peer, run.holds ? "holds" : "MISS");
    std::fflush(stdout);
  }

  void finish() {
    nlohmann::json findings = nlohmann::json::array();
    if (!options_.json) fmt::print("\npublished findings, on {}, by the medians:\n", ranks_kind());
    for (const Finding& finding : judge_findings(points_)) {
      findings.push_back({{"finding", finding.claim},
                          {"verdict", finding.verdict},
                          {"why", finding.why},
                          {"on", ranks_kind()}});
      if (!options_.json) {
        fmt::print("- {}: {}: {}\n", finding.claim, finding.verdict, finding.why);
      }
    }
    for (const CaseResult& bar : bench::judge_fixed_size(results_)) report_->conclude(bar);
    if (!options_.csv.empty()) write_text(options_.csv, bench::to_csv(results_));
    report_->note("findings", findings);
    report_->note("left_out", left_out_);
    report_->finish();
  }

  const Options& options_;
  const World& world_;
  const ExchangeBackend where_;
  const std::string peer_;  ///< "mpi", "nccl", or none.
  const bool peer_mpi_;
  const bench::FixedSizeSweeps sweeps_;
  const RankPlace place_;
  const bench::Machine machine_;
  const bench::Limits limits_;
  std::optional<BenchReport> report_;
  std::vector<FixedSizeFigure> points_;
  std::vector<CaseResult> results_;
  nlohmann::json left_out_ = nlohmann::json::array();
  std::string sweep_;
  bool holds_ = true;
};

}  // namespace

int bench_fixed_size(const Options& options, const World& world) {
  check_exchange_options(options);
  return FixedSizeSuite(options, world).run();
}

}  // namespace switchyard::tool
