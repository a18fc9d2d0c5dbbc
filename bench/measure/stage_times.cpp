// Times of the stages of a layer.
#include "bench/measure/stage_times.hpp"

#include <algorithm>
#include <cmath>

namespace switchyard::bench {
namespace {

/// The stage's entry, in order of first appearance; runs in which it did not come count as 0.
StageSamples& entry_of(std::vector<StageSamples>& samples, std::string_view stage,
                       std::size_t runs) {
  auto entry = std::find_if(samples.begin(), samples.end(),
                            [&](const StageSamples& s) { return s.stage == stage; });
  if (entry == samples.end()) {
    samples.push_back({.stage = std::string(stage), .work = {}, .us = {}, .implementation = {}});
    entry = samples.end() - 1;
  }
  if (entry->us.size() < runs) {
    entry->us.resize(runs);
    entry->work = {};  // the work of the last run is kept
  }
  return *entry;
}

/// The call whose choice decides what runs `stage`.
std::string_view call_of(std::string_view stage) {
  if (stage == "select") return "route";
  if (stage.starts_with("gemm")) return "experts";
  if (stage == "layer") return "plan+experts";
  return stage;
}

}  // namespace

std::string ChosenImplementations::of(std::string_view stage) const {
  const auto found = by_call_.find(call_of(stage));
  return found == by_call_.end() ? "" : found->second;
}

void StageTimes::begin(std::string_view, void*) { begin_ = Clock::now(); }

void StageTimes::end(std::string_view stage, const StageWork& work, void*) {
  const std::chrono::duration<double, std::micro> time = Clock::now() - begin_;
  add(stage, work, time.count());
}

void StageTimes::add(std::string_view stage, const StageWork& work, double us) {
  StageSamples& entry = entry_of(samples_, stage, std::max<std::size_t>(runs_, 1));
  entry.us.back() += us;
  entry.implementation = chosen_.of(stage);
  entry.work += work;
}

void StageTimes::count_rows(std::int64_t used, std::int64_t executed) {
  for (StageSamples& entry : samples_) {
    if (entry.work.most_rows > 0) entry.work = entry.work.of_rows(used, executed);
  }
}

void StageTimes::start_run() { ++runs_; }

void StageTimes::forget() {
  samples_.clear();
  runs_ = 0;
}

std::vector<StageSamples> merge_ranks(const std::vector<StageTimes>& ranks) {
  std::vector<StageSamples> merged;
  for (const StageTimes& rank : ranks) {
    for (const StageSamples& stage : rank.samples()) {
      StageSamples& entry = entry_of(merged, stage.stage, 0);
      entry.us.resize(std::max(entry.us.size(), stage.us.size()));
      for (std::size_t run = 0; run < stage.us.size(); ++run) {
        entry.us[run] = std::max(entry.us[run], stage.us[run]);
      }
      entry.work += stage.work;
      if (entry.implementation.empty()) entry.implementation = stage.implementation;
    }
  }
  return merged;
}

void layer_last(std::vector<StageSamples>& stages) {
  const auto layer = std::find_if(stages.begin(), stages.end(),
                                  [](const StageSamples& s) { return s.stage == "layer"; });
  std::rotate(layer, layer + 1, stages.end());
  StageSamples& whole = stages.back();
  whole.work = {};
  for (std::size_t i = 0; i + 1 < stages.size(); ++i) whole.work += stages[i].work;
}

Statistics statistics(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const auto count = static_cast<double>(samples.size());
  const auto at = [&](double share) {  // linear between neighbours
    const double position = share * (count - 1);
    const auto low = static_cast<std::size_t>(position);
    const std::size_t high = std::min(low + 1, samples.size() - 1);
    const double part = position - static_cast<double>(low);
    return samples[low] * (1 - part) + samples[high] * part;
  };
  Statistics out{.median = at(0.5), .p95 = at(0.95)};
  for (const double sample : samples) out.mean += sample / count;
  for (const double sample : samples) out.std += (sample - out.mean) * (sample - out.mean);
  out.std = std::sqrt(out.std / std::max(count - 1, 1.0));
  return out;
}

}  // namespace switchyard::bench
