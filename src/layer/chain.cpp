// Chain-of-Experts around the layer of a backend: its iterations one after the other, and the sums
// between them, in f32. Bound by the iterations; a sum reads and writes two rows of f32 a token.
#include "layer/chain.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "core/row_ops.hpp"
#include "layer/cpu/buffers.hpp"
#include "layer/saved_forward.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

template <typename T>
void append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

/// to += from, value by value; nothing is as many zeros.
void add_up(std::vector<std::int64_t>& to, const std::vector<std::int64_t>& from) {
  to.resize(std::max(to.size(), from.size()));
  for (std::size_t i = 0; i < from.size(); ++i) to[i] += from[i];
}

void add_up(RoutingRecord& whole, const RoutingRecord& part) {
  append(whole.expert, part.expert);
  append(whole.weight, part.weight);
  append(whole.kept, part.kept);
  add_up(whole.counts, part.counts);
  add_up(whole.counts_kept, part.counts_kept);
}

void add_up(Traffic& whole, const Traffic& part) {
  add_up(whole.rows, part.rows);
  add_up(whole.payload_bytes, part.payload_bytes);
  add_up(whole.meta_bytes, part.meta_bytes);
  add_up(whole.return_rows, part.return_rows);
  add_up(whole.return_payload_bytes, part.return_payload_bytes);
  add_up(whole.return_meta_bytes, part.return_meta_bytes);
}

RawMatrix raw_of(Matrix<float> m) {
  return {reinterpret_cast<std::byte*>(m.data), DType::kF32, m.shape[0], m.shape[1]};
}

class ChainLayer final : public LayerRunner {
 public:
  ChainLayer(std::unique_ptr<LayerRunner> layer, const ChainConfig& chain)
      : layer_(std::move(layer)), chain_(chain) {
    config = layer_->config;
    config.router.chain = chain;
    compute = layer_->compute;
    pool = layer_->pool;
  }

  void forward(const ForwardArgs& args) override {
    const ConstRawMatrix tokens = args.tokens;
    SavedForward::State* const saved = args.saved == nullptr ? nullptr : &args.saved->state();
    if (saved != nullptr) begin(*saved, tokens.rows);
    RoutingRecord* const record = args.request.record;
    if (record != nullptr) *record = {};
    traffic = {};
    rows_used = rows_executed = 0;
    const Matrix<float> x = x_.matrix(tokens.rows, tokens.cols);
    const Matrix<float> y = y_.matrix(tokens.rows, tokens.cols);
    ForwardArgs each = args;
    each.out = raw_of(y);
    for (std::int32_t c = 0; c < chain_.iterations; ++c) {
      RoutingRecord part;
      layer_->use_iteration(c);
      each.request.layer = args.request.layer * chain_.iterations + c;
      each.request.record = record == nullptr ? nullptr : &part;
      if (saved != nullptr) each.saved = &saved->iterations[static_cast<std::size_t>(c)];
      layer_->forward(each);
      if (record != nullptr) add_up(*record, part);
      count_iteration();
      if (saved != nullptr) saved->bytes += each.saved->bytes();
      const bool last = c + 1 == chain_.iterations;
      add(y, c == 0 ? tokens : each.tokens, last ? tokens : ConstRawMatrix{}, x,
          last ? args.out : RawMatrix{}, args.recorder);
      each.tokens = raw_of(x);
    }
    if (saved != nullptr) saved->use = SavedForward::State::Use::kReady;
  }

  void backward(const BackwardArgs& args) override {
    SavedForward::State& saved = args.saved->state();
    saved.require_of(number_, 0);
    saved.use = SavedForward::State::Use::kUsed;
    const Matrix<float> dx = x_.matrix(args.dout.rows, args.dout.cols);
    const Matrix<float> part = y_.matrix(args.dout.rows, args.dout.cols);
    BackwardArgs each = args;
    for (std::int32_t c = chain_.iterations - 1; c >= 0; --c) {
      const bool first = c + 1 == chain_.iterations;  // to go back through
      const bool wanted = c > 0 || args.dtokens.data != nullptr;
      layer_->use_iteration(c);
      each.saved = &saved.iterations[static_cast<std::size_t>(c)];
      each.dtokens = wanted ? raw_of(part) : RawMatrix{};
      each.dgate = gate_of(args.dgate, c);
      each.drouter_bias = bias_of(args.drouter_bias, c);
      layer_->backward(each);
      if (first && !args.accumulate) {
        clear_before(args, c);
        each.accumulate = true;  // to what this one has written of the experts
      }
      if (!wanted) continue;
      add(part, each.dout, c == 0 ? args.dout : ConstRawMatrix{}, dx,
          c == 0 ? args.dtokens : RawMatrix{}, args.recorder);
      each.dout = raw_of(dx);
    }
  }

  void reload_experts() override { layer_->reload_experts(); }
  void check() override { layer_->check(); }
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

  void count_iteration() {
    add_up(traffic, layer_->traffic);
    rows_used += layer_->rows_used;
    rows_executed += layer_->rows_executed;
  }

  /// What is between two iterations, there and back: to = part [+ from, with the inner residual];
  /// behind the last one out = to [+ whole, with the outer residual]. `part` is used up, `from` may
  /// be `to`.
  void add(Matrix<float> part, ConstRawMatrix from, ConstRawMatrix whole, Matrix<float> to,
           RawMatrix out, StageRecorder* recorder) const {
    const std::int64_t n = to.shape[1];
    const Execution execution{.pool = pool, .recorder = recorder};
    const ScopedStage stage(execution, "residual",
                            {.bytes = static_cast<double>(8 * to.size() + from.bytes()),
                             .flops = static_cast<double>(to.size()),
                             .flops_executed = static_cast<double>(to.size())});
    parallel_for(pool, to.shape[0], [&](std::int64_t t, int) {
      if (chain_.inner_residual) {
        if (from.row(t) != reinterpret_cast<const std::byte*>(to.row(t))) {
          row_ops::widen(from.dtype, from.row(t), to.row(t), n);
        }
        row_ops::add(part.row(t), to.row(t), n);
      } else {
        std::copy_n(part.row(t), n, to.row(t));
      }
      if (out.data == nullptr) return;
      if (chain_.outer_residual) {
        row_ops::widen(whole.dtype, whole.row(t), part.row(t), n);
        row_ops::add(part.row(t), to.row(t), n);
      }
      row_ops::narrow(out.dtype, to.row(t), out.row(t), n);
    });
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
      std::fill(args.dgate.data, args.dgate.row(rows), std::byte{0});
    }
    if (args.drouter_bias.data != nullptr) std::fill_n(args.drouter_bias.data, rows, 0.0F);
  }

  std::unique_ptr<LayerRunner> layer_;
  ChainConfig chain_;
  const std::uint64_t number_ = next_layer_number();
  ArrayBuffer<float> x_, y_;  ///< [T, H] what goes from one to the next, and what one has made.
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
                                              const ChainConfig& chain) {
  return std::make_unique<ChainLayer>(std::move(layer), chain);
}

void check_chain(const RouterConfig& router, const LayerOptions& options) {
  if (!router.is_chain()) return;
  if (options.backend == Backend::kCuda) {
    fail(ErrorCode::kUnsupported,
         "the router chain (iterations={}) on CUDA: its iterations run on a CPU only; want backend "
         "cpu, or a layer for each iteration",
         router.chain.iterations);
  }
  if (options.losses.any()) {
    fail(ErrorCode::kUnsupported,
         "losses of a layer are of one routing, and the router chain has iterations={} of them",
         router.chain.iterations);
  }
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

void check_chain_call(const BackwardArgs& args, const RouterConfig& router) {
  if (!router.is_chain()) return;
  require(args.dlogits.data == nullptr && args.dweight.data == nullptr,
          "dlogits or dweight are given, but the router chain has iterations={} routings",
          router.chain.iterations);
}

}  // namespace switchyard
