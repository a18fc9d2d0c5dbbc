// PERFT's adapters: the contract is checked here, once, for every backend.
#include "switchyard/perft.hpp"

#include <utility>

#include "core/shape_check.hpp"
#include "experts/raw_matrix.hpp"
#include "perft/adapters.hpp"

namespace switchyard {
namespace {

void check_model(const PerftModel& model, const PerftOptions& options) {
  check(model.config);
  const bool routed = model.config.kind == PerftKind::kRouted;
  const char* const kind = to_string(model.config.kind);
  require(model.adapters != nullptr, "the adapters have no source");
  require(routed || model.gate.empty(),
          "{} adapters take no gate: they have no router of their own", kind);
  require(options.max_tokens >= 0, "max_tokens={} is negative", options.max_tokens);
}

/// Element by element over what it is added to, or apart from it.
void check_base(ConstRawMatrix base, ConstRawMatrix out, const char* name) {
  if (base.data == nullptr) return;
  require_shape("base", base, out.rows, out.cols);
  require_float("base", base.dtype);
  if (base.data != out.data || base.dtype != out.dtype) require_apart(name, out, "base", base);
}

}  // namespace

LayerModel layer_of(const PerftModel& model, const ExpertConfig& experts,
                    std::shared_ptr<const ExpertSource> source, std::int32_t columns) {
  const bool routed = model.config.kind == PerftKind::kRouted;
  const ForcedRouter all{.load = ForcedRouter::Load::kRoundRobin, .top_k = columns};
  return {
      .config = {.router = routed ? model.config.router
                                  : RouterConfig{.num_experts = experts.num_experts, .kind = all},
                 .experts = experts},
      .gate = routed ? model.gate : Parameter{},
      .experts = std::move(source)};
}

LayerOptions layer_options_of(const PerftOptions& options) {
  LayerOptions layer;
  layer.backend = options.backend;
  layer.compute = options.compute;
  layer.num_threads = options.num_threads;
  layer.losses = options.losses;
  layer.max_tokens = options.max_tokens;
  return layer;
}

struct PerftAdapters::State {
  State(const PerftModel& model, const PerftOptions& options, Communicator* ranks)
      : config(model.config),
        compute(options.compute),
        max_tokens(options.max_tokens),
        is_global(options.losses.scope == LossScope::kGlobal && options.losses.any()),
        num_ranks(ranks != nullptr ? ranks->size() : 1) {
    Communicator* const communicator = num_ranks > 1 ? ranks : nullptr;
    if (options.backend == Backend::kCpu) {
      runner = make_cpu_adapters(model, options, communicator);
      return;
    }
#ifdef SWITCHYARD_WITH_CUDA
    runner = make_cuda_adapters(model, options, communicator);
#else
    fail(ErrorCode::kUnsupported, "this build has no adapters for the backend cuda");
#endif
  }

  void check_call(const PerftForwardArgs& args) const {
    const std::int64_t num_tokens = args.tokens.rows;
    require_shape("tokens", args.tokens, num_tokens, config.hidden);
    require_shape("out", args.out, num_tokens, config.hidden);
    require_float("out", args.out.dtype);
    require_apart("out", args.out, "tokens", args.tokens);
    require(max_tokens == 0 || num_tokens <= max_tokens,
            "{} tokens exceed max_tokens={} of the adapters", num_tokens, max_tokens);
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
    require(num_ranks == 1 || !is_global || args.loss_counts.data != nullptr,
            "losses of scope global over {} ranks, and no loss_counts: want those of all ranks",
            num_ranks);
  }

  PerftConfig config;
  DType compute;
  std::int64_t max_tokens;
  bool is_global;
  int num_ranks;
  std::unique_ptr<AdaptersRunner> runner;

 private:
  void check_gradient(const char* name, RawMatrix gradient, std::int64_t num,
                      std::int64_t cols) const {
    if (gradient.data == nullptr) return;
    require_shape(name, gradient, num, cols);
    require(gradient.dtype == DType::kF32 || gradient.dtype == compute,
            "{} is {}, want f32 or {}, in which the adapters compute", name,
            to_string(gradient.dtype), to_string(compute));
  }
};

PerftAdapters::PerftAdapters(const PerftModel& model, const PerftOptions& options,
                             Communicator* communicator) {
  check_model(model, options);
  state_ = std::make_unique<State>(model, options, communicator);
}
PerftAdapters::~PerftAdapters() = default;
PerftAdapters::PerftAdapters(PerftAdapters&&) noexcept = default;
PerftAdapters& PerftAdapters::operator=(PerftAdapters&&) noexcept = default;

void PerftAdapters::forward(const PerftForwardArgs& args) {
  state_->check_call(args);
  state_->runner->forward(args);
}
void PerftAdapters::backward(const PerftBackwardArgs& args) {
  state_->check_call(args);
  state_->runner->backward(args);
}
void PerftAdapters::reload() { state_->runner->reload(); }
void PerftAdapters::check() { state_->runner->check(); }

metrics::Routing PerftAdapters::stats() {
  require(state_->config.kind == PerftKind::kRouted,
          "statistics of adapters of kind {}: those of kind routed have a routing",
          to_string(state_->config.kind));
  return state_->runner->stats();
}

const PerftConfig& PerftAdapters::config() const { return state_->config; }

}  // namespace switchyard
