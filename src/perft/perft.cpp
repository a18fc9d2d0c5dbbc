// PERFT's adapters: a layer of plain experts of width r on each rank, in front of it the routing
// that the kind has, behind it the sum with the frozen layer's output. Bound by the passes over
// rows of [T, H]: an adapter's products are narrow.
#include "switchyard/perft.hpp"

#include <algorithm>
#include <utility>

#include "comm/host/rank_sums.hpp"
#include "core/row_ops.hpp"
#include "core/shape_check.hpp"
#include "experts/raw_matrix.hpp"
#include "layer/cpu/buffers.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

/// The layer that the adapters are: routed by their own rule, else by a routing that is given.
LayerModel layer_of(const PerftModel& model) {
  const PerftConfig& config = model.config;
  LayerModel layer;
  layer.config.experts = config.experts();
  layer.config.router = config.router;
  layer.experts = model.adapters;
  if (config.kind == PerftKind::kRouted) {
    layer.gate = model.gate;
    return layer;
  }
  const bool embedded = config.kind == PerftKind::kEmbedded;
  const std::int32_t columns = embedded ? config.router.top_k() : config.num_adapters;
  layer.config.router = {
      .num_experts = config.num_adapters,
      .kind = ForcedRouter{.load = ForcedRouter::Load::kRoundRobin, .top_k = columns}};
  return layer;
}

LayerOptions options_of(const PerftOptions& options) {
  LayerOptions layer;
  layer.compute = options.compute;
  layer.num_threads = options.num_threads;
  layer.losses = options.losses;
  return layer;
}

void check_model(const PerftModel& model, const PerftOptions& options) {
  check(model.config);
  const bool routed = model.config.kind == PerftKind::kRouted;
  const char* const kind = to_string(model.config.kind);
  require(model.adapters != nullptr, "the adapters have no source");
  require(routed || model.gate.empty(),
          "{} adapters take no gate: they have no router of their own", kind);
  if (options.backend != Backend::kCpu) {
    fail(ErrorCode::kUnsupported,
         "PERFT's adapters on {}: they run on a CPU only; want backend cpu",
         to_string(options.backend));
  }
}

}  // namespace

struct PerftAdapters::State {
  State(const PerftModel& model, const PerftOptions& options, Communicator* ranks)
      : config(model.config),
        compute(options.compute),
        is_global(options.losses.scope == LossScope::kGlobal && options.losses.any()),
        communicator(ranks != nullptr && ranks->size() > 1 ? ranks : nullptr),
        pool(options.num_threads),
        layer(layer_of(model), options_of(options)) {}

  void forward(const PerftForwardArgs& args) {
    check_call(args);
    const Matrix<float> added = rows_.matrix(args.tokens.rows, config.hidden);
    ForwardArgs inner{.tokens = args.tokens,
                      .out = raw(added),
                      .request = args.request,
                      .recorder = args.recorder,
                      .saved = args.saved};
    if (config.kind != PerftKind::kRouted) give_routing(args, inner);
    layer.forward(inner);
    const float scale = config.scale();
    write_sums(added, args.base, args.out, args.recorder, [&](float* row) {
      for (std::int64_t h = 0; h < config.hidden; ++h) row[h] *= scale;
    });
  }

  void backward(const PerftBackwardArgs& args) {
    check_call(args);
    const bool wants_tokens = args.dtokens.data != nullptr;
    const Matrix<float> part = rows_.matrix(wants_tokens ? args.dout.rows : 0, config.hidden);
    BackwardArgs inner{.saved = args.saved,
                       .dout = scaled(args.dout),
                       .loss_counts = args.loss_counts,
                       .loss_scale = args.loss_scale,
                       .dtokens = wants_tokens ? raw(part) : RawMatrix{},
                       .dweight = args.dweight,
                       .dgate = args.dgate,
                       .experts = {.w13 = args.da, .w2 = args.db},
                       .accumulate = args.accumulate,
                       .recorder = args.recorder};
    if (communicator == nullptr) {
      layer.backward(inner);
    } else {
      backward_of_ranks(args, inner);
    }
    if (wants_tokens) write_sums(part, args.base, args.dtokens, args.recorder, [](float*) {});
  }

  PerftConfig config;
  DType compute;
  bool is_global;
  Communicator* communicator;  ///< Null: one rank.
  ThreadPool pool;
  MoeLayer layer;

 private:
  void check_call(const PerftForwardArgs& args) const {
    const std::int64_t num_tokens = args.tokens.rows;
    require_shape("tokens", args.tokens, num_tokens, config.hidden);
    require_shape("out", args.out, num_tokens, config.hidden);
    require_float("out", args.out.dtype);
    require_apart("out", args.out, "tokens", args.tokens);
    check_base(args.base, args.out, "out");
    const bool embedded = config.kind == PerftKind::kEmbedded;
    require(embedded || (args.expert.data == nullptr && args.weight.data == nullptr &&
                         args.kept.data == nullptr),
            "a routing is given to adapters of kind {}: those of kind embedded take one",
            to_string(config.kind));
    if (!embedded) return;
    const std::int64_t columns = config.router.top_k();
    require_shape("expert", args.expert, num_tokens, columns);
    require_shape("weight", args.weight, num_tokens, columns);
    if (args.kept.data != nullptr) require_shape("kept", args.kept, num_tokens * columns);
  }

  void check_call(const PerftBackwardArgs& args) const {
    require_shape("dout", args.dout, args.dout.rows, config.hidden);
    require_float("dout", args.dout.dtype);
    if (args.dtokens.data != nullptr) {
      require_shape("dtokens", args.dtokens, args.dout.rows, config.hidden);
      require_float("dtokens", args.dtokens.dtype);
      check_base(args.base, args.dtokens, "dtokens");
    }
    require(args.dweight.data == nullptr || config.kind == PerftKind::kEmbedded,
            "dweight of adapters of kind {}: those of kind embedded have weights of the layer",
            to_string(config.kind));
    require(args.dgate.data == nullptr || config.kind == PerftKind::kRouted,
            "dgate of adapters of kind {}: those of kind routed have a gate",
            to_string(config.kind));
    check_gradient("da", args.da, config.num_adapters * config.rank, config.hidden);
    check_gradient("db", args.db, config.num_adapters * config.hidden, config.rank);
    if (args.dgate.data != nullptr) {
      require_shape("dgate", args.dgate, config.router.num_logits(), config.hidden);
      require_float("dgate", args.dgate.dtype);
    }
    require(communicator == nullptr || !is_global || args.loss_counts.data != nullptr,
            "losses of scope global over {} ranks, and no loss_counts: want those of all ranks",
            communicator == nullptr ? 1 : communicator->size());
  }

  void check_gradient(const char* name, RawMatrix gradient, std::int64_t num,
                      std::int64_t cols) const {
    if (gradient.data == nullptr) return;
    require_shape(name, gradient, num, cols);
    require(gradient.dtype == DType::kF32 || gradient.dtype == compute,
            "{} is {}, want f32 or {}, in which the adapters compute", name,
            to_string(gradient.dtype), to_string(compute));
  }

  /// Element by element over what it is added to, or apart from it.
  static void check_base(ConstRawMatrix base, ConstRawMatrix out, const char* name) {
    if (base.data == nullptr) return;
    require_shape("base", base, out.rows, out.cols);
    require_float("base", base.dtype);
    if (base.data != out.data || base.dtype != out.dtype) require_apart(name, out, "base", base);
  }

  void give_routing(const PerftForwardArgs& args, ForwardArgs& inner) {
    const std::int64_t num_tokens = args.tokens.rows;
    if (config.kind == PerftKind::kEmbedded) {
      inner.expert = args.expert;
      inner.weight = args.weight;
      if (args.kept.data == nullptr) return;
      const Matrix<std::int32_t> kept = ids_.matrix(num_tokens, args.expert.shape[1]);
      for (std::int64_t i = 0; i < kept.size(); ++i) {
        kept.data[i] = args.kept[i] != 0 ? args.expert.data[i] : -1;
      }
      inner.expert = kept;
      return;
    }
    const Matrix<std::int32_t> all = ids_.matrix(num_tokens, config.num_adapters);
    const Matrix<float> ones = weights_.matrix(num_tokens, config.num_adapters);
    for (std::int64_t i = 0; i < all.size(); ++i) {
      all.data[i] = static_cast<std::int32_t>(i % config.num_adapters);
      ones.data[i] = 1.0F;
    }
    inner.expert = all;
    inner.weight = ones;
  }

  /// out = part, made ready row by row, + base. Rows of `part` are used up.
  template <typename Prepare>
  void write_sums(Matrix<float> part, ConstRawMatrix base, RawMatrix out, StageRecorder* recorder,
                  const Prepare& prepare) {
    const std::int64_t n = config.hidden;
    const ScopedStage stage(
        {.pool = &pool, .recorder = recorder}, "perft_sum",
        {.bytes = static_cast<double>(4 * part.size() + base.bytes() + out.bytes())});
    parallel_for(&pool, part.shape[0], [&](std::int64_t t, int) {
      float* const row = part.row(t);
      prepare(row);
      if (base.data != nullptr) row_ops::accumulate(base.dtype, 1.0F, base.row(t), row, n);
      row_ops::narrow(out.dtype, row, out.row(t), n);
    });
  }

  /// All gradients are linear in it, so the adapters' scale stands here once.
  ConstRawMatrix scaled(ConstRawMatrix dout) {
    const float scale = config.scale();
    if (scale == 1.0F) return dout;
    const Matrix<float> result = scaled_dout_.matrix(dout.rows, dout.cols);
    parallel_for(&pool, dout.rows, [&](std::int64_t t, int) {
      float* const row = result.row(t);
      row_ops::widen(dout.dtype, dout.row(t), row, dout.cols);
      for (std::int64_t h = 0; h < dout.cols; ++h) row[h] *= scale;
    });
    return raw(result);
  }

  /// Every rank adds up all of its parameters' gradients, so that ranks need not ask for the same.
  void backward_of_ranks(const PerftBackwardArgs& args, BackwardArgs inner) {
    const std::int64_t down = config.num_adapters * config.rank * config.hidden;
    const std::int64_t logits = config.kind == PerftKind::kRouted ? config.router.num_logits() : 0;
    const Vector<float> all = parts_.vector(config.num_parameters());
    const auto matrix = [&](std::int64_t first, std::int64_t num, std::int64_t cols) {
      return raw(Matrix<float>{all.data + first, {num, cols}});
    };
    const RawMatrix da = matrix(0, config.num_adapters * config.rank, config.hidden);
    const RawMatrix db = matrix(down, config.num_adapters * config.hidden, config.rank);
    const RawMatrix dgate = matrix(2 * down, logits, config.hidden);
    inner.experts = {.w13 = da, .w2 = db};
    inner.dgate = logits > 0 ? dgate : RawMatrix{};
    inner.accumulate = false;
    layer.backward(inner);
    if (!sums_ || !sums_->usable()) sums_ = std::make_unique<RankSums>(*communicator, all.size());
    sums_->add_up(all.data, all.size());
    const auto write = [&](RawMatrix sum, RawMatrix out) {
      if (out.data == nullptr) return;
      row_ops::write_gradient(reinterpret_cast<const float*>(sum.data), out.dtype, out.data,
                              sum.rows * sum.cols, args.accumulate);
    };
    write(da, args.da);
    write(db, args.db);
    write(dgate, args.dgate);
  }

  ArrayBuffer<float> rows_, scaled_dout_, weights_, parts_;
  ArrayBuffer<std::int32_t> ids_;
  std::unique_ptr<RankSums> sums_;
};

PerftAdapters::PerftAdapters(const PerftModel& model, const PerftOptions& options,
                             Communicator* communicator) {
  check_model(model, options);
  state_ = std::make_unique<State>(model, options, communicator);
}
PerftAdapters::~PerftAdapters() = default;
PerftAdapters::PerftAdapters(PerftAdapters&&) noexcept = default;
PerftAdapters& PerftAdapters::operator=(PerftAdapters&&) noexcept = default;

void PerftAdapters::forward(const PerftForwardArgs& args) { state_->forward(args); }
void PerftAdapters::backward(const PerftBackwardArgs& args) { state_->backward(args); }
void PerftAdapters::reload() { state_->layer.reload_experts(); }

metrics::Routing PerftAdapters::stats() {
  require(state_->config.kind == PerftKind::kRouted,
          "statistics of adapters of kind {}: those of kind routed have a routing",
          to_string(state_->config.kind));
  return state_->layer.stats();
}

const PerftConfig& PerftAdapters::config() const { return state_->config; }

}  // namespace switchyard
