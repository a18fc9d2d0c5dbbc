// `switchyard study`: arms trained side by side, and what may be said of them.
#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/files/directory_lock.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "core/atomic_file.hpp"
#include "core/check.hpp"
#include "core/human.hpp"
#include "core/printable.hpp"
#include "switchyard/device.hpp"
#include "switchyard/error.hpp"
#include "switchyard/models/ngrams.hpp"
#include "tool/commands.hpp"
#include "tool/interrupt.hpp"
#include "tool/models/common.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/output_files.hpp"
#include "tool/progress.hpp"
#include "tool/setup.hpp"
#include "tool/study/findings.hpp"
#include "tool/study/from_options.hpp"
#include "tool/study/runs.hpp"
#include "tool/study/study_files.hpp"
#include "tool/sweep/duration.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

std::string loss_words(const json& loss) {
  return loss.is_number() ? fmt::format("{:.4f}", loss.get<double>()) : "diverged";
}

/// What is trained, and what is not.
std::string arm_words(const StudyConfig& study, const StudyArm& arm) {
  std::string words = words_of(arm.train.model);
  for (const models::Group group : arm.train.freeze) {
    words += fmt::format(", {} frozen", to_string(group));
  }
  if (arm.init) words += ", begins with " + study.arms[*arm.init].name;
  return words;
}

class Study {
 public:
  explicit Study(const Options& options)
      : options_(options),
        study_(study_of(options)),
        arms_(arms_of(options, study_)),
        text_(open_text("--text", study_.texts)),
        valid_(open_text("--valid", study_.valid)),
        place_{.study = study_,
               .text = text_,
               .valid = valid_,
               .results = results_,
               .directory = options.output_directory,
               .backend = choose_backend(options),
               .num_threads = threads_of_a_run(options, study_),
               .machine = bench::this_machine()} {
    check_texts();
    check_directory();
    if (!options.estimate) lock_.emplace(place_.directory, "runs a study");
    results_ = read_runs(place_);
    check_results();
    place_.limits = bench::measure_limits(place_.backend, place_.num_threads);
    for (const StudyRun& run : planned_runs(study_, arms_)) {
      ++planned_;
      if (!results_.contains(name_of(study_, run))) {
        ++left_;
        estimate_ += estimated_seconds(place_, run);
      }
    }
  }

  void announce() const {
    if (options_.json) return;
    fmt::print("{}{}{}\n", study_.name, study_.what.empty() ? "" : ": ", printable(study_.what));
    const std::string at_a_time =
        jobs() == 1 ? "" : fmt::format("{} runs at a time, each ", options_.jobs);
    fmt::print(
        "text {}, read {:.2g} times, held out {}; reference {}; {} seed{}, {}{}{} thread{}\n",
        human_count(static_cast<double>(text_.num_bytes()), "B"), passes(),
        human_count(static_cast<double>(valid_.num_bytes()), "B"),
        study_.arms[study_.reference].name, study_.seeds.size(),
        study_.seeds.size() == 1 ? "" : "s", at_a_time,
        place_.backend == Backend::kCuda ? "a GPU, " : "", place_.num_threads,
        place_.num_threads == 1 ? "" : "s");
    std::size_t name_width = 0;
    for (const StudyArm& arm : study_.arms) name_width = std::max(name_width, arm.name.size());
    for (const std::size_t index : arms_) {
      const StudyArm& arm = study_.arms[index];
      fmt::print("  {:<{}}  {}\n", arm.name, name_width, arm_words(study_, arm));
    }
    fmt::print("estimate: {} runs, {} of them done; {} to come, without rates beyond a grid\n",
               planned_, planned_ - left_, human_duration(estimate_ / jobs()));
    std::fflush(stdout);
  }

  [[nodiscard]] int estimate_only() const {
    if (!options_.json) return kFine;
    json document = start_document(options_);
    document["estimate"] = {{"seconds", estimate_ / jobs()}, {"runs", planned_}, {"left", left_}};
    fmt::print("{}\n", document.dump(2));
    return kFine;
  }

  int measure() {
    const InterruptRequest interrupt;
    const auto begin = Clock::now();
    // A process that was killed may have left some.
    for (const auto& [name, result] : results_) drop_weights(place_, name, result);
    if (jobs() == 1) {
      work(interrupt);
    } else {
      work_side_by_side(interrupt);
    }
    seconds_ = std::chrono::duration<double>(Clock::now() - begin).count();
    check_results();
    count_floors();
    document_ = study_document();
    write_study(place_.directory, document_, results_);
    if (options_.json) {
      fmt::print("{}\n", document_.dump(2));
    } else {
      print();
    }
    return stopped_ ? kInterrupted : kFine;
  }

 private:
  void check_texts() const {
    for (const StudyArm& arm : study_.arms) {
      check(arm.train, text_);
    }
    const std::int64_t length = study_.arms.front().train.model.sequence;
    std::int64_t windows = 0;
    for (const models::Document& document : valid_.documents()) {
      windows += document.num_targets() / length;
    }
    if (windows < 2) {
      throw UsageError("--valid: {} windows of {} bytes are held out, want 2 at least", windows,
                       length);
    }
  }

  void check_directory() const {
    std::error_code none;
    if (fs::exists(place_.directory, none) && !fs::is_directory(place_.directory, none)) {
      throw UsageError("--output: {} is no directory", place_.directory.string());
    }
    std::vector<NamedFile> inputs = {{"FILE", options_.positional.front()}};
    for (const std::string& text : study_.texts) inputs.push_back({"--text", text});
    for (const std::string& text : study_.valid) inputs.push_back({"--valid", text});
    check_outputs_apart(
        {{"--output", place_.directory / kStudyFile}, {"--output", place_.directory / kLinesFile}},
        inputs);
  }

  /// That what is there was done as this study would do it.
  void check_results() {
    for (std::size_t arm = 0; arm < study_.arms.size(); ++arm) {
      const TunedRate tuned = tuned_rate(study_, arm, results_);
      const std::string of = study_.arms[arm].name + "/";
      for (auto found = results_.lower_bound(of);
           found != results_.end() && found->first.starts_with(of); ++found) {
        if (checked_.contains(found->first)) continue;
        StudyRun run{.arm = arm, .steps = found->second.at("steps").get<std::int64_t>()};
        run.rate = found->second.at("learning_rate").get<double>();
        run.seed = found->second.at("seed").get<std::int64_t>();
        run.kind = found->second.at("kind") == "tune"   ? RunKind::kTune
                   : found->second.at("kind") == "seed" ? RunKind::kTest
                                                        : RunKind::kTime;
        if (run.kind == RunKind::kTune) run.steps = study_.tuning.steps;
        if (run.kind == RunKind::kTest) run.steps = study_.arms[arm].train.schedule.steps;
        if (run.kind != RunKind::kTune) {
          if (tuned.next) continue;  // once it is tuned
          run.rate = tuned.rate;
        }
        check_same(place_, run, found->second);
        checked_.insert(found->first);
      }
    }
  }

  /// One thread for each of the runs at a time. What one of them throws ends all.
  void work_side_by_side(const InterruptRequest& interrupt) {
    std::vector<std::thread> threads;
    threads.reserve(static_cast<std::size_t>(jobs()));
    for (int job = 0; job < jobs(); ++job) {
      threads.emplace_back([&, job] {
        try {
          if (place_.backend == Backend::kCuda) use_gpu_of_rank(job);
          work(interrupt);
        } catch (...) {
          const std::lock_guard lock(mutex_);
          if (error_ == nullptr) error_ = std::current_exception();
          stopped_ = true;
          changed_.notify_all();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

  /// Does runs as long as one may begin, or may when another has ended.
  void work(const InterruptRequest& interrupt) {
    std::unique_lock lock(mutex_);
    while (!stopped_) {
      const auto run = next_run(study_, arms_, results_, running_);
      if (!run && running_.empty()) return;
      if (!run) {
        changed_.wait(lock);
        continue;
      }
      check_results();
      const std::string name = name_of(study_, *run);
      running_.insert(name);
      const RunResults known = results_;
      lock.unlock();
      std::optional<json> result;
      if (!interrupt.came()) result = do_one(*run, name, known, interrupt);
      lock.lock();
      running_.erase(name);
      if (result) {
        results_.insert_or_assign(name, std::move(*result));
      } else {
        stopped_ = true;
      }
      changed_.notify_all();
    }
  }

  /// @param known  Runs that are done.
  std::optional<json> do_one(const StudyRun& run, const std::string& name, const RunResults& known,
                             const InterruptRequest& interrupt) {
    const auto start = Clock::now();
    ProgressBar bar(static_cast<int>(run.steps));
    const StudyPlace place{.study = place_.study,
                           .text = place_.text,
                           .valid = place_.valid,
                           .results = known,
                           .directory = place_.directory,
                           .backend = place_.backend,
                           .num_threads = place_.num_threads,
                           .machine = place_.machine,
                           .limits = place_.limits};
    const double expected = estimated_seconds(place, run);
    const RunCalls calls = {.on_step =
                                [&](const models::StepRecord& record) {
                                  bar.show(static_cast<int>(record.step),
                                           fmt::format("{}: loss {:.3f}", name, record.loss));
                                },
                            .stop = [&] { return interrupt.came() || stopped_; }};
    std::optional<json> result;
    try {
      result = do_run(place, run, calls);
    } catch (const Error& error) {
      bar.clear();
      throw at_place(name, error);
    }
    bar.clear();
    if (!result) return result;
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const std::lock_guard lock(mutex_);
    spent_ += seconds;
    expected_ += expected;
    ++done_;
    if (!options_.json) {
      fmt::print("{:>4}  {:<32} rate {:<9.4g} {} nats/byte, {}\n", done_, name, run.rate,
                 loss_words((*result)["loss"]), human_duration(seconds));
      std::fflush(stdout);
    }
    return result;
  }

  /// Once for a directory. Who interrupts does not wait for it.
  void count_floors() {
    floors_ = counted_floors(place_.directory, text_json(text_), text_json(valid_));
    if (floors_.empty() && !stopped_) floors_ = models::witten_bell_floors(text_, valid_);
  }

  static json text_json(const models::Text& text) {
    return {{"documents", text.documents().size()},
            {"bytes", text.num_bytes()},
            {"fingerprint", text.fingerprint()}};
  }

  [[nodiscard]] json study_document() const {
    json document = start_document(options_);
    document["study"] = study_.name;
    document["what"] = printable(study_.what, SIZE_MAX);
    document["reference"] = study_.arms[study_.reference].name;
    document["seeds"] = study_.seeds;
    document["tuning"] = {{"seed", study_.tuning.seed},
                          {"steps", study_.tuning.steps},
                          {"rates", study_.tuning.rates},
                          {"extend", study_.tuning.extend}};
    const models::TrainConfig& train = study_.arms.front().train;
    document["steps"] = train.schedule.steps;
    document["tokens"] = tokens();
    document["equal_time"] = study_.equal_time;
    document["text"] = text_json(text_);
    document["valid"] = text_json(valid_);
    document["floors"] = floors_;
    document["runs"] = {{"planned", planned_},
                        {"finished", results_.size()},
                        {"whole", !next_run(study_, all_arms(), results_).has_value()}};
    document["estimate"] = {{"seconds", expected_}, {"measured_seconds", spent_}, {"runs", done_}};
    document["arms"] = findings_of(study_, results_);
    for (std::size_t i = 0; i < study_.arms.size(); ++i) {
      document["arms"][i]["model"] = arm_words(study_, study_.arms[i]);
    }
    document["sentences"] = sentences_of(study_, document["arms"], floors_, passes());
    return document;
  }

  /// That each arm is trained on, here bytes of text.
  [[nodiscard]] std::int64_t tokens() const {
    const models::TrainConfig& train = study_.arms.front().train;
    return train.schedule.steps * train.sequences * train.model.sequence;
  }
  [[nodiscard]] double passes() const {
    return static_cast<double>(tokens()) / static_cast<double>(text_.num_bytes());
  }
  [[nodiscard]] int jobs() const { return static_cast<int>(options_.jobs); }
  [[nodiscard]] std::vector<std::size_t> all_arms() const {
    std::vector<std::size_t> arms(study_.arms.size());
    std::iota(arms.begin(), arms.end(), std::size_t{0});
    return arms;
  }

  void print() const {
    print_findings(document_);
    if (done_ > 0) {
      fmt::print("\n{} run{} in {}, estimate {:+.0f}%\n", done_, done_ == 1 ? "" : "s",
                 human_duration(seconds_), 100 * (expected_ / spent_ - 1));
    } else {
      fmt::print("\n{}\n", stopped_ ? "no run was ended" : "all runs were done before");
    }
    fmt::print("{}\n", printable((place_.directory / kStudyFile).string()));
  }

  const Options& options_;
  StudyConfig study_;
  std::vector<std::size_t> arms_;
  models::Text text_, valid_;
  StudyPlace place_;
  std::optional<DirectoryLock> lock_;  ///< Of the directory.
  RunResults results_;
  std::set<std::string> checked_;
  std::vector<double> floors_;
  json document_;
  std::size_t planned_ = 0, left_ = 0, done_ = 0;
  double estimate_ = 0, expected_ = 0;
  double spent_ = 0, seconds_ = 0;  ///< Of all runs together; from the first one's begin.
  std::mutex mutex_;                ///< Of results_ and all that follows.
  std::condition_variable changed_;
  std::set<std::string> running_;
  std::exception_ptr error_;
  std::atomic<bool> stopped_ = false;
};

}  // namespace

int study_command(const Options& options) {
  check_place(options);
  Study study(options);
  study.announce();
  return options.estimate ? study.estimate_only() : study.measure();
}

}  // namespace switchyard::tool
