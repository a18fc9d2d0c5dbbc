// A model of what a case takes: the roofs, how near each kernel comes to them, and what it costs to
// make up the data.
#include "bench/sweep/estimate.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

#include "bench/cases/synthetic.hpp"
#include "bench/sweep/capacity_case.hpp"
#include "bench/sweep/case_rows.hpp"
#include "bench/sweep/estimate_gpu.hpp"
#include "testkit/random.hpp"

namespace switchyard::bench {
namespace {

/// How near the kernels of a CPU come to the roofs, from result lines of many shapes.
struct Kernels {
  double memory = 0.85;         ///< Share of the bandwidth: experts of few rows, rows that move.
  double products = 0.72;       ///< Share of the peak: experts of many rows.
  double router = 0.4;          ///< Share of the peak: the router's product.
  double select_logit = 1000;   ///< Operations at the f32 peak for each logit.
  double select_choice = 1500;  ///< The same for each assignment, its place in the plan included.
  double draw = 1500;           ///< Operations at the f32 peak for each number of noise.
  double launch = 20e-6;        ///< Seconds that a run takes however small it is.
};
constexpr Kernels kKernels{};

/// Tables of normal numbers that made-up data is taken from.
constexpr double kMadeUpBytes = 2.5e6;
/// Stacks of threads, and pages of code, that a first case touches.
constexpr double kFirstTouched = 0.5e6;

/// One run of a case, and what is made for it.
class CaseModel {
 public:
  CaseModel(const LayerCase& c, const Limits& limits, const MadeUpRates& rates)
      : c_(c),
        limits_(limits),
        rates_(rates),
        tokens_(static_cast<double>(c.num_tokens)),
        experts_(c.config.router.num_experts),
        hidden_(static_cast<double>(c.config.experts.hidden)),
        size_(static_cast<double>(size_of(c.options.compute.value_or(c.dtype)))),
        rows_(rows_of(c)) {}

  [[nodiscard]] double moved(double bytes) const {
    return bytes / (kKernels.memory * limits_.bandwidth);
  }

  [[nodiscard]] double router() const {
    const double logits = tokens_ * experts_;
    const double products = c_.config.router.has_logits()
                                ? 2 * logits * hidden_ / (kKernels.router * limits_.flops_f32)
                                : 0;
    const double choices = (c_.config.router.has_logits() ? kKernels.select_logit * logits : 0) +
                           kKernels.select_choice * rows_.used;
    double drawn = 0;  // of a router by name, which is measured as it trains
    if (!c_.router.empty()) {
      const RouterNoise::Kind noise = c_.config.router.noise.kind;
      if (noise == RouterNoise::Kind::kInputJitter) drawn = tokens_ * hidden_;
      if (noise == RouterNoise::Kind::kLogits) drawn = logits;
    }
    return products + (choices + kKernels.draw * drawn) / limits_.flops_f32;
  }

  [[nodiscard]] double pack_and_combine() const {
    return moved(2 * (rows_.executed + tokens_) * hidden_ * size_);
  }

  [[nodiscard]] double experts() const {
    const double matrices = c_.config.experts.gated ? 3 : 2;
    const auto inner = static_cast<double>(c_.config.experts.inner);
    const double products =
        2 * matrices * rows_.executed * hidden_ * inner /
        (kKernels.products * limits_.flops(c_.options.compute.value_or(c_.dtype)));
    const double weights = moved(rows_.hit * bytes_per_expert(c_));
    return std::max(products, weights) + moved(rows_.executed * (hidden_ + 2 * inner) * size_);
  }

  [[nodiscard]] double layer() const {
    const double passes = c_.pass == Pass::kBoth ? 3 : c_.pass == Pass::kBackward ? 2 : 1;
    const double exchanged = c_.num_ranks > 1 ? moved(4 * rows_.used * hidden_ * size_) : 0;
    const double iterations = c_.config.router.num_gates();  // of a chain; else one
    return iterations * (router() + passes * (pack_and_combine() + experts() + exchanged));
  }

  /// Of data that is made on one thread.
  [[nodiscard]] double made_tokens() const {
    return (tokens_ * hidden_ * size_) / rates_.copied + experts_ * hidden_ / rates_.normals;
  }
  [[nodiscard]] double made_routing() const { return tokens_ * experts_ / rates_.normals; }
  [[nodiscard]] double made_weights(int copies) const {
    // By all threads, into huge pages: about twice as fast a thread.
    return copies * experts_ * bytes_per_expert(c_) / (2 * rates_.copied * c_.num_threads);
  }

  /// @param more  What the first run, by which the others are counted, takes longer.
  [[nodiscard]] double runs(double seconds, double more = 0) const {
    RunCounter counter(c_.count);
    counter.set_time(std::chrono::duration<double>(seconds + more));
    return counter.total() * (seconds + kKernels.launch) + more;
  }

  /// New memory is touched for the first time.
  [[nodiscard]] double touched(double bytes) const { return bytes / rates_.copied; }
  /// The output is held against the tokens, on one thread.
  [[nodiscard]] double compared() const { return tokens_ * hidden_ / (5 * rates_.normals); }
  /// What the router has beside tokens and routing: what it sees instead of the tokens, and where
  /// experts choose what they choose from.
  [[nodiscard]] double router_bytes() const {
    const bool jitters = c_.config.router.noise.kind == RouterNoise::Kind::kInputJitter;
    const bool chooses = std::holds_alternative<ExpertChoiceRouter>(c_.config.router.kind);
    return (jitters && !c_.router.empty() ? tokens_ * hidden_ * 4 : 0) +
           (chooses ? 6 * tokens_ * experts_ : 0);
  }
  [[nodiscard]] double tokens_bytes() const { return tokens_ * hidden_ * size_; }
  [[nodiscard]] double routing_bytes() const {
    const double logits = c_.config.router.has_logits() ? experts_ : 0;
    return tokens_ * (8 * c_.config.router.top_k() + 4 * logits);
  }
  [[nodiscard]] double assignments_bytes() const {  // ids, weights, and what is kept
    return tokens_ * 9 * c_.config.router.top_k();
  }
  [[nodiscard]] double rows_bytes() const { return rows_.executed * hidden_ * size_; }
  /// What the experts' products read, and what they leave where they do not combine. A 16-bit type
  /// is floats for kernels that have no products of it.
  [[nodiscard]] double experts_bytes(const std::string& isa) const {
    const bool products = c_.options.compute.value_or(c_.dtype) == DType::kBF16 &&
                          (isa == "avx512_bf16" || isa == "amx_bf16");
    const bool packs = c_.options.layout.kind != LayoutKind::kCompact;
    return rows_.executed *
           ((hidden_ + static_cast<double>(c_.config.experts.inner)) * (products ? 2 : 4) +
            (packs ? hidden_ * (size_ + 4) : 0));
  }
  [[nodiscard]] double weights_bytes(int copies) const {
    return copies * experts_ * bytes_per_expert(c_);
  }
  [[nodiscard]] double hit() const { return rows_.hit; }
  [[nodiscard]] double draws() const {
    const int draws = c_.count.budget.count() > 0 ? kCapacityDraws : c_.count.iterations;
    return draws *
           (3 * kKernels.select_choice * tokens_ * c_.config.router.top_k() / limits_.flops_f32 +
            kKernels.launch);
  }

 private:
  const LayerCase& c_;
  const Limits& limits_;
  const MadeUpRates& rates_;
  double tokens_, experts_, hidden_, size_;
  CaseRows rows_;
};

Estimate of_layer(const LayerCase& c, const Machine& machine, const Limits& limits,
                  const MadeUpRates& rates) {
  const CaseModel model(c, limits, rates);
  const int copies = cold_copies(c, model.hit(), machine);
  return {.seconds = model.made_tokens() + model.made_routing() + model.made_weights(copies) +
                     model.runs(model.layer()),
          .bytes = 2 * kMadeUpBytes + model.weights_bytes(copies) + 3 * model.tokens_bytes() +
                   model.experts_bytes(machine.isa) + model.routing_bytes()};
}

/// Of any kind but kPaths.
Estimate of_one(const SuiteCase& c, const Machine& machine, const Limits& limits,
                const MadeUpRates& rates) {
  if (c.layer.options.backend == Backend::kCuda) {
    return estimate_on_gpu(c, machine, limits, rates);
  }
  const CaseModel model(c.layer, limits, rates);
  switch (c.kind) {
    case CaseKind::kRouter:
      return {.seconds = model.made_tokens() + model.runs(model.router()) +
                         model.touched(model.routing_bytes() + model.router_bytes()),
              .bytes = kMadeUpBytes + model.tokens_bytes() + model.routing_bytes() +
                       model.router_bytes()};
    case CaseKind::kIdentity:
      return {.seconds = model.made_tokens() + model.made_routing() + model.compared() +
                         model.runs(model.router() + model.pack_and_combine(),
                                    model.touched(model.tokens_bytes() + model.rows_bytes()) /
                                        c.layer.num_threads),
              .bytes = kMadeUpBytes + 2 * model.tokens_bytes() + model.rows_bytes() +
                       2 * model.routing_bytes()};
    case CaseKind::kCapacity:
      return {.seconds = model.draws(), .bytes = kFirstTouched + model.assignments_bytes()};
    default: return of_layer(c.layer, machine, limits, rates);
  }
}

}  // namespace

MadeUpRates measure_made_up_rates() {
  using Clock = std::chrono::steady_clock;
  constexpr int kNormals = 100000;
  constexpr std::int64_t kTokens = 512;
  constexpr std::int64_t kHidden = 4096;
  auto begin = Clock::now();
  Random random(1);
  double sum = 0;
  for (int i = 0; i < kNormals; ++i) sum += random.normal();
  const std::chrono::duration<double> normals = Clock::now() - begin;
  static_cast<void>(synthetic_tokens(1, 1, DType::kF32, 1));  // its table
  begin = Clock::now();
  const std::vector<std::byte> made = synthetic_tokens(kTokens, kHidden, DType::kF32, 1);
  const std::chrono::duration<double> copied = Clock::now() - begin;
  const double rate = kNormals / normals.count();
  return {.normals = std::isfinite(sum) ? rate : 0,
          .copied = static_cast<double>(made.size()) / copied.count()};
}

Estimate estimate_case(const SuiteCase& c, const Machine& machine, const Limits& limits,
                       const MadeUpRates& rates) {
  if (c.kind != CaseKind::kPaths) return of_one(c, machine, limits, rates);
  Estimate all;
  for (const LayerCase& path : c.paths) {
    const Estimate one = of_one({.layer = path}, machine, limits, rates);
    all = {.seconds = all.seconds + one.seconds, .bytes = std::max(all.bytes, one.bytes)};
  }
  return all;
}

}  // namespace switchyard::bench
