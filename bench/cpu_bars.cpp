// How far the CPU experts are from the roof: max(bytes / memory, FLOPs / peak) over the time of one
// call, and how they compare with oneDNN. Runs of ours, of the peer and of the roofs alternate,
// each evicting the others' weights from the caches; figures are medians.
#include "bench/cpu_bars.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <thread>

#include "bench/peer_onednn.hpp"
#include "bench/synthetic.hpp"
#include "core/half.hpp"
#include "experts/cpu_kernels.hpp"
#include "experts/cpu_memory.hpp"
#include "experts/cpu_roofs.hpp"
#include "switchyard/plan.hpp"

namespace switchyard::bench {
namespace {

using Clock = std::chrono::steady_clock;

/// Weights cut from a pool of random values: fast to make, however many.
class PoolSource final : public ExpertSource {
 public:
  PoolSource(const ExpertConfig& config, DType dtype, std::uint64_t seed)
      : config_(config), dtype_(dtype), values_(kPool) {
    Random random(seed);
    const double scale = 1 / std::sqrt(static_cast<double>(config.hidden));
    for (float& value : values_) {
      value = round_to(dtype, static_cast<float>(random.normal() * scale));
    }
  }
  [[nodiscard]] DType dtype() const override { return dtype_; }
  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    const std::int64_t cols = part == ExpertPart::kDown ? config_.inner : config_.hidden;
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const std::int64_t place = (first_row + row) * 7919 + expert * std::int64_t{104729} +
                                 static_cast<std::int64_t>(part) * 31;
      const float* from = values_.data() + place % (kPool - cols);
      for (std::int64_t i = 0; i < cols; ++i) store_float(out, dtype, row * cols + i, from[i]);
    }
  }
  void read_bias(std::int32_t, ExpertPart, float*) const override {}

 private:
  static constexpr std::int64_t kPool = 1 << 20;
  ExpertConfig config_;
  DType dtype_;
  std::vector<float> values_;
};

template <class Body>
double microseconds(const Body& body) {
  const auto start = Clock::now();
  body();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

double median(const std::vector<double>& samples) { return statistics(samples).median; }

/// The roofs, a little at a time.
class RoofMeter {
 public:
  RoofMeter(DType dtype, ThreadPool& pool)
      : pool_(pool),
        reader_(cpu::find_kernels(isa_in_use(), DType::kF32, false)),
        spinner_(cpu::find_kernels(isa_in_use(), dtype, false)),
        streams_(measure_cpu_roofs(isa_in_use(), &pool).streams),
        memory_(static_cast<std::size_t>(kParts * kPart)) {
    std::memset(memory_.data(), 1, static_cast<std::size_t>(kParts * kPart));
  }

  void sample() {
    read_us_.push_back(microseconds([&] {
      pool_.parallel_for(kParts, [&](std::int64_t i, int) {
        reader_.read(memory_.data() + i * kPart, kPart, streams_);
      });
    }));
    spin_us_.push_back(microseconds([&] {
      pool_.parallel_for(pieces(), [&](std::int64_t, int) { spinner_.spin(rounds()); });
    }));
  }
  [[nodiscard]] double bytes_per_us() const {
    return static_cast<double>(kParts * kPart) / median(read_us_);
  }
  [[nodiscard]] double flops_per_us() const {
    return spinner_.spin_flops * static_cast<double>(rounds() * pieces()) / median(spin_us_);
  }

 private:
  static constexpr std::int64_t kPart = 512 << 10;
  static constexpr std::int64_t kParts = 256;
  [[nodiscard]] std::int64_t pieces() const { return 8 * pool_.num_threads(); }
  [[nodiscard]] std::int64_t rounds() const {
    return static_cast<std::int64_t>(1e7 / spinner_.spin_flops);
  }

  ThreadPool& pool_;
  const cpu::Kernels& reader_;
  const cpu::Kernels& spinner_;
  int streams_;
  cpu::HugeBuffer memory_;
  std::vector<double> read_us_;
  std::vector<double> spin_us_;
};

/// experts() with the fused combine on made-up tokens and routing.
class Ours {
 public:
  Ours(const LayerCase& c, const ExpertSource& source, bool q8, ThreadPool& pool)
      : config_(c.config.experts), pool_(pool) {
    const std::int64_t top_k = c.config.router.top_k;
    tokens_ = synthetic_tokens(c.num_tokens, config_.hidden, c.dtype, c.seed);
    routing_ =
        synthetic_routing(c.num_tokens, config_.num_experts, c.config.router.top_k, c.skew, c.seed);
    weights_ = load_experts({.config = config_,
                             .source = &source,
                             .dtype = c.dtype,
                             .num_local = config_.num_experts,
                             .quantize_q8 = q8,
                             .execution = {.pool = &pool}});
    x_ = {tokens_.data(), c.dtype, c.num_tokens, config_.hidden};
    view_ = plan_.reserve(c.num_tokens, top_k, config_.num_experts, c.num_tokens * top_k);
    plan({.expert = expert(), .weight = weight(), .plan = view_, .execution = {.pool = &pool}});
    out_.resize(static_cast<std::size_t>(c.num_tokens * config_.hidden));
  }

  [[nodiscard]] Matrix<const std::int32_t> expert() const {
    return {routing_.expert.data(), {x_.rows, num_assignments() / x_.rows}};
  }
  [[nodiscard]] Matrix<const float> weight() const {
    return {routing_.weight.data(), {x_.rows, num_assignments() / x_.rows}};
  }
  [[nodiscard]] const ConstRawMatrix& tokens() const { return x_; }
  [[nodiscard]] std::int64_t num_assignments() const {
    return static_cast<std::int64_t>(routing_.expert.size());
  }
  [[nodiscard]] std::int64_t hit() const {
    return static_cast<std::int64_t>(
        std::set<std::int32_t>(routing_.expert.begin(), routing_.expert.end()).size());
  }
  [[nodiscard]] double weight_bytes() const {
    return weights_->bytes_per_expert() * static_cast<double>(hit());
  }
  [[nodiscard]] const std::vector<float>& out() const { return out_; }

  void run(StageRecorder* recorder) {
    experts({.x = x_,
             .plan = view_,
             .weights = weights_.get(),
             .reduced = {.sums = {reinterpret_cast<std::byte*>(out_.data()), DType::kF32, x_.rows,
                                  config_.hidden},
                         .subtree = {.order = {.num_experts = config_.num_experts}}},
             .execution = {.pool = &pool_, .recorder = recorder}});
  }

 private:
  ExpertConfig config_;
  ThreadPool& pool_;
  std::vector<std::byte> tokens_;
  SyntheticRouting routing_;
  std::unique_ptr<ExpertWeights> weights_;
  ConstRawMatrix x_;
  Plan plan_;
  PlanView view_;
  std::vector<float> out_;
};

/// Largest difference over the largest magnitude.
double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference = std::max(difference, static_cast<double>(std::abs(a[i] - b[i])));
    size = std::max(size, static_cast<double>(std::abs(b[i])));
  }
  return difference / size;
}

/// What a bar asks for.
struct Target {
  double ratio = 0;  ///< Peer / ours, at least; of C7 ours / bf16, at most.
  double share = 0;  ///< Of the roof, at least; 0: nothing is asked.
};

Target target_of(const LayerCase& c, double rows_per_expert) {
  const std::string& bar = c.name;
  const std::int64_t tokens = c.num_tokens;
  const auto by_rows = [&](double two, double twelve, double thirty, double more) {
    return rows_per_expert <= 2    ? two
           : rows_per_expert <= 12 ? twelve
           : rows_per_expert < 32  ? thirty
                                   : more;
  };
  if (bar == "C1") return {tokens == 1 ? 1.5 : tokens == 4 ? 1.6 : 1.3, by_rows(.88, .75, 0, 0)};
  if (bar == "C2") {
    return {tokens == 64 ? 1.2 : tokens == 128 ? 1.15 : 1.08, by_rows(0, .75, .85, .92)};
  }
  if (bar == "C3") return {1.6, .88};
  if (bar == "C4") {
    return {tokens == 64 ? 1.8 : tokens == 128 ? 2.0 : 2.2, by_rows(0, .85, .80, .65)};
  }
  if (bar == "C7") return {0.62, 0};
  const double first = bar == "C5" ? 1.4 : 1.5;
  return {tokens == 1 ? first : tokens == 16 ? 1.0 : 1.05, by_rows(.88, .65, 0, .85)};
}

}  // namespace

std::vector<LayerCase> cpu_bar_cases(const LayerCase& base) {
  struct Sizes {
    std::int64_t hidden, inner;
    std::int32_t experts, top_k;
  };
  constexpr Sizes kLayers[] = {{1024, 4096, 8, 2}, {2048, 1024, 64, 6}, {2048, 768, 128, 8}};
  struct Row {
    const char* bar;
    DType dtype;
    std::vector<std::int64_t> tokens;
  };
  const CpuIsa isa = isa_in_use();
  std::vector<Row> rows;
  if (isa == CpuIsa::kAmxBf16) {
    rows = {{"C3", DType::kBF16, {1, 4, 16}}, {"C4", DType::kBF16, {64, 128, 512}}};
  } else if (isa == CpuIsa::kAvx512Bf16) {
    rows = {{"C1", DType::kBF16, {1, 4, 16}}, {"C2", DType::kBF16, {64, 128, 512}}};
  } else {
    rows = {{isa == CpuIsa::kAvx512 ? "C6" : "C5", DType::kF32, {1, 16, 128}}};
  }
  rows.push_back({"C7", DType::kBF16, {1, 4}});
  std::vector<LayerCase> cases;
  for (const Row& row : rows) {
    for (const Sizes& sizes : kLayers) {
      for (const std::int64_t tokens : row.tokens) {
        LayerCase c = base;
        c.name = row.bar;
        c.dtype = row.dtype;
        c.options.compute = row.dtype;
        c.options.quantize_q8 = c.name == "C7";
        c.num_tokens = tokens;
        c.config.router = {.num_experts = sizes.experts, .top_k = sizes.top_k};
        c.config.experts = {
            .num_experts = sizes.experts, .hidden = sizes.hidden, .inner = sizes.inner};
        cases.push_back(std::move(c));
      }
    }
  }
  return cases;
}

CaseResult run_cpu_bar_case(const LayerCase& c, const Limits& limits) {
  CaseResult result = start_result(c, limits);
  const ExpertConfig& config = c.config.experts;
  const PoolSource source(config, c.dtype, c.seed);
  ThreadPool pool(c.num_threads);
  RoofMeter roofs(c.dtype, pool);
  const bool q8 = c.options.quantize_q8;
  Ours ours(c, source, q8, pool);
  std::unique_ptr<Ours> exact;
  std::unique_ptr<OnednnLoop> peer;
  const auto unavailable = OnednnLoop::unavailable(config, c.dtype);
  if (q8) {
    exact = std::make_unique<Ours>(c, source, false, pool);
  } else if (!unavailable) {
    peer = std::make_unique<OnednnLoop>(OnednnLoopArgs{.config = config,
                                                       .source = &source,
                                                       .tokens = ours.tokens(),
                                                       .expert = ours.expert(),
                                                       .weight = ours.weight(),
                                                       .num_threads = c.num_threads});
  }
  StageTimes stages;
  std::vector<double> ours_us;
  std::vector<double> other_us;
  RunCounter counter(c.count);
  for (int run = 0; run < counter.total(); ++run) {
    if (run == counter.warmup()) {
      stages.forget();
      ours_us.clear();
      other_us.clear();
    }
    const auto start = Clock::now();
    stages.start_run();
    roofs.sample();
    ours_us.push_back(microseconds([&] { ours.run(&stages); }));
    stages.add("layer", {}, ours_us.back());
    if (exact) other_us.push_back(microseconds([&] { exact->run(nullptr); }));
    if (peer) {
      other_us.push_back(microseconds([&] { peer->run(); }));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // until its threads rest
    }
    if (run == 0) counter.set_time(Clock::now() - start);
  }
  const double us = median(ours_us);
  const double flops =
      6.0 * static_cast<double>(ours.num_assignments() * config.hidden * config.inner);
  const double memory_us = ours.weight_bytes() / roofs.bytes_per_us();
  const double compute_us = flops / roofs.flops_per_us();
  const double share = std::max(memory_us, compute_us) / us;
  const double rows = static_cast<double>(ours.num_assignments()) / static_cast<double>(ours.hit());
  const Target target = target_of(c, rows);
  const double other = other_us.empty() ? 0 : median(other_us);
  const double ratio = q8 ? us / other : other / us;
  const bool ratio_holds = other_us.empty() || (q8 ? ratio <= target.ratio : ratio >= target.ratio);
  result.holds = ratio_holds && share >= target.share;
  result.limits.bandwidth = roofs.bytes_per_us() * 1e6;
  (c.dtype == DType::kF32 ? result.limits.flops_f32 : result.limits.flops_bf16) =
      roofs.flops_per_us() * 1e6;
  const char* name = q8 ? "exact" : "onednn";
  if (other > 0) result.peers[name] = other;
  result.verdict = fmt::format(
      "{}: {:.1f} rows per expert hit, {:.0f} us, share of the roof {:.2f} (want {:.2f}); {}",
      c.name, rows, us, share, target.share,
      other > 0 ? fmt::format("{} {:.0f} us, ratio {:.2f} (want {:.2f}), error {:.1e}", name, other,
                              ratio, target.ratio,
                              relative_error(ours.out(), q8 ? exact->out() : peer->out()))
                : unavailable.value_or(""));
  result.more = {{"bar", c.name},           {"value", ratio},
                 {"target", target.ratio},  {"holds", result.holds},
                 {"roof_share", share},     {"roof_share_target", target.share},
                 {"rows_per_expert", rows}, {"experts_us", us}};
  std::vector<StageSamples> samples = stages.samples();
  layer_last(samples);
  result.stages = judge(samples, result.limits, c.dtype);
  return result;
}

}  // namespace switchyard::bench
