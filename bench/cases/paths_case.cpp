// Paths of the experts in turns.
#include "bench/cases/paths_case.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "bench/cases/synthetic.hpp"
#include "bench/layer/router_alone.hpp"
#include "bench/measure/inference.hpp"
#include "bench/measure/run_clock.hpp"
#include "bench/measure/stage_memory.hpp"
#include "bench/peers/torch.hpp"

namespace switchyard::bench {
namespace {

constexpr int kRepeats = 3;
constexpr int kStagesEvery = 3;  // turns: those between take the time of the whole only
constexpr const char* kBar = "G11";

/// The data that all paths share, where the backend reads it.
struct Shared {
  LayerModel model;
  std::vector<std::byte> host_tokens;
  SyntheticRouting routing;
  StageMemory memory;
  ConstRawMatrix tokens;
  Matrix<const std::int32_t> expert;
  Matrix<const float> weight;
  std::unique_ptr<RouterAlone> router;

  explicit Shared(const LayerCase& c)
      : model(synthetic_layer(c.config, c.router_bias, c.selection_bias, c.dtype, c.seed)),
        host_tokens(synthetic_tokens(c.num_tokens, c.config.experts.hidden, c.dtype, c.seed)),
        routing(synthetic_routing(c.num_tokens, c.config.router.num_experts,
                                  c.config.router.top_k(), c.skew, c.seed)),
        memory(c.options.backend) {
    const std::int64_t top_k = c.config.router.top_k();
    tokens = memory.place(
        ConstRawMatrix{host_tokens.data(), c.dtype, c.num_tokens, c.config.experts.hidden});
    expert = memory.place(Matrix<const std::int32_t>{routing.expert.data(), {c.num_tokens, top_k}});
    weight = memory.place(Matrix<const float>{routing.weight.data(), {c.num_tokens, top_k}});
    router = std::make_unique<RouterAlone>(model, tokens, c.options.backend, c.num_threads);
  }
};

LayerOptions options_of(const LayerCase& c) {
  LayerOptions options = c.options;
  options.num_threads = c.num_threads;
  options.max_tokens = c.num_tokens;
  return options;
}

/// Medians of the repeats that the turns are dealt to.
std::vector<double> repeats_of(const std::vector<double>& turns) {
  std::vector<double> medians;
  for (std::size_t r = 0; r < kRepeats; ++r) {
    const auto begin = turns.begin() + static_cast<std::ptrdiff_t>(r * turns.size() / kRepeats);
    const auto end = turns.begin() + static_cast<std::ptrdiff_t>((r + 1) * turns.size() / kRepeats);
    if (begin != end) medians.push_back(statistics({begin, end}).median);
  }
  return medians;
}

/// What the turns would have taken at the mean pace: clocks that rise and fall with the power drawn
/// move all paths of a turn alike, and would hide differences of 1% between them.
std::vector<double> at_pace(std::vector<double> turns, const std::vector<double>& pace) {
  for (std::size_t i = 0; i < turns.size(); ++i) turns[i] /= pace[i];
  return turns;
}

/// One path with its own layer, output and times.
class Path {
 public:
  Path(const LayerCase& c, Shared& shared)
      : shared_(shared),
        layer_(shared.model, options_of(c)),
        out_{shared.memory.make(shared.tokens.bytes()), c.dtype, shared.tokens.rows,
             shared.tokens.cols},
        clock_(make_run_clock(c.options.backend, times_)) {}

  /// @returns microseconds.
  double run(bool is_first) {
    const MeasuredCall call = [&](StageRecorder* recorder, void* stream) {
      shared_.router->run(recorder, stream);
      layer_.forward({.tokens = shared_.tokens,
                      .out = out_,
                      .expert = shared_.expert,
                      .weight = shared_.weight,
                      .request = {.record = is_first && recorder != nullptr ? &record_ : nullptr},
                      .recorder = recorder,
                      .stream = stream});
    };
    if (us_.size() % kStagesEvery == 0) {
      times_.start_run();
      us_.push_back(clock_->run(this, call));
    } else {
      us_.push_back(clock_->run_whole(this, call));
    }
    layer_.check();
    return us_.back();
  }
  void forget() {
    times_.forget();
    us_.clear();
  }

  /// Microseconds of each turn.
  [[nodiscard]] const std::vector<double>& turns() const { return us_; }
  [[nodiscard]] std::vector<std::byte> out() const {
    std::vector<std::byte> bytes(static_cast<std::size_t>(out_.bytes()));
    shared_.memory.fetch(bytes.data(), out_.data, out_.bytes());
    return bytes;
  }
  /// @param pace  Of each turn: the time of all paths in it over the mean turn.
  [[nodiscard]] CaseResult result(const LayerCase& c, const Limits& limits,
                                  const std::vector<double>& pace) const {
    CaseResult result = start_result(c, limits);
    std::vector<StageSamples> samples = times_.samples();
    samples.push_back({.stage = "layer", .work = {}, .us = us_});
    layer_last(samples);
    result.stages = judge(samples, limits, layer_.compute_dtype());
    result.load = load_of(record_.counts, record_.counts_kept);
    const Interval interval = interval_of(repeats_of(at_pace(us_, pace)));
    result.more = {{"rows", {{"used", layer_.rows_used()}, {"executed", layer_.rows_executed()}}},
                   {"repeats_us", repeats_of(us_)},
                   {"interval_us", {interval.low, interval.high}}};
    if (!c.bar.empty()) result.more["point_of"] = c.bar;
    double experts_us = 0;
    for (const StageFigures& stage : result.stages) {
      if (stage.stage.starts_with("gemm")) experts_us += stage.us.median;
    }
    const double layer_us = result.stages.back().us.median;
    result.routing_share = layer_us > 0 ? std::max(0.0, 1 - experts_us / layer_us) : 0;
    return result;
  }

 private:
  Shared& shared_;
  MoeLayer layer_;
  RawMatrix out_;
  RoutingRecord record_;
  StageTimes times_;
  std::unique_ptr<RunClock> clock_;
  std::vector<double> us_;
};

bool is_padded(const CaseResult& result) { return result.what.layout == "padded"; }
double median_of(const CaseResult& result) { return result.stages.back().us.median; }
double low_of(const CaseResult& result) { return result.more.at("interval_us")[0]; }
double high_of(const CaseResult& result) { return result.more.at("interval_us")[1]; }

/// Of each turn, the time of all paths in it over that of the mean turn.
std::vector<double> pace_of(const std::vector<std::unique_ptr<Path>>& paths) {
  std::vector<double> pace(paths.front()->turns().size(), 0);
  for (const auto& path : paths) {
    for (std::size_t i = 0; i < pace.size(); ++i) pace[i] += path->turns()[i];
  }
  double mean = 0;
  for (const double us : pace) mean += us / static_cast<double>(pace.size());
  for (double& us : pace) us /= mean;
  return pace;
}

/// Rows that the layout makes, over those that are used.
double padding_of(const CaseResult& result) {
  const double used = result.more.at("rows").at("used");
  return used > 0 ? result.more.at("rows").at("executed").get<double>() / used : 1;
}

void compare(std::vector<CaseResult>& results) {
  const auto padded = std::find_if(results.begin(), results.end(), is_padded);
  if (padded == results.end()) return;
  for (CaseResult& result : results) {
    if (is_padded(result)) continue;
    const bool apart = high_of(result) < low_of(*padded);
    const bool pays = low_of(*padded) / high_of(result) <= padding_of(*padded);
    result.more["padded_us"] = median_of(*padded);
    result.more["faster_than_padded"] = apart;
    result.more["padded_pays_its_padding"] = pays;
    result.more["padding"] = padding_of(*padded);
  }
}

/// The share of the grid for which `key` is true, as a line of its own.
CaseResult judge_share(const std::vector<const CaseResult*>& points, const char* key,
                       const char* name, double target) {
  CaseResult out;
  const CaseResult& first = *points.front();
  out.what = {.name = name, .compute = "f16, bf16", .layout = "compact", .skew = first.what.skew};
  out.limits = first.limits;
  out.backend = first.backend;
  out.seed = first.seed;
  StageFigures whole{.stage = "layer", .samples = points.size()};
  double padded = 0;
  int holds = 0;
  for (const CaseResult* point : points) {
    whole.us.median += median_of(*point);
    whole.us.p95 += point->stages.back().us.p95;
    whole.us.mean += point->stages.back().us.mean;
    padded += point->more.at("padded_us").get<double>();
    holds += point->more.at(key).get<bool>() ? 1 : 0;
  }
  const double share = static_cast<double>(holds) / static_cast<double>(points.size());
  out.stages = {whole};
  out.peers["padded"] = padded;
  out.verdict = fmt::format("{} {}: {} of {} points (want {:.2f} of them)", kBar, name, holds,
                            points.size(), target);
  out.more = {{"bar", kBar}, {"value", share}, {"target", target}, {"holds", share >= target}};
  return out;
}

}  // namespace

std::vector<CaseResult> run_paths_case(const std::vector<LayerCase>& paths, const Machine& machine,
                                       const Limits& limits) {
  const LayerCase& c = paths.front();
  Shared shared(c);
  std::vector<std::unique_ptr<Path>> runs;
  for (const LayerCase& path : paths) runs.push_back(std::make_unique<Path>(path, shared));
  RunCounter counter(c.count);
  for (int turn = 0; turn < counter.total(); ++turn) {
    if (turn == counter.warmup()) {
      for (const auto& run : runs) run->forget();
    }
    double us = 0;
    for (const auto& run : runs) us += run->run(turn == 0);
    // On CUDA the clock runs each twice: by events and as a graph.
    const int times = c.options.backend == Backend::kCuda ? 2 : 1;
    if (turn == 0) counter.set_time(std::chrono::duration<double, std::micro>(times * us));
  }
  const std::vector<std::byte> first = runs.front()->out();
  const double bytes = static_cast<double>(c.config.experts.num_experts * c.config.experts.hidden *
                                           c.config.experts.inner) *
                       (c.config.experts.gated ? 3.0 : 2.0) * static_cast<double>(size_of(c.dtype));
  const std::vector<double> pace = pace_of(runs);
  std::vector<CaseResult> results;
  for (std::size_t i = 0; i < paths.size(); ++i) {
    results.push_back(runs[i]->result(paths[i], limits, pace));
    // Between two runs of a path come those of the others, each with weights of its own.
    results.back().what.cold = bytes * static_cast<double>(paths.size()) >=
                               static_cast<double>(machine.largest_cache(c.options.backend));
    results.back().more["same_bits"] = i == 0 || runs[i]->out() == first;
  }
  compare(results);
  const ConstRawMatrix x{shared.host_tokens.data(), c.dtype, c.num_tokens, c.config.experts.hidden};
  for (CaseResult& result : results) {  // its rows lie without gaps
    if (c.peer_torch == nullptr || result.what.layout != "compact") continue;
    c.peer_torch->measure({.work = "layer",
                           .c = c,
                           .tokens = x,
                           .routing = shared.routing,
                           .gate = shared.model.gate.floats()},
                          result);
  }
  return results;
}

std::vector<CaseResult> judge_paths(const std::vector<CaseResult>& results) {
  std::vector<const CaseResult*> points;
  for (const CaseResult& result : results) {
    const bool is_point = result.more.is_object() && result.more.value("point_of", "") == kBar;
    if (is_point && result.what.layout == "compact") points.push_back(&result);
  }
  if (points.empty()) return {};
  return {
      judge_share(points, "faster_than_padded", "layer grid: compact faster than padded", 2.0 / 3),
      judge_share(points, "padded_pays_its_padding",
                  "layer grid: padded pays no more than its padding", 1)};
}

}  // namespace switchyard::bench
