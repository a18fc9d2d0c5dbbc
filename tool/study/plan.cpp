#include "tool/study/plan.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace switchyard::tool {
namespace {

/// The lowest point of the parabola through three points, ascending in x, the middle one the
/// lowest.
double lowest_of(const double (&x)[3], const double (&y)[3]) {
  const double left = (y[1] - y[0]) / (x[1] - x[0]);
  const double right = (y[2] - y[1]) / (x[2] - x[1]);
  const double bend = (right - left) / (x[2] - x[0]);
  if (!(bend > 0)) return x[1];
  return std::clamp((x[0] + x[1]) / 2 - left / (2 * bend), x[0], x[2]);
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// A share of a schedule, kept: steps of a run of another length.
std::int64_t scaled(std::int64_t part, std::int64_t of, std::int64_t steps) {
  return static_cast<std::int64_t>(std::llround(
      static_cast<double>(part) * static_cast<double>(steps) / static_cast<double>(of)));
}

StudyRun test_run(const StudyConfig& study, std::size_t arm, std::int64_t seed, double rate) {
  return {.arm = arm,
          .kind = RunKind::kTest,
          .seed = seed,
          .rate = rate,
          .steps = study.arms[arm].train.schedule.steps};
}

StudyRun tune_run(const StudyConfig& study, std::size_t arm, double rate) {
  return {.arm = arm,
          .kind = RunKind::kTune,
          .seed = study.tuning.seed,
          .rate = rate,
          .steps = study.tuning.steps};
}

/// The medians of tokens a second of an arm whose seeds are all there.
std::optional<double> pace_of(const StudyConfig& study, std::size_t arm,
                              const RunResults& results) {
  std::vector<double> paces;
  for (const std::int64_t seed : study.seeds) {
    const auto found = results.find(name_of(study, test_run(study, arm, seed, 0)));
    if (found == results.end()) return std::nullopt;
    const nlohmann::json& pace = found->second.at("tokens_per_s");
    if (pace.is_number() && pace.get<double>() > 0) paces.push_back(pace.get<double>());
  }
  return paces.empty() ? std::nullopt : std::optional(median_of(std::move(paces)));
}

}  // namespace

const char* to_string(RunKind kind) {
  switch (kind) {
    case RunKind::kTune: return "tune";
    case RunKind::kTest: return "seed";
    case RunKind::kTime: return "time";
  }
  return "?";
}

std::string name_of(const StudyConfig& study, const StudyRun& run) {
  const std::string of = fmt::format("{}/{}-", study.arms[run.arm].name, to_string(run.kind));
  return of + (run.kind == RunKind::kTune ? fmt::format("{:.4g}", run.rate)
                                          : fmt::format("{}", run.seed));
}

models::TrainConfig train_config(const StudyConfig& study, const StudyRun& run) {
  models::TrainConfig config = study.arms[run.arm].train;
  models::Schedule& schedule = config.schedule;
  const std::int64_t of = schedule.steps;
  config.seed = static_cast<std::uint64_t>(run.seed);
  schedule.peak = run.rate;
  schedule.steps = run.steps;
  schedule.warmup = std::min(scaled(schedule.warmup, of, run.steps), run.steps);
  schedule.decay = std::min(scaled(schedule.decay, of, run.steps), run.steps - schedule.warmup);
  return config;
}

TunedRate tune(const StudyTuning& tuning, std::vector<TriedRate> tried) {
  std::sort(tried.begin(), tried.end());
  TunedRate out{.tried = std::move(tried)};
  const std::vector<TriedRate>& all = out.tried;
  for (const double rate : tuning.rates) {
    const bool done = std::any_of(
        all.begin(), all.end(), [&](const TriedRate& t) { return t.first == rounded_rate(rate); });
    if (!done && tuning.rates.size() > 1) {
      out.next = rounded_rate(rate);
      return out;
    }
  }
  if (tuning.rates.size() == 1) {
    out.rate = rounded_rate(tuning.rates.front());
    return out;
  }
  std::size_t best = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].second && (!all[best].second || *all[i].second < *all[best].second)) best = i;
  }
  const std::size_t last = all.size() - 1;
  out.rate = all[best].first;
  out.is_edge = best == 0 || best == last;
  if (out.is_edge && all.size() < tuning.rates.size() + static_cast<std::size_t>(tuning.extend)) {
    out.next = rounded_rate(best == 0 ? all[0].first * all[0].first / all[1].first
                                      : all[last].first * all[last].first / all[last - 1].first);
    return out;
  }
  const auto loss_beyond = [&](std::size_t i) -> std::optional<double> {
    if (!all[i].second || !all[best].second) return std::nullopt;
    return *all[i].second - *all[best].second;
  };
  if (best > 0) out.below = loss_beyond(best - 1);
  if (best < last) out.above = loss_beyond(best + 1);
  if (out.below && out.above) {
    const double x[] = {std::log(all[best - 1].first), std::log(all[best].first),
                        std::log(all[best + 1].first)};
    out.rate = rounded_rate(std::exp(lowest_of(x, {*out.below, 0, *out.above})));
  }
  return out;
}

TunedRate tuned_rate(const StudyConfig& study, std::size_t arm, const RunResults& results) {
  std::vector<TriedRate> tried;
  const std::string of = study.arms[arm].name + "/tune-";
  for (auto run = results.lower_bound(of); run != results.end() && run->first.starts_with(of);
       ++run) {
    const nlohmann::json& loss = run->second.at("loss");
    tried.emplace_back(run->second.at("learning_rate").get<double>(),
                       loss.is_number() ? std::optional(loss.get<double>()) : std::nullopt);
  }
  return tune(study.tuning, std::move(tried));
}

std::optional<StudyRun> init_run(const StudyConfig& study, const StudyRun& run,
                                 const RunResults& results) {
  const std::optional<std::size_t> arm = study.arms[run.arm].init;
  if (!arm) return std::nullopt;
  if (run.kind != RunKind::kTune) return test_run(study, *arm, run.seed, 0);
  const TunedRate tuned = tuned_rate(study, *arm, results);
  double rate = study.tuning.rates.front();
  double least = std::numeric_limits<double>::infinity();
  for (const auto& [tried, loss] : tuned.tried) {
    if (loss.value_or(least) < least) rate = tried, least = *loss;
  }
  return tune_run(study, *arm, rounded_rate(rate));
}

std::optional<std::int64_t> steps_at_equal_time(const StudyConfig& study, std::size_t arm,
                                                const RunResults& results) {
  const auto own = pace_of(study, arm, results);
  const auto reference = pace_of(study, study.reference, results);
  if (!own || !reference) return std::nullopt;
  const auto steps = static_cast<double>(study.arms[arm].train.schedule.steps);
  return std::max<std::int64_t>(1, std::llround(steps * *own / *reference));
}

namespace {

/// What is done, what is under way, and who is to be had at all.
class RunQueue {
 public:
  RunQueue(const StudyConfig& study, const std::vector<std::size_t>& arms,
           const RunResults& results, const std::set<std::string>& running)
      : study_(study), arms_(arms), results_(results), running_(running) {}

  [[nodiscard]] bool is_free(const StudyRun& run) const {
    const std::string name = name_of(study_, run);
    return !results_.contains(name) && !running_.contains(name);
  }

  /// The next rate to try of an arm that wants one. One beyond the grid waits for all that are on
  /// trial.
  [[nodiscard]] std::optional<StudyRun> next_tune(std::size_t arm, const TunedRate& tuned) const {
    for (const double rate : study_.tuning.rates) {
      const StudyRun run = tune_run(study_, arm, rounded_rate(rate));
      if (is_free(run)) return run;
    }
    const std::string of = study_.arms[arm].name + "/tune-";
    const auto on_trial = running_.lower_bound(of);
    if (on_trial != running_.end() && on_trial->starts_with(of)) return std::nullopt;
    return tune_run(study_, arm, *tuned.next);
  }

  /// Whether a run of this arm has to wait for one of the arm that it begins with: that one is made
  /// by this command and not there yet.
  [[nodiscard]] bool waits(const StudyRun& run) const {
    const std::optional<std::size_t> from = study_.arms[run.arm].init;
    if (!from || std::find(arms_.begin(), arms_.end(), *from) == arms_.end()) return false;
    if (run.kind == RunKind::kTune) return tuned_rate(study_, *from, results_).next.has_value();
    return !results_.contains(name_of(study_, test_run(study_, *from, run.seed, 0)));
  }

 private:
  const StudyConfig& study_;
  const std::vector<std::size_t>& arms_;
  const RunResults& results_;
  const std::set<std::string>& running_;
};

}  // namespace

std::optional<StudyRun> next_run(const StudyConfig& study, const std::vector<std::size_t>& arms,
                                 const RunResults& results, const std::set<std::string>& running) {
  const RunQueue queue(study, arms, results, running);
  std::map<std::size_t, double> rates;  // of arms that are tuned
  for (const std::size_t arm : arms) {
    const TunedRate tuned = tuned_rate(study, arm, results);
    if (!tuned.next) {
      rates[arm] = tuned.rate;
      continue;
    }
    const std::optional<StudyRun> run = queue.next_tune(arm, tuned);
    if (run && !queue.waits(*run)) return run;
  }
  for (const std::int64_t seed : study.seeds) {
    for (const auto arm : arms) {
      if (!rates.contains(arm)) continue;
      const StudyRun run = test_run(study, arm, seed, rates[arm]);
      if (queue.is_free(run) && !queue.waits(run)) return run;
    }
  }
  if (!study.equal_time) return std::nullopt;
  for (const std::int64_t seed : study.seeds) {
    for (const std::size_t arm : arms) {
      const auto steps = steps_at_equal_time(study, arm, results);
      if (arm == study.reference || !steps || !rates.contains(arm)) continue;
      StudyRun run = test_run(study, arm, seed, rates[arm]);
      run.kind = RunKind::kTime;
      run.steps = *steps;
      if (queue.is_free(run)) return run;
    }
  }
  return std::nullopt;
}

std::vector<StudyRun> planned_runs(const StudyConfig& study, const std::vector<std::size_t>& arms) {
  std::vector<StudyRun> runs;
  for (const std::size_t arm : arms) {
    if (study.tuning.rates.size() == 1) continue;
    for (const double rate : study.tuning.rates)
      runs.push_back(tune_run(study, arm, rounded_rate(rate)));
  }
  for (const RunKind kind : {RunKind::kTest, RunKind::kTime}) {
    for (const std::int64_t seed : study.seeds) {
      for (const std::size_t arm : arms) {
        if (kind == RunKind::kTime && (!study.equal_time || arm == study.reference)) continue;
        StudyRun run = test_run(study, arm, seed, study.arms[arm].train.schedule.peak);
        run.kind = kind;
        runs.push_back(run);
      }
    }
  }
  return runs;
}

}  // namespace switchyard::tool
