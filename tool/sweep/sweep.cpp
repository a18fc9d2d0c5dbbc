// `switchyard sweep`: the points of a grid, one after the other, and where it ended the last time.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/measure/process_memory.hpp"
#include "bench/measure/stage_memory.hpp"
#include "bench/sweep/estimate.hpp"
#include "comm/ranks/launch.hpp"
#include "core/check.hpp"
#include "switchyard/error.hpp"
#include "tool/bench/case_table.hpp"
#include "tool/commands.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"
#include "tool/output_files.hpp"
#include "tool/progress.hpp"
#include "tool/setup.hpp"
#include "tool/sweep/done_points.hpp"
#include "tool/sweep/duration.hpp"
#include "tool/sweep/points.hpp"

namespace switchyard::tool {
namespace {

using bench::CaseResult;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// `--estimate --samples N ...`: no grid is looked at.
int estimate_text(const Options& options) {
  for (const auto& [name, given] :
       {std::pair{"--samples", options.samples.has_value()},
        std::pair{"--prompt", options.prompt.has_value()},
        std::pair{"--generate", options.generate.has_value()},
        std::pair{"--tokens-per-second", options.tokens_per_second.has_value()}}) {
    if (!given) {
      throw UsageError(
          "{} is missing, want --samples, --prompt, --generate and "
          "--tokens-per-second together",
          name);
    }
  }
  if (!options.estimate) throw UsageError("--samples: given without --estimate, which it is for");
  const double seconds =
      text_seconds(static_cast<double>(*options.samples), static_cast<double>(*options.prompt),
                   static_cast<double>(*options.generate), *options.tokens_per_second);
  if (options.json) {
    fmt::print("{}\n",
               json{{"schema", 1}, {"options", echo(options)}, {"seconds", seconds}}.dump(2));
  } else {
    fmt::print("{} x ({} + {}) tokens at {:g} a second: {}\n", *options.samples, *options.prompt,
               *options.generate, *options.tokens_per_second, human_duration(seconds));
  }
  return kFine;
}

void check_options(const Options& options) {
  if (options.suite.empty() == options.grid.empty()) {
    throw UsageError(
        "{}, want one of --suite NAME and --grid FILE",
        options.suite.empty() ? "no grid is given" : "--suite and --grid are both given");
  }
  if (options.estimate && !options.results.empty()) {
    throw UsageError("--results: given with --estimate, which measures nothing");
  }
  const Launch launch = read_launch();
  if (launch.world > 1) {
    throw UsageError("sweep is one process, but {} has started {}: ranks are a key of the grid",
                     launch.launcher, launch.world);
  }
  const NamedFile results{"--results", options.results};
  check_output_place(results, Writing::kAppend);
  check_outputs_apart({results}, {{"--grid", options.grid}});
}

/// A sweep on this machine: what is left of it, what that should take, and what it took.
class Run {
 public:
  explicit Run(const Options& options)
      : options_(options),
        sweep_(sweep_of(options)),
        machine_(bench::this_machine()),
        backend_(sweep_.points.front().work.layer.options.backend),
        limits_(bench::measure_limits(backend_, num_threads())),
        report_(options, machine_, limits_) {
    const bench::MadeUpRates rates = bench::measure_made_up_rates();
    bench::return_freed_memory();
    base_bytes_ = static_cast<double>(bench::resident_bytes());
    if (!options.results.empty()) done_.emplace(options.results, place());
    for (const SweepPoint& point : sweep_.points) {
      if (done_ && done_->has(point)) continue;
      left_.push_back(&point);
      estimates_.push_back(bench::estimate_case(point.work, machine_, limits_, rates));
    }
    for (const bench::Estimate& estimate : estimates_) {
      whole_.seconds += estimate.seconds;
      whole_.bytes = std::max(whole_.bytes, bytes_of(estimate));
    }
  }

  void announce() {
    const std::size_t done = sweep_.points.size() - left_.size();
    const json estimate = {{"points", sweep_.points.size()},
                           {"done", done},
                           {"seconds", whole_.seconds},
                           {"bytes", whole_.bytes}};
    report_.note("suite", sweep_.name);
    report_.note("estimate", estimate);
    if (options_.json) return;
    fmt::print("{}: {} points", sweep_.name, sweep_.points.size());
    if (done > 0) fmt::print(", {} of them done", done);
    if (!left_.empty()) {
      fmt::print("; estimate: {}, {}", human_duration(whole_.seconds),
                 human_count(whole_.bytes, "B"));
    }
    fmt::print("\n");
    std::fflush(stdout);
  }

  /// @throws UsageError before anything is measured: a point would not fit into the memory; of
  /// GPUs each rank has one.
  void check_memory() const {
    const auto memory = static_cast<double>(machine_.memory(backend_));
    for (std::size_t i = 0; i < left_.size(); ++i) {
      const int shared_by = backend_ == Backend::kCpu ? 1 : left_[i]->work.layer.num_ranks;
      const double bytes = bytes_of(estimates_[i]) / shared_by;
      if (bytes <= memory) continue;
      throw UsageError("{} {}: about {}, more than the {} of this machine; see --scale",
                       sweep_.name, left_[i]->at.dump(), human_count(bytes, "B"),
                       human_count(memory, "B"));
    }
  }

  void measure() {
    ProgressBar bar(static_cast<int>(sweep_.points.size()));
    const std::size_t before = sweep_.points.size() - left_.size();
    double to_come = whole_.seconds;
    const Clock::time_point begin = Clock::now();
    for (std::size_t i = 0; i < left_.size(); ++i) {
      bar.show(
          static_cast<int>(before + i),
          fmt::format("{}, {} to come", label_of(left_[i]->work.layer), human_duration(to_come)));
      measure_point(*left_[i], estimates_[i], bar);
      to_come -= estimates_[i].seconds;
    }
    if (!left_.empty()) conclude(seconds_since(begin));
  }

  int finish() {
    report_.finish();
    return holds_ && (!done_ || done_->hold()) ? kFine : kCheckFailed;
  }

 private:
  [[nodiscard]] int num_threads() const {
    int threads = 1;
    for (const SweepPoint& point : sweep_.points) {
      threads = std::max(threads, point.work.layer.num_threads);
    }
    return threads;
  }

  [[nodiscard]] SweepPlace place() const {
    return {.suite = sweep_.name,
            .commit = bench::build_commit(),
            .cpu = machine_.cpu,
            .isa = machine_.isa,
            .gpu = machine_.gpu,
            .backend = to_string(backend_),
            .seed = options_.seed};
  }

  [[nodiscard]] double bytes_of(const bench::Estimate& estimate) const {
    return estimate.bytes + (backend_ == Backend::kCpu ? base_bytes_ : 0);
  }

  /// What the point before had is not the next one's.
  void forget_peak() const {
    bench::return_freed_memory();
    if (backend_ == Backend::kCpu) {
      bench::forget_peak();
    } else {
      bench::forget_device_peak();
    }
  }
  /// Of this process's memory, or of GPUs'.
  [[nodiscard]] double peak_bytes() const {
    return static_cast<double>(backend_ == Backend::kCpu ? bench::peak_resident_bytes()
                                                         : bench::peak_device_bytes());
  }

  void measure_point(const SweepPoint& point, const bench::Estimate& estimate, ProgressBar& bar) {
    forget_peak();
    const Clock::time_point begin = Clock::now();
    std::vector<CaseResult> results;
    try {
      results = run_suite_case(point.work, machine_, limits_);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) {
        bar.clear();
        if (measured_ > 0) report_.finish();  // what is done is kept
        throw at_place(sweep_.name + " " + point.at.dump(), error);
      }
      bar.clear();
      left_out_.push_back({{"point", point.at}, {"why", error.what()}});
      if (!options_.json) fmt::print("\nleft out: {}: {}\n", point.at.dump(), error.what());
      return;
    }
    const double took = seconds_since(begin);
    const double peak = peak_bytes();
    bar.clear();
    peak_bytes_ = std::max(peak_bytes_, peak);
    std::size_t lines = 0;
    for (const CaseResult& result : results) lines += result.stages.size();
    for (CaseResult& result : results) {
      result.more.update({{"suite", sweep_.name},
                          {"work", point.kind},
                          {"point", point.at},
                          {"points", sweep_.points.size()},
                          {"lines", lines},
                          {"point_seconds", {{"estimate", estimate.seconds}, {"measured", took}}},
                          {"point_bytes", {{"estimate", bytes_of(estimate)}, {"measured", peak}}}});
      holds_ = holds_ && result.holds;
    }
    report_.add(results);
    ++measured_;
  }

  /// The estimate against what has come; a line of its own.
  void conclude(double took) {
    const auto off = [](double estimate, double measured) {
      return measured > 0 ? 100 * (estimate / measured - 1) : 0;
    };
    const json estimate = {{"seconds", whole_.seconds},
                           {"measured_seconds", took},
                           {"bytes", whole_.bytes},
                           {"measured_bytes", peak_bytes_}};
    CaseResult result = bench::start_result(left_.front()->work.layer, limits_);
    result.what = {.name = sweep_.name, .num_threads = result.what.num_threads};
    result.stages = {{.stage = "sweep", .us = bench::statistics({took * 1e6}), .samples = 1}};
    result.more = {{"suite", sweep_.name},
                   {"points", sweep_.points.size()},
                   {"points_measured", measured_},
                   {"estimate", estimate}};
    result.verdict = fmt::format("{} points in {}, estimate {:+.0f}%; memory {}, estimate {:+.0f}%",
                                 measured_, human_duration(took), off(whole_.seconds, took),
                                 human_count(peak_bytes_, "B"), off(whole_.bytes, peak_bytes_));
    report_.record(result);
    report_.note("left_out", left_out_);
    if (!options_.json) fmt::print("\n{}: {}\n", sweep_.name, result.verdict);
  }

  const Options& options_;
  Sweep sweep_;
  bench::Machine machine_;
  Backend backend_;
  bench::Limits limits_;
  BenchReport report_;
  double base_bytes_ = 0, peak_bytes_ = 0;
  std::optional<DonePoints> done_;
  std::vector<const SweepPoint*> left_;
  std::vector<bench::Estimate> estimates_;  ///< Of those that are left.
  bench::Estimate whole_;
  json left_out_ = json::array();
  std::size_t measured_ = 0;
  bool holds_ = true;
};

}  // namespace

int sweep_command(const Options& options) {
  if (options.samples || options.prompt || options.generate || options.tokens_per_second) {
    if (!options.suite.empty() || !options.grid.empty()) {
      throw UsageError("--samples: an estimate of texts has no --suite and no --grid");
    }
    return estimate_text(options);
  }
  check_options(options);
  Run run(options);
  run.announce();
  if (options.estimate) return run.finish();
  run.check_memory();
  run.measure();
  return run.finish();
}

}  // namespace switchyard::tool
