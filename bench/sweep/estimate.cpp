// A model of what a case takes: the roofs, how near each kernel comes to them, and what it costs to
// make up the data.
#include "bench/sweep/estimate.hpp"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <numeric>

#include "bench/cases/synthetic.hpp"
#include "bench/sweep/capacity_case.hpp"
#include "switchyard/plan.hpp"
#include "testkit/random.hpp"

namespace switchyard::bench {
namespace {

/// How near the kernels of a backend come to the roofs, from result lines of many shapes.
struct Kernels {
  double memory;         ///< Share of the bandwidth: experts of few rows, and rows that move.
  double products;       ///< Share of the peak: experts of many rows.
  double router;         ///< Share of the peak: the router's product.
  double select_logit;   ///< Operations at the f32 peak for each logit.
  double select_choice;  ///< The same for each assignment, its place in the plan included.
  double draw;           ///< Operations at the f32 peak for each number of the router's noise.
  double launch;         ///< Seconds that a run takes however small it is.
};
constexpr Kernels kCpuKernels{.memory = 0.85,
                              .products = 0.72,
                              .router = 0.4,
                              .select_logit = 1000,
                              .select_choice = 1500,
                              .draw = 1500,
                              .launch = 20e-6};
constexpr Kernels kGpuKernels{.memory = 0.75,
                              .products = 0.8,
                              .router = 0.6,
                              .select_logit = 250,
                              .select_choice = 1500,
                              .draw = 1500,
                              .launch = 60e-6};

/// Tables of normal numbers that made-up data is taken from.
constexpr double kMadeUpBytes = 2.5e6;

const Kernels& kernels_of(Backend backend) {
  return backend == Backend::kCpu ? kCpuKernels : kGpuKernels;
}

double number_after_colon(const std::string& word) {
  const std::size_t at = word.find_first_of(":=");
  double value = 1;
  if (at != std::string::npos) {
    const std::size_t begin = word.find_last_of(":=") + 1;
    std::from_chars(word.data() + begin, word.data() + word.size(), value);
  }
  return value;
}

/// Tokens of each expert, as loads are asked for; a learned router of made-up weights is even.
std::vector<double> expected_counts(const LayerCase& c) {
  const std::string& load = c.router.empty() ? c.skew : c.router;
  const auto experts = static_cast<std::size_t>(c.config.router.num_experts);
  const auto tokens = static_cast<double>(c.num_tokens);
  const double all =
      tokens * std::min<double>(c.config.router.top_k(), c.config.router.num_experts);
  std::vector<double> share(experts, 1.0);
  if (load.starts_with("zipf")) {
    const double exponent = number_after_colon(load);
    for (std::size_t e = 0; e < experts; ++e) {
      share[e] = std::pow(static_cast<double>(e + 1), -exponent);
    }
  } else if (load.starts_with("hot")) {
    const double hot =
        c.router.empty() ? number_after_colon(load) * tokens / all : number_after_colon(load);
    share.assign(experts, (1 - hot) / std::max(1.0, static_cast<double>(experts) - 1));
    share[0] = hot;
  }
  // No expert has a token twice: what is too much goes to the others.
  std::vector<double> counts(experts);
  double left = all;
  for (int round = 0; round < 8 && left > 1e-6 * all; ++round) {
    double open = 0;
    for (std::size_t e = 0; e < experts; ++e) open += counts[e] < tokens ? share[e] : 0;
    if (open <= 0) break;
    const double each = left / open;
    for (std::size_t e = 0; e < experts; ++e) {
      const double more = counts[e] < tokens ? std::min(each * share[e], tokens - counts[e]) : 0;
      counts[e] += more;
      left -= more;
    }
  }
  return counts;
}

/// What a layer computes with.
struct Rows {
  double used = 0;      ///< Rows that are a token's.
  double executed = 0;  ///< With padding.
  double hit = 0;       ///< Experts that have one.
};

Rows rows_of(const LayerCase& c) {
  std::vector<double> counts = expected_counts(c);
  counts.resize(static_cast<std::size_t>(c.config.router.num_computing()));  // others have no rows
  const auto tokens = static_cast<double>(c.num_tokens);
  double most = 0;
  Rows rows;
  for (double& n : counts) {
    rows.hit += 1 - std::pow(1 - std::min(1.0, n / std::max(1.0, tokens)), tokens);
    most = std::max(most, n + 2 * std::sqrt(n));
  }
  if (c.options.capacity_factor) {
    const auto slots = static_cast<double>(
        capacity_for(c.config.router, *c.options.capacity_factor, c.num_tokens).computing);
    for (double& n : counts) n = std::min(n, slots);
    most = std::min(most, slots);
  }
  rows.used = std::accumulate(counts.begin(), counts.end(), 0.0);
  rows.executed = rows.used;
  const auto experts = static_cast<double>(counts.size());
  if (c.options.layout.kind == LayoutKind::kPadded) rows.executed = most * experts;
  if (c.options.layout.kind == LayoutKind::kAligned) {
    rows.executed += experts * c.options.layout.alignment / 2;
  }
  return rows;
}

/// One run of a case, and what is made for it.
class CaseModel {
 public:
  CaseModel(const LayerCase& c, const Limits& limits, const MadeUpRates& rates)
      : c_(c),
        limits_(limits),
        rates_(rates),
        kernels_(kernels_of(c.options.backend)),
        tokens_(static_cast<double>(c.num_tokens)),
        experts_(c.config.router.num_experts),
        hidden_(static_cast<double>(c.config.experts.hidden)),
        size_(static_cast<double>(size_of(c.options.compute.value_or(c.dtype)))),
        rows_(rows_of(c)),
        speedup_(c.options.backend == Backend::kCuda ? c.num_ranks : 1) {}

  [[nodiscard]] double moved(double bytes) const {
    return bytes / (kernels_.memory * limits_.bandwidth);
  }

  [[nodiscard]] double router() const {
    const double logits = tokens_ * experts_;
    const DType type = limits_.tensor_router ? c_.dtype : DType::kF32;
    const double products = c_.config.router.has_logits()
                                ? 2 * logits * hidden_ / (kernels_.router * limits_.flops(type))
                                : 0;
    const double choices = (c_.config.router.has_logits() ? kernels_.select_logit * logits : 0) +
                           kernels_.select_choice * rows_.used;
    double drawn = 0;  // of a router by name, which is measured as it trains
    if (!c_.router.empty()) {
      const RouterNoise::Kind noise = c_.config.router.noise.kind;
      if (noise == RouterNoise::Kind::kInputJitter) drawn = tokens_ * hidden_;
      if (noise == RouterNoise::Kind::kLogits) drawn = logits;
    }
    return products + (choices + kernels_.draw * drawn) / limits_.flops_f32;
  }

  [[nodiscard]] double pack_and_combine() const {
    return moved(2 * (rows_.executed + tokens_) * hidden_ * size_);
  }

  [[nodiscard]] double experts() const {
    const double matrices = c_.config.experts.gated ? 3 : 2;
    const auto inner = static_cast<double>(c_.config.experts.inner);
    const double products =
        2 * matrices * rows_.executed * hidden_ * inner /
        (kernels_.products * limits_.flops(c_.options.compute.value_or(c_.dtype)));
    const double weights = moved(rows_.hit * bytes_per_expert(c_));
    return std::max(products, weights) + moved(rows_.executed * (hidden_ + 2 * inner) * size_);
  }

  [[nodiscard]] double layer() const {
    const double passes = c_.pass == Pass::kBoth ? 3 : c_.pass == Pass::kBackward ? 2 : 1;
    const double exchanged = c_.num_ranks > 1 ? moved(4 * rows_.used * hidden_ * size_) : 0;
    const double iterations = c_.config.router.num_gates();  // of a chain; else one
    return iterations * (router() + passes * (pack_and_combine() + experts() + exchanged)) /
           speedup_;
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

  /// Every run: on CUDA it is done twice, once to time its stages.
  [[nodiscard]] double runs(double seconds) const {
    RunCounter counter(c_.count);
    counter.set_time(std::chrono::duration<double>(seconds));
    const double each = c_.options.backend == Backend::kCuda ? 2 * seconds : seconds;
    return counter.total() * (each + kernels_.launch);
  }

  /// New memory is touched for the first time.
  [[nodiscard]] double touched(double bytes) const { return bytes / rates_.copied; }
  /// The output is held against the tokens, on one thread.
  [[nodiscard]] double compared() const { return tokens_ * hidden_ / (4 * rates_.normals); }
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
  [[nodiscard]] double results_bytes() const { return rows_.executed * hidden_ * 4; }
  [[nodiscard]] double inner_bytes() const {
    return rows_.executed * static_cast<double>(c_.config.experts.inner) * size_;
  }
  [[nodiscard]] double weights_bytes(int copies) const {
    return copies * experts_ * bytes_per_expert(c_);
  }
  [[nodiscard]] double hit() const { return rows_.hit; }
  [[nodiscard]] double draws() const {
    const int draws = c_.count.budget.count() > 0 ? kCapacityDraws : c_.count.iterations;
    return draws *
           (3 * kernels_.select_choice * tokens_ * c_.config.router.top_k() / limits_.flops_f32 +
            kernels_.launch);
  }

 private:
  const LayerCase& c_;
  const Limits& limits_;
  const MadeUpRates& rates_;
  const Kernels& kernels_;
  double tokens_, experts_, hidden_, size_;
  Rows rows_;
  double speedup_;
};

Estimate of_layer(const LayerCase& c, const Machine& machine, const Limits& limits,
                  const MadeUpRates& rates) {
  const CaseModel model(c, limits, rates);
  const int copies = cold_copies(c, model.hit(), machine);
  return {.seconds = model.made_tokens() + model.made_routing() + model.made_weights(copies) +
                     model.runs(model.layer()),
          .bytes = 2 * kMadeUpBytes + model.weights_bytes(copies) + 3 * model.tokens_bytes() +
                   model.rows_bytes() + model.results_bytes() + model.inner_bytes() +
                   model.routing_bytes()};
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
  const CaseModel model(c.layer, limits, rates);
  switch (c.kind) {
    case CaseKind::kRouter:
      return {.seconds = model.made_tokens() + model.runs(model.router()) +
                         model.touched(model.routing_bytes() + model.router_bytes()),
              .bytes = kMadeUpBytes + model.tokens_bytes() + model.routing_bytes() +
                       model.router_bytes()};
    case CaseKind::kIdentity:
      return {.seconds = model.made_tokens() + model.made_routing() +
                         model.touched(model.tokens_bytes() + model.rows_bytes()) +
                         model.compared() + model.runs(model.router() + model.pack_and_combine()),
              .bytes = kMadeUpBytes + 2 * model.tokens_bytes() + model.rows_bytes() +
                       2 * model.routing_bytes()};
    case CaseKind::kCapacity: return {.seconds = model.draws(), .bytes = model.assignments_bytes()};
    case CaseKind::kPaths: {
      Estimate all;
      for (const LayerCase& path : c.paths) {
        const Estimate one = of_layer(path, machine, limits, rates);
        all = {.seconds = all.seconds + one.seconds, .bytes = std::max(all.bytes, one.bytes)};
      }
      return all;
    }
    default: return of_layer(c.layer, machine, limits, rates);
  }
}

}  // namespace switchyard::bench
