// A model of what a case takes on a GPU, whose numbers are from the points of six sweeps on H200s:
// those of results/h200-sweeps.jsonl, and of four of them on another day.
#include "bench/sweep/estimate_gpu.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "bench/sweep/capacity_case.hpp"
#include "bench/sweep/case_rows.hpp"
#include "switchyard/plan.hpp"

#ifdef SWITCHYARD_WITH_CUDA
#include "switchyard/device.hpp"
#endif

namespace switchyard::bench {
namespace {

// Kernels: shares of the roofs, operations at the f32 peak, seconds.
constexpr double kMemory = 0.85;     ///< Of the bandwidth.
constexpr double kProducts = 0.8;    ///< Of the peak: experts.
constexpr double kRouter = 0.6;      ///< Of the peak: the router's product.
constexpr double kLogit = 60;        ///< To choose, a logit.
constexpr double kChoice = 4500;     ///< And an expert that is chosen.
constexpr double kDraw = 220;        ///< To draw a number of noise.
constexpr double kMostChoices = 16;  ///< Of a token that cost: of more than that few are made.
constexpr double kKernel = 5e-6;     ///< However small.
constexpr double kPlan = 12e-6;

// What is measured: a run once for its stages and once as a graph, the L2 flushed before.
constexpr double kMeasured = 15e-6;
constexpr double kStage = 5e-6;  ///< More, of each stage.
constexpr double kPoint = 9e-3;  ///< Stream, graphs and memory of a point.

// The host, one thread: in numbers of its generator and in copies of what it makes.
constexpr double kSent = 0.2;         ///< To the GPU and back, of the time to make as many bytes.
constexpr double kGate = 2;           ///< Numbers, of a value of the gate.
constexpr double kRouted = 0.62;      ///< Of an expert that a token might be routed to.
constexpr double kAssigned = 12;      ///< Of one that it is.
constexpr double kCompared = 0.07;    ///< Of a value of the output.
constexpr double kWeightsSent = 4.7;  ///< Weights, a matrix at a time, over what is made once.
constexpr double kDrawn = 0.21;       ///< Of a token whose experts are drawn by all threads.
constexpr double kDrawnExpert = 0.05;

/// Which depends on the GPU that is there; 0 where `machine` has none.
double workspace_bytes([[maybe_unused]] const LayerCase& c,
                       [[maybe_unused]] const Machine& machine) {
#ifdef SWITCHYARD_WITH_CUDA
  const RouterConfig& router = c.config.router;
  if (!machine.gpu.empty()) {
    return static_cast<double>(stage_workspace_bytes(
        c.num_tokens, router.top_k(),
        router.has_logits() ? router.num_logits() : router.num_experts, c.config.experts.hidden));
  }
#endif
  return 0;
}

class GpuCase {
 public:
  GpuCase(const LayerCase& c, const Machine& machine, const Limits& limits,
          const MadeUpRates& rates)
      : c_(c),
        router_(c.config.router),
        limits_(limits),
        rates_(rates),
        tokens_(static_cast<double>(c.num_tokens)),
        experts_(router_.num_experts),
        top_k_(router_.top_k()),
        logits_(router_.has_logits() ? router_.num_logits() : 0),
        gates_(router_.num_gates()),
        hidden_(static_cast<double>(c.config.experts.hidden)),
        inner_(static_cast<double>(c.config.experts.inner)),
        size_(static_cast<double>(size_of(c.options.compute.value_or(c.dtype)))),
        rows_(rows_of(c)),
        copies_(cold_copies(c, rows_.hit, machine)),
        cache_(static_cast<double>(machine.largest_cache(Backend::kCuda))),
        workspace_(workspace_bytes(c, machine)) {}

  [[nodiscard]] Estimate router() const {
    return {.seconds = kPoint + made_tokens() + runs(2 * choose(), 2, 2),
            .bytes = flushed() + tokens_bytes() + router_bytes()};
  }

  [[nodiscard]] Estimate identity() const {
    const double rows_there_and_back = moved((2 * tokens_ + rows_.executed + rows_.used) * row());
    return {
        .seconds = kPoint + made_tokens() + made_routing() + compared() +
                   runs(2 * (choose() + kPlan + rows_there_and_back) + rows_there_and_back, 3, 5),
        .bytes = flushed() + 2 * tokens_bytes() + assignments() + workspace_ + router_bytes() +
                 plan(rows_.executed) + rows_.executed * row()};
  }

  [[nodiscard]] Estimate capacity() const {
    const int draws = c_.count.budget.count() > 0 ? kCapacityDraws : c_.count.iterations;
    const double drawn = tokens_ * (kDrawn + kDrawnExpert * top_k_) / rates_.normals;
    return {.seconds = kPoint + draws * (drawn + 2 * (kPlan + kMeasured + kStage)),
            .bytes = flushed() + assignments() + tokens_ * top_k_ + 16 * experts_ + workspace_};
  }

  [[nodiscard]] Estimate layer() const {
    const bool routed_apart = c_.router.empty() && router_.has_logits();
    return {
        .seconds = kPoint + made_tokens() + made_routing() + made_weights() +
                   tokens_bytes() * kSent / rates_.copied + runs(2 * run() / c_.num_ranks, 2, 7),
        .bytes = c_.num_ranks * flushed() + 2 * tokens_bytes() + assignments() +
                 (routed_apart ? router_bytes() : 0) + copies_ * layer_bytes() + trained_bytes()};
  }

 private:
  [[nodiscard]] double row() const { return hidden_ * size_; }
  [[nodiscard]] double moved(double bytes) const { return bytes / (kMemory * limits_.bandwidth); }

  // Times of one run.

  [[nodiscard]] double choose() const {
    double seconds = kKernel;
    if (logits_ > 0) {
      const double products = 2 * tokens_ * logits_ * hidden_ / (kRouter * limits_.flops(c_.dtype));
      seconds += kKernel + std::max(products, moved(tokens_ * row()));
    }
    const double choices = tokens_ * std::min<double>(top_k_, kMostChoices);
    const double chosen =
        logits_ > 0 ? kLogit * tokens_ * logits_ + kChoice * choices : kChoice / 10 * choices;
    return seconds + chosen / limits_.flops_f32 + (drawn() > 0 ? kKernel : 0) +
           kDraw * drawn() / limits_.flops_f32;
  }
  /// Numbers of noise: of a router by name, which is measured as it trains.
  [[nodiscard]] double drawn() const {
    if (c_.router.empty() || router_.noise.kind == RouterNoise::Kind::kNone) return 0;
    return tokens_ * (router_.noise.kind == RouterNoise::Kind::kInputJitter ? hidden_ : logits_);
  }

  /// Only rows that are a token's are multiplied; padding is written, as zeros.
  [[nodiscard]] double run() const {
    const double matrices = c_.config.experts.gated ? 3 : 2;
    const double products = 2 * matrices * rows_.used * hidden_ * inner_ /
                            (kProducts * limits_.flops(c_.options.compute.value_or(c_.dtype)));
    const double weights = moved(rows_.hit * bytes_per_expert(c_));
    const double experts =
        std::max(products, weights) + moved(rows_.used * (hidden_ + 2 * inner_) * size_);
    const bool packs = c_.options.layout.kind != LayoutKind::kCompact;
    const double packed = packs ? moved((tokens_ + layout_rows()) * row()) : 0;
    const double combined = moved((tokens_ + rows_.used) * row());
    const double exchanged = c_.num_ranks > 1 ? moved(4 * rows_.used * row()) : 0;
    const double passes = c_.pass == Pass::kBoth ? 3 : c_.pass == Pass::kBackward ? 2 : 1;
    return gates_ * (choose() + kPlan + passes * (packed + experts + combined + exchanged));
  }

  /// @param seconds  Of all that a run is measured for, in so many measurements of these stages.
  [[nodiscard]] double runs(double seconds, int measurements, int stages) const {
    RunCounter counter(c_.count);
    counter.set_time(std::chrono::duration<double>(seconds / measurements));
    return counter.total() * (seconds + measurements * (kMeasured + stages * kStage));
  }

  // Times of the host.

  [[nodiscard]] double made_tokens() const {
    return (1 + kSent) * tokens_bytes() / rates_.copied +
           kGate * gates_ * logits_ * hidden_ / rates_.normals;
  }
  [[nodiscard]] double made_routing() const {
    return tokens_ * (kRouted * experts_ + kAssigned * top_k_) / rates_.normals;
  }
  [[nodiscard]] double made_weights() const {
    return copies_ * experts_ * bytes_per_expert(c_) / (kWeightsSent * rates_.copied);
  }
  /// The output comes back and is held against the tokens.
  [[nodiscard]] double compared() const {
    return kSent * tokens_bytes() / rates_.copied + kCompared * tokens_ * hidden_ / rates_.normals;
  }

  // The GPU's memory.

  [[nodiscard]] double flushed() const { return 2 * cache_; }
  [[nodiscard]] double tokens_bytes() const { return tokens_ * row(); }
  [[nodiscard]] double assignments() const { return 8 * tokens_ * top_k_; }
  [[nodiscard]] double noise_bytes() const {
    switch (router_.noise.kind) {
      case RouterNoise::Kind::kInputJitter: return c_.router.empty() ? 0 : 4 * tokens_ * hidden_;
      case RouterNoise::Kind::kLearned: return c_.router.empty() ? 0 : 4 * tokens_ * logits_;
      default: return 0;
    }
  }
  /// A router by itself, with one gate.
  [[nodiscard]] double router_bytes() const {
    return logits_ * row() + 4 * tokens_ * (1 + logits_) + noise_bytes() + assignments() +
           workspace_;
  }
  [[nodiscard]] double plan(double rows) const {
    return 8 * rows + 4 * tokens_ * (1 + top_k_) + 8 * experts_;
  }
  /// The host does not know the fullest expert: without a capacity there is room for any.
  [[nodiscard]] double layout_rows() const {
    std::int64_t padded = 0;
    if (c_.options.layout.kind == LayoutKind::kPadded) {
      padded = c_.options.capacity_factor
                   ? capacity_for(router_, *c_.options.capacity_factor, c_.num_tokens).computing
                   : c_.num_tokens * router_.top_k();
    }
    return static_cast<double>(
        max_rows(c_.options.layout, c_.num_tokens, router_.top_k(), router_.num_experts, padded));
  }
  [[nodiscard]] double layer_bytes() const {
    const double rows = layout_rows();
    const bool packs = c_.options.layout.kind != LayoutKind::kCompact;
    const double shared_inner =
        static_cast<double>(c_.config.shared.inner) * c_.config.shared.num_experts;
    const double shared = shared_inner > 0
                              ? 3 * hidden_ * shared_inner * size_ +
                                    tokens_ * (row() + 4 * hidden_) + tokens_ * shared_inner * size_
                              : 0;
    return experts_ * bytes_per_expert(c_) + tokens_bytes() + gates_ * logits_ * row() +
           4 * tokens_ * (1 + logits_) + noise_bytes() + tokens_ * 9 * top_k_ + workspace_ +
           plan(rows) + rows * (row() * (packs ? 2 : 1) + inner_ * size_) + shared;
  }
  /// What is kept for the way back, and gradients of the weights.
  [[nodiscard]] double trained_bytes() const {
    if (c_.pass == Pass::kForward) return 0;
    const double kept = tokens_bytes() + 4 * tokens_ * logits_ +
                        (c_.recompute == Recompute::kNone ? 2 * rows_.used * inner_ * size_ : 0);
    return kept + experts_ * bytes_per_expert(c_) + tokens_bytes();
  }

  const LayerCase& c_;
  const RouterConfig& router_;
  const Limits& limits_;
  const MadeUpRates& rates_;
  double tokens_, experts_, top_k_, logits_, gates_, hidden_, inner_, size_;
  CaseRows rows_;
  double copies_, cache_, workspace_;
};

}  // namespace

Estimate estimate_on_gpu(const SuiteCase& c, const Machine& machine, const Limits& limits,
                         const MadeUpRates& rates) {
  const GpuCase model(c.layer, machine, limits, rates);
  switch (c.kind) {
    case CaseKind::kRouter: return model.router();
    case CaseKind::kIdentity: return model.identity();
    case CaseKind::kCapacity: return model.capacity();
    default: return model.layer();
  }
}

}  // namespace switchyard::bench
