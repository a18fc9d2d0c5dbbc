// What a load must do: bring the files' bytes in and write the weights once. Reading and copying
// are timed by themselves, loading as users do it, round by round in turn.
#include "bench/cases/load_case.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "bench/cases/plain_files.hpp"
#include "bench/measure/process_memory.hpp"
#include "core/cpu/memory.hpp"
#include "switchyard/checkpoint.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kWarm = "load warm";
constexpr const char* kCold = "load cold";

template <class Body>
double microseconds(const Body& body) {
  const auto start = Clock::now();
  body();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

/// One pass over `bytes` at the memory's speed: a copy, large pieces at a time.
class CopyMeter {
 public:
  CopyMeter(ThreadPool& pool, double bytes)
      : pool_(pool),
        bytes_(static_cast<std::int64_t>(bytes)),
        from_(kPiece * kSources),
        to_(static_cast<std::size_t>(bytes_)) {
    // Memory that nobody has written is one page of zeros, which the caches hold.
    std::memset(from_.data(), 1, static_cast<std::size_t>(kPiece * kSources));
    run();
  }

  void run() const {
    const std::int64_t pieces = (bytes_ + kPiece - 1) / kPiece;
    pool_.parallel_for(pieces, [&](std::int64_t i, int) {
      std::memcpy(to_.data() + i * kPiece, from_.data() + i % kSources * kPiece,
                  static_cast<std::size_t>(std::min(kPiece, bytes_ - i * kPiece)));
    });
  }

 private:
  static constexpr std::int64_t kPiece = std::int64_t{32} << 20;
  static constexpr std::int64_t kSources = 8;

  ThreadPool& pool_;
  std::int64_t bytes_;
  cpu::HugeBuffer from_;
  cpu::HugeBuffer to_;
};

/// While it lives, freed memory stays with the process: what is loaded next lies in pages that have
/// been touched before. The first touch of a page costs its zeroing, and on a virtual machine
/// whatever its host does to find one: between 0.1 and 1.4 s a GB on one machine within a minute,
/// which says nothing about loading.
class KeptMemory {
 public:
#if defined(__GLIBC__)
  KeptMemory() {
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, -1);
  }
  ~KeptMemory() {
    mallopt(M_MMAP_MAX, 65536);
    mallopt(M_TRIM_THRESHOLD, 128 << 10);
    malloc_trim(0);
  }
#else
  KeptMemory() = default;
#endif
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
};

using Weights = std::vector<std::unique_ptr<ExpertWeights>>;

/// As a layer loads them, layer after layer.
Weights load(const LayerCase& c, ThreadPool& pool) {
  const Checkpoint checkpoint(c.checkpoint);
  Weights all;
  for (const std::int32_t index : checkpoint.moe_layers()) {
    const LayerModel model = checkpoint.layer(index);
    all.push_back(load_experts({.config = model.config.experts,
                                .source = model.experts.get(),
                                .dtype = c.options.compute.value_or(model.experts->dtype()),
                                .num_local = model.config.experts.num_experts,
                                .format = c.options.weights,
                                .execution = {.pool = &pool}}));
  }
  return all;
}

bool keeps_codes(const LayerCase& c) {
  return c.options.weights == WeightFormat::kStored || has_codes(c.options.weights);
}

/// Codes and scales of all experts as the files have them; 0: they are numbers there.
double stored_bytes(const LayerCase& c) {
  const Checkpoint checkpoint(c.checkpoint);
  double sum = 0;
  for (const std::int32_t index : checkpoint.moe_layers()) {
    const LayerModel model = checkpoint.layer(index);
    const ExpertSource& source = *model.experts;
    if (!has_codes(source.stored_format())) continue;
    const ExpertConfig& config = model.config.experts;
    const auto matrix = [&](std::int64_t rows, std::int64_t cols) {
      const StoredLayout layout{source.stored_format(), source.dtype(), rows, cols,
                                source.int4_form()};
      return static_cast<double>(layout.value_bytes() + layout.scale_bytes());
    };
    sum += config.num_experts * ((config.gated ? 2 : 1) * matrix(config.inner, config.hidden) +
                                 matrix(config.hidden, config.inner));
  }
  return sum;
}

double bytes_of(const Weights& weights) {
  double sum = 0;
  for (const auto& layer : weights) sum += layer->bytes_per_expert() * layer->num_local();
  return sum;
}

struct Samples {
  std::vector<double> read_us, copy_us, load_us;

  void forget() {
    for (auto* list : {&read_us, &copy_us, &load_us}) list->clear();
  }
};

void sample(const LayerCase& c, const PlainFiles& files, ThreadPool& pool, double weights_bytes,
            Samples& out) {
  const bool is_cold = c.name == kCold;
  if (is_cold) files.drop();
  out.read_us.push_back(microseconds([&] { files.read(pool); }));
  if (is_cold) files.drop();
  {
    Weights weights;
    out.load_us.push_back(microseconds([&] { weights = load(c, pool); }));
  }
  const CopyMeter copy(pool, weights_bytes);
  out.copy_us.push_back(microseconds([&] { copy.run(); }));
}

/// The first load of a process: into new memory, which is when its size can be seen.
struct FirstLoad {
  double us = 0;
  double peak_bytes = 0;  ///< Resident at most, less what was resident before.
  double weights_bytes = 0;
};

FirstLoad load_first(const LayerCase& c, const PlainFiles& files, ThreadPool& pool) {
  if (c.name == kCold) files.drop();
  FirstLoad first;
  Weights weights;
  forget_peak();
  const auto before = static_cast<double>(resident_bytes());
  first.us = microseconds([&] { weights = load(c, pool); });
  first.peak_bytes = static_cast<double>(peak_resident_bytes()) - before;
  first.weights_bytes = bytes_of(weights);
  return first;
}

StageFigures stage(const char* name, const std::vector<double>& us, double bytes, double limit_us) {
  StageFigures figures{.stage = name, .us = statistics(us), .samples = us.size()};
  figures.work.bytes = bytes;
  figures.limit_us = limit_us;
  figures.share = limit_us / figures.us.median;
  return figures;
}

}  // namespace

std::vector<LayerCase> load_cases(const LayerCase& base) {
  std::vector<LayerCase> cases(2, base);
  const Checkpoint checkpoint(base.checkpoint);
  const LayerConfig config = checkpoint.layer(checkpoint.moe_layers().front()).config;
  for (LayerCase& c : cases) c.config = config;
  cases[0].name = kWarm;
  cases[1].name = kCold;
  return cases;
}

CaseResult run_load_case(const LayerCase& c, const Limits& limits) {
  constexpr double kMostTime = 1.15;
  constexpr double kMostMemory = 1.10;
  constexpr double kMostOfStored = 1.02;
  CaseResult result = start_result(c, limits);
  ThreadPool pool(c.num_threads);
  const PlainFiles files(c.checkpoint);
  const FirstLoad first = load_first(c, files, pool);
  const KeptMemory kept;
  Samples samples;
  RunCounter counter(c.count);
  for (int run = 0; run < counter.total(); ++run) {
    if (run == counter.warmup()) samples.forget();
    const auto start = Clock::now();
    sample(c, files, pool, first.weights_bytes, samples);
    if (run == 0) counter.set_time(Clock::now() - start);
  }
  const double read_us = statistics(samples.read_us).median;
  const double copy_us = statistics(samples.copy_us).median;
  const double load_us = statistics(samples.load_us).median;
  const double ratio = load_us / (read_us + copy_us);
  const double memory = first.peak_bytes / first.weights_bytes;
  result.what.cold = c.name == kCold;
  result.verdict = fmt::format(
      "{}: {:.0f} ms, reading {:.0f} ms and one copy {:.0f} ms, ratio {:.2f}; the first load, into "
      "new memory, {:.0f} ms, peak {:.3f} of the weights",
      c.name, load_us * 1e-3, read_us * 1e-3, copy_us * 1e-3, ratio, first.us * 1e-3, memory);
  result.more = {{"read_us", read_us},
                 {"copy_us", copy_us},
                 {"first_load_us", first.us},
                 {"file_bytes", files.bytes()},
                 {"weights_bytes", first.weights_bytes},
                 {"peak_resident_bytes", first.peak_bytes},
                 {"peak_share", memory}};
  // Of codes it is asked that they are kept as they are; repacking them takes its time.
  if (const double stored = keeps_codes(c) ? stored_bytes(c) : 0; stored > 0) {
    const double of_stored = first.weights_bytes / stored;
    result.verdict += fmt::format("; {:.4f} of the codes and scales in the files (want {:.2f})",
                                  of_stored, kMostOfStored);
    result.holds = of_stored <= kMostOfStored;
    result.more.update(
        {{"bar", "Q9"}, {"value", of_stored}, {"target", kMostOfStored}, {"stored_bytes", stored}});
  } else {
    result.verdict += fmt::format(" (want {:.2f} and {:.2f})", kMostTime, kMostMemory);
    result.holds = ratio <= kMostTime && memory <= kMostMemory;
    result.more.update({{"bar", "load"},
                        {"value", ratio},
                        {"target", kMostTime},
                        {"peak_share_target", kMostMemory}});
  }
  result.more["holds"] = result.holds;
  result.stages = {
      stage("read", samples.read_us, files.bytes(), read_us),
      stage("copy", samples.copy_us, 2 * first.weights_bytes, copy_us),
      stage("load", samples.load_us, files.bytes() + first.weights_bytes, read_us + copy_us)};
  return result;
}

}  // namespace switchyard::bench
