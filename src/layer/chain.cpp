// Chain-of-Experts around the layer of a backend: its iterations one after the other, and the sums
// between them (ChainSums). Bound by the iterations; a sum reads and writes two rows of f32 a
// token.
#include "layer/chain.hpp"

#include <utility>

#include "core/check.hpp"
#include "experts/raw_matrix.hpp"
#include "layer/add_up.hpp"
#include "layer/saved_forward.hpp"
#include "layer/saved_losses.hpp"

namespace switchyard {
namespace {

class ChainLayer final : public LayerRunner {
 public:
  ChainLayer(std::unique_ptr<LayerRunner> layer, const ChainConfig& chain,
             std::unique_ptr<ChainSums> sums, bool counts_at_once)
      : layer_(std::move(layer)),
        chain_(chain),
        sums_(std::move(sums)),
        counts_at_once_(counts_at_once) {
    config = layer_->config;
    config.router.chain = chain;
    compute = layer_->compute;
    pool = layer_->pool;
  }

  void forward(const ForwardArgs& args) override {
    SavedForward::State* const saved = args.saved == nullptr ? nullptr : &args.saved->state();
    if (saved != nullptr) begin(*saved, args.tokens.rows);
    RoutingRecord* const record = args.request.record;
    if (record != nullptr) *record = {};
    if (counts_at_once_) forget_counts();
    ForwardArgs each = args;
    each.stream = sums_->begin(args);
    const ConstRawMatrix tokens = sums_->within_reach(args.tokens);
    const RawMatrix out = sums_->place_of(args.out);
    const Matrix<float> x = sums_->going_on(tokens.rows, tokens.cols);
    const Matrix<float> y = sums_->made(tokens.rows, tokens.cols);
    each.tokens = tokens;
    each.tokens_stay = args.tokens_stay && tokens.data == args.tokens.data;
    each.out = raw(y);
    for (std::int32_t c = 0; c < chain_.iterations; ++c) {
      RoutingRecord part;
      layer_->use_iteration(c);
      each.request.layer = args.request.layer * chain_.iterations + c;
      each.request.record = record == nullptr ? nullptr : &part;
      if (saved != nullptr) each.saved = &saved->iterations[static_cast<std::size_t>(c)];
      layer_->forward(each);
      if (record != nullptr) add_up(*record, part);
      if (counts_at_once_) add_up_counts();
      if (saved != nullptr) saved->bytes += each.saved->bytes();
      const bool last = c + 1 == chain_.iterations;
      const RawMatrix next = last ? RawMatrix{} : sums_->next(tokens.rows, tokens.cols);
      sums_->add({.part = y,
                  .from = c == 0 ? tokens : ConstRawMatrix(raw(x)),
                  .to = x,
                  .whole = last ? tokens : ConstRawMatrix{},
                  .out = last ? out : RawMatrix{},
                  .next = next});
      each.tokens = next.data == nullptr ? raw(x) : next;
      each.tokens_stay = false;
    }
    if (saved != nullptr) {
      add_up_losses(*saved);
      saved->use = SavedForward::State::Use::kReady;
    }
    const bool under_way = sums_->bring(out, args.out);
    if (under_way || record != nullptr) check();
    if (under_way) sums_->finish();
  }

  void backward(const BackwardArgs& args) override {
    SavedForward::State& saved = args.saved->state();
    saved.require_of(number_, 0);
    saved.use = SavedForward::State::Use::kUsed;
    sums_->begin(args);
    const Matrix<float> dx = sums_->going_on(args.dout.rows, args.dout.cols);
    const Matrix<float> part = sums_->made(args.dout.rows, args.dout.cols);
    BackwardArgs each = args;
    ConstRawMatrix behind = args.dout;  // of what the iteration has made, as it came
    for (std::int32_t c = chain_.iterations - 1; c >= 0; --c) {
      const bool first = c + 1 == chain_.iterations;  // to go back through
      const bool wanted = c > 0 || args.dtokens.data != nullptr;
      layer_->use_iteration(c);
      each.saved = &saved.iterations[static_cast<std::size_t>(c)];
      each.dtokens = wanted ? raw(part) : RawMatrix{};
      each.dgate = gate_of(args.dgate, c);
      each.drouter_bias = bias_of(args.drouter_bias, c);
      layer_->backward(each);
      if (first && !args.accumulate) {
        clear_before(args, c);
        each.accumulate = true;  // to what this one has written of the experts
      }
      if (!wanted) continue;
      const RawMatrix next = c == 0 ? RawMatrix{} : sums_->next(dx.shape[0], dx.shape[1]);
      sums_->add({.part = part,
                  .from = behind,
                  .to = dx,
                  .whole = c == 0 ? args.dout : ConstRawMatrix{},
                  .out = c == 0 ? args.dtokens : RawMatrix{},
                  .next = next});
      behind = raw(dx);
      each.dout = next.data == nullptr ? raw(dx) : next;
    }
    add_up_losses(saved);  // of kGlobal by the counts of all now
  }

  void reload_experts() override { layer_->reload_experts(); }
  void check() override {
    layer_->check();
    if (counts_at_once_) return;
    traffic = layer_->traffic;
    rows_used = layer_->rows_used;
    rows_executed = layer_->rows_executed;
  }
  [[nodiscard]] metrics::Routing stats() override { return layer_->stats(); }
  [[nodiscard]] const ExpertWeights& weights() const override { return layer_->weights(); }

 private:
  void begin(SavedForward::State& saved, std::int64_t num_tokens) const {
    saved.begin(number_, 0);
    saved.num_tokens = num_tokens;
    saved.routed = true;
    while (std::ssize(saved.iterations) < chain_.iterations) {
      saved.iterations.emplace_back(saved.recompute);
    }
  }

  void add_up_losses(SavedForward::State& saved) const {
    for (std::int32_t c = 0; c < chain_.iterations; ++c) {
      SavedForward::State& part = saved.iterations[static_cast<std::size_t>(c)].state();
      if (part.losses.values.data == nullptr) return;
      if (saved.losses.values.data == nullptr) {
        saved.losses = room_for_chain_losses(part);
        saved.bytes += 8 * (saved.losses.values.size() + saved.losses.sums.counts.size());
      }
      sums_->add({.values = part.losses.values,
                  .counts = part.losses.sums.counts,
                  .to = saved.losses.values,
                  .to_counts = saved.losses.sums.counts,
                  .first = c == 0});
    }
  }

  void forget_counts() {
    traffic = {};
    rows_used = rows_executed = 0;
  }
  void add_up_counts() {
    add_up(traffic, layer_->traffic);
    rows_used += layer_->rows_used;
    rows_executed += layer_->rows_executed;
  }

  [[nodiscard]] RawMatrix gate_of(RawMatrix gates, std::int32_t c) const {
    if (gates.data == nullptr) return {};
    const std::int64_t rows = config.router.num_logits();
    return {gates.row(c * rows), gates.dtype, rows, gates.cols};
  }
  [[nodiscard]] Vector<float> bias_of(Vector<float> biases, std::int32_t c) const {
    if (biases.data == nullptr) return {};
    const std::int64_t size = config.router.num_logits();
    return {biases.data + c * size, {size}};
  }

  /// Zeros for what the iterations before `c` are to add to.
  void clear_before(const BackwardArgs& args, std::int32_t c) const {
    const std::int64_t rows = std::int64_t{c} * config.router.num_logits();
    if (args.dgate.data != nullptr) {
      sums_->clear(args.dgate.data, static_cast<std::size_t>(rows * args.dgate.row_bytes()));
    }
    if (args.drouter_bias.data != nullptr) {
      sums_->clear(args.drouter_bias.data, static_cast<std::size_t>(4 * rows));
    }
  }

  std::unique_ptr<LayerRunner> layer_;
  ChainConfig chain_;
  std::unique_ptr<ChainSums> sums_;
  bool counts_at_once_;  ///< The layer has counted when its forward returns; else with check().
  const std::uint64_t number_ = next_layer_number();
};

}  // namespace

namespace {

/// Values [first, first + size) of it, or none; used where they lie.
Parameter slice_of(const Parameter& all, std::int64_t first, std::int64_t size) {
  if (all.empty()) return {};
  const auto owner = std::make_shared<const Parameter>(all);
  const auto* data = static_cast<const std::byte*>(all.data()) + first * size_of(all.dtype());
  return {data, all.dtype(), size, all.where(), owner};
}

}  // namespace

LayerModel iteration_of(const LayerModel& model, std::int32_t iteration) {
  const RouterConfig& router = model.config.router;
  require(iteration >= 0 && iteration < router.num_gates(), "iteration {} of a chain of {}",
          iteration, router.num_gates());
  const auto slice = [&](const Parameter& all) {
    const std::int64_t size = all.size() / router.num_gates();
    return slice_of(all, iteration * size, size);
  };
  LayerModel one = model;
  one.config.router.chain = {};
  one.gate = slice(model.gate);
  one.router_bias = slice(model.router_bias);
  one.selection_bias = slice(model.selection_bias);
  return one;
}

std::unique_ptr<LayerRunner> make_chain_layer(std::unique_ptr<LayerRunner> layer,
                                              const ChainConfig& chain,
                                              std::unique_ptr<ChainSums> sums,
                                              bool counts_at_once) {
  return std::make_unique<ChainLayer>(std::move(layer), chain, std::move(sums), counts_at_once);
}

void check_chain_call(const ForwardArgs& args, const RouterConfig& router) {
  if (!router.is_chain()) return;
  require(args.expert.data == nullptr && args.weight.data == nullptr,
          "a routing is given, but the router chain makes iterations={} of them, each of what the "
          "one before has made",
          router.chain.iterations);
  require(args.request.top_score.data == nullptr,
          "top_score is asked for, but the router chain has iterations={} routings",
          router.chain.iterations);
}

void check_chain_call(const BackwardArgs& args, const RouterConfig& router,
                      const LossConfig& losses, bool over_ranks) {
  if (!router.is_chain()) return;
  const std::int32_t iterations = router.chain.iterations;
  require(args.dlogits.data == nullptr && args.dweight.data == nullptr,
          "dlogits or dweight are given, but the router chain has iterations={} routings",
          iterations);
  require(args.loss_counts.data == nullptr,
          "loss_counts are given, but the router chain has those of iterations={} routings, which "
          "ranks add up by themselves",
          iterations);
  require(
      !losses.any() || losses.scope != LossScope::kGlobal || over_ranks,
      "losses of scope global and the router chain on one rank: nobody has the counts of others "
      "for each of iterations={}; want another scope",
      iterations);
}

}  // namespace switchyard
