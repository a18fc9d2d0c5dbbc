// How far the CPU experts are from the roof: max(bytes / memory, FLOPs / peak) over the time of one
// call, and how they compare with oneDNN. Runs of ours, of the peer and of the roofs alternate,
// each evicting the others' weights from the caches; figures are medians.
#include "bench/cases/cpu_bars.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "bench/cases/experts_alone.hpp"
#include "bench/cases/quantised_pool.hpp"
#include "bench/peers/onednn.hpp"
#include "core/cpu/memory.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "experts/cpu/roofs/roofs.hpp"

namespace switchyard::bench {
namespace {

using Clock = std::chrono::steady_clock;

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
        reader_(cpu::find_kernels(isa_in_use(), DType::kF32, WeightFormat::kExact)),
        spinner_(peak_kernels(isa_in_use(), dtype, &pool)),
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

}  // namespace

CaseResult run_cpu_bar_case(const LayerCase& c, const Limits& limits) {
  CaseResult result = start_result(c, limits);
  const ExpertConfig& config = c.config.experts;
  const bool stored = has_codes(c.options.weights);
  std::unique_ptr<ExpertSource> made;
  if (stored) {
    made = std::make_unique<QuantisedPool>(config, c.options.weights, c.seed);
  } else {
    made = std::make_unique<PoolSource>(config, c.dtype, c.seed);
  }
  const ExpertSource& source = *made;
  ThreadPool pool(c.num_threads);
  RoofMeter roofs(c.dtype, pool);
  const bool beside_exact = c.options.weights != WeightFormat::kExact;
  ExpertsAlone ours(c, source, c.options.weights, pool);
  std::unique_ptr<ExpertsAlone> exact;
  std::unique_ptr<OnednnLoop> peer;
  const auto unavailable = OnednnLoop::unavailable(config, c.dtype);
  if (beside_exact) {
    exact = std::make_unique<ExpertsAlone>(c, source, WeightFormat::kExact, pool);
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
      // Its threads look for work for 300,000 turns (some 6 ms) before they rest; while they did,
      // a quarter of the memory's rate was missing to all that followed (Zen 3, 2026-11-21).
      std::this_thread::sleep_for(std::chrono::milliseconds(25));
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
  const BarTarget target = target_of(c, rows);
  const double other = other_us.empty() ? 0 : median(other_us);
  const double ratio = beside_exact ? us / other : other / us;
  const bool ratio_holds =
      other_us.empty() || (beside_exact ? ratio <= target.ratio : ratio >= target.ratio);
  result.holds = ratio_holds && share >= target.share;
  result.limits.bandwidth = roofs.bytes_per_us() * 1e6;
  (c.dtype == DType::kF32 ? result.limits.flops_f32 : result.limits.flops_bf16) =
      roofs.flops_per_us() * 1e6;
  const char* name = beside_exact ? "exact" : "onednn";
  if (other > 0) result.peers[name] = other;
  result.verdict = fmt::format(
      "{}: {:.1f} rows per expert hit, {:.0f} us, share of the roof {:.2f} (want {:.2f}); {}",
      c.name, rows, us, share, target.share,
      other > 0 ? fmt::format("{} {:.0f} us, ratio {:.2f} (want {:.2f}), error {:.1e}", name, other,
                              ratio, target.ratio,
                              relative_error(ours.out(), beside_exact ? exact->out() : peer->out()))
                : unavailable.value_or(""));
  result.more = {{"bar", c.name},           {"value", ratio},
                 {"target", target.ratio},  {"holds", result.holds},
                 {"roof_share", share},     {"roof_share_target", target.share},
                 {"rows_per_expert", rows}, {"experts_us", us}};
  if (stored) {  // no bar: what there is to know, and the same bits
    for (const char* key : {"bar", "target", "holds", "roof_share_target"}) result.more.erase(key);
    result.holds = ours.out() == exact->out();
  }
  std::vector<StageSamples> samples = stages.samples();
  layer_last(samples);
  result.stages = judge(samples, result.limits, c.dtype);
  return result;
}

}  // namespace switchyard::bench
