// MoeLayer: the contract is checked here, once, for every backend.
#include "switchyard/layer.hpp"

#include <algorithm>
#include <utility>

#include "comm/ranks/collectively.hpp"
#include "core/id_check.hpp"
#include "core/one_caller.hpp"
#include "core/shape_check.hpp"
#include "layer/backward_check.hpp"
#include "layer/chain.hpp"
#include "layer/compute_check.hpp"
#include "layer/layer_runner.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

void check_length(const char* name, std::int64_t have, std::int64_t want) {
  require(have == want, "{} has {} values, want {}", name, have, want);
}

void check_place(const char* name, const Parameter& parameter, Backend backend) {
  require(parameter.empty() || parameter.where() == Backend::kCpu || backend == Backend::kCuda,
          "{} lies on {}, the layer on {}", name, to_string(parameter.where()), to_string(backend));
}

void check_bias(const char* name, const Parameter& bias, std::int64_t num_experts,
                Backend backend) {
  if (bias.empty()) return;
  check_length(name, bias.size(), num_experts);
  require(bias.dtype() == DType::kF32, "{} is {}, want f32", name, to_string(bias.dtype()));
  check_place(name, bias, backend);
}

void check_model(const LayerModel& model, Backend backend) {
  check(model.config);
  const std::int64_t gates = model.config.router.num_gates();
  const std::int64_t num_experts = gates * model.config.router.num_experts;
  const std::int64_t num_logits = gates * model.config.router.num_logits();
  const std::int64_t hidden = model.config.experts.hidden;
  const bool needs_gate = model.config.router.has_logits() || !model.gate.empty();
  const RouterNetwork& network = model.config.router.network;
  check_length("gate", model.gate.size(), needs_gate ? num_logits * network.features(hidden) : 0);
  check_place("gate", model.gate, backend);
  const bool noisy = model.config.router.noise.kind == RouterNoise::Kind::kLearned;
  check_length("noise_gate", model.noise_gate.size(), noisy ? num_logits * hidden : 0);
  check_place("noise_gate", model.noise_gate, backend);
  const auto check_floats = [backend](const char* name, const Parameter& values,
                                      std::int64_t size) {
    check_length(name, values.size(), size);
    require(values.dtype() == DType::kF32, "{} is {}, want f32", name, to_string(values.dtype()));
    check_place(name, values, backend);
  };
  check_floats("constant_experts", model.constant_experts,
               3 * hidden * model.config.router.zero_computation.constant);
  check_floats("gating_residual", model.gating_residual,
               model.config.router.gating_residual ? num_logits * num_logits : 0);
  check_floats("router_network", model.router_network, network.size(hidden));
  check_bias("router_bias", model.router_bias, num_logits, backend);
  check_bias("selection_bias", model.selection_bias, num_experts, backend);
  if (!model.selection_bias.empty()) check_selection_bias(model.config.router);
  require(model.experts != nullptr, "the layer has no source of expert weights");
  const bool shared = model.config.shared.num_experts > 0;
  require(shared == (model.shared != nullptr), "shared experts: configuration says {}, source {}",
          shared ? "yes" : "no", model.shared != nullptr ? "is there" : "is missing");
  check_length("shared_gate", model.shared_gate.size(), model.config.shared_gated ? hidden : 0);
  require(model.shared_gate.dtype() == DType::kF32, "shared_gate is {}, want f32",
          to_string(model.shared_gate.dtype()));
  check_place("shared_gate", model.shared_gate, backend);
}

/// What the router's rule asks of how the layer runs.
void check_router(const RouterConfig& router, std::int64_t hidden, const LayerOptions& options) {
  const char* const name = rule_name(router.kind);
  require(!router.is_variable() || !options.capacity_factor,
          "capacity_factor={} with the router {}: a token has any number of experts, so there is "
          "no K T / E to take it of; leave it out",
          options.capacity_factor.value_or(0), name);
  if (options.drop_policy == DropPolicy::kReroute) check_reroutes(router);
  if (options.backend == Backend::kCuda && !router.network.is_linear() &&
      router.network.inner(hidden) % 8 != 0) {
    fail(ErrorCode::kUnsupported,
         "the router {} with network={} of width={} on CUDA: its kernels take multiples of 8; want "
         "such a width or backend cpu",
         name, to_string(router.network.kind), router.network.inner(hidden));
  }
  // Of a K that is said, the kernels themselves tell what they take.
  constexpr std::int32_t kMostColumns = 32;
  if (options.backend == Backend::kCuda && router.is_variable() && router.top_k() > kMostColumns) {
    fail(ErrorCode::kUnsupported,
         "the router {} with num_experts={} on CUDA: its routing has a column for each expert, and "
         "kernels behind it take at most {}; want backend cpu",
         name, router.num_experts, kMostColumns);
  }
}

/// What weights on inputs and zero-computation experts do not go with.
void check_places(const LayerConfig& config, const LayerOptions& options) {
  const std::int32_t others = config.router.zero_computation.total();
  if (!config.weight_on_input && others == 0) return;
  const std::string name = config.weight_on_input
                               ? "weight_on_input"
                               : fmt::format("{} zero-computation experts", others);
  if (config.router.is_chain()) {
    fail(ErrorCode::kUnsupported, "{} with the router chain: want another router", name);
  }
  if (options.drop_policy == DropPolicy::kReroute && others > 0) {
    fail(ErrorCode::kUnsupported,
         "{} zero-computation experts with drop_policy=reroute: they have other slots than the "
         "others, which the router does not know; want token, choice, probs or bpr",
         others);
  }
}

/// What each of the layer's sources is asked for: on a CPU shared experts may be stored as numbers
/// beside others that are not.
WeightFormat weights_of(const LayerModel& model, const LayerOptions& options) {
  const WeightFormat wanted = options.weights;
  if (wanted == WeightFormat::kExact || wanted == WeightFormat::kQ8) return wanted;
  const WeightFormat stored = model.experts->stored_format();
  if (stored == WeightFormat::kExact || (wanted != WeightFormat::kStored && wanted != stored)) {
    fail(ErrorCode::kUnsupported,
         "weights={}, but those of these experts are stored as {}: want {}exact", to_string(wanted),
         stored == WeightFormat::kExact ? to_string(model.experts->dtype()) : to_string(stored),
         stored == WeightFormat::kExact ? "" : "these, or ");
  }
  return WeightFormat::kStored;
}

void check_options(const LayerOptions& options, const Communicator* communicator) {
  require(options.num_threads >= 0, "num_threads={} is negative", options.num_threads);
  const DType wire = options.dispatch_wire.value_or(DType::kF32);
  if (wire != DType::kF8E4M3) require_float("dispatch_wire", wire);
  require(options.layout.kind != LayoutKind::kAligned || options.layout.alignment >= 1,
          "alignment of the layout is {}, want at least 1", options.layout.alignment);
  require(options.max_tokens >= 0, "max_tokens={} is negative", options.max_tokens);
  require(communicator == nullptr || communicator->size() == 1 || options.max_tokens > 0,
          "max_tokens must be given when {} ranks share a layer",
          communicator == nullptr ? 1 : communicator->size());
  if (options.scratch != nullptr && options.backend != Backend::kCuda) {
    fail(ErrorCode::kUnsupported, "a layer on a CPU takes no scratch: its memory is its own");
  }
}

/// Logits that a call gives and takes.
void check_logits(const ForwardArgs& args, const RouterConfig& router) {
  const RouteRequest& request = args.request;
  const bool given = args.expert.data != nullptr;
  if (request.logits.data != nullptr) {
    require(!given && router.has_logits() && !router.is_chain(),
            "request.logits are asked for, but {}",
            given               ? "the routing is given"
            : router.is_chain() ? "a chain has those of each iteration"
                                : "the router has none");
    require_shape("request.logits", request.logits, args.tokens.rows, router.num_logits());
  }
  if (router.gating_residual && !given) {
    if (args.tokens.rows == 0) return;
    require(request.previous_logits.data != nullptr,
            "request.previous_logits are missing: the router has a gating residual, so it wants "
            "the logits [{}, {}] of the layer before",
            args.tokens.rows, router.num_logits());
    require_shape("request.previous_logits", request.previous_logits, args.tokens.rows,
                  router.num_logits());
    return;
  }
  require(request.previous_logits.data == nullptr, "request.previous_logits are given, but {}",
          given ? "so is the routing" : "the router has no gating residual");
}

void check_call(const ForwardArgs& args, const LayerConfig& config, const LayerOptions& options) {
  const std::int64_t hidden = config.experts.hidden;
  const std::int64_t num_tokens = args.tokens.rows;
  require(num_tokens >= 0, "tokens have {} rows", num_tokens);
  require_shape("tokens", args.tokens, num_tokens, hidden);
  require_float("tokens", args.tokens.dtype);
  require_shape("out", args.out, num_tokens, hidden);
  require_float("out", args.out.dtype);
  require_apart("out", args.out, "tokens", args.tokens);
  require(options.max_tokens == 0 || num_tokens <= options.max_tokens,
          "{} tokens exceed max_tokens={} of the layer", num_tokens, options.max_tokens);
  check_chain_call(args, config.router);
  check_logits(args, config.router);
  require(args.expert.data == nullptr || options.drop_policy != DropPolicy::kReroute,
          "a routing is given, and drop_policy=reroute: nobody knows the next best experts");
  if (args.request.top_score.data != nullptr) {
    require_shape("top_score", args.request.top_score, num_tokens);
    require(args.expert.data == nullptr, "top_score is asked for, but the routing is given");
  }
  if (args.expert.data == nullptr && args.weight.data == nullptr) return;
  require_shape("expert of the given routing", args.expert, num_tokens, config.router.top_k());
  require_shape("weight of the given routing", args.weight, num_tokens, config.router.top_k());
  if (options.backend == Backend::kCpu) {
    require_ids("expert", args.expert, config.router.num_experts);
  }
}

void check_saves(const ForwardArgs& args, const LayerOptions& options,
                 const Communicator* communicator) {
  if (options.backend == Backend::kCuda && options.device_engine == DeviceEngine::kNcclPairs &&
      communicator != nullptr && communicator->size() > 1) {
    fail(ErrorCode::kUnsupported,
         "a forward over nccl-pairs saves nothing for a backward: its ranks do not reach each "
         "other's memory");
  }
  require(options.weights == WeightFormat::kExact, "a backward wants exact weights, not {}",
          to_string(options.weights));
  if (args.expert.data == nullptr) (void)loss_groups(options.losses, args.tokens.rows);
}

void check_losses(const RouterConfig& router, const LayerOptions& options) {
  check(options.losses, router.num_experts);
  if (!options.losses.any()) return;
  if (options.backend == Backend::kCuda && options.losses.balance != 0 &&
      options.losses.zero_computation > 0 && options.losses.tau != 1) {
    fail(ErrorCode::kUnsupported,
         "the balance loss of a layer on CUDA with zero-computation experts of tau={}: such a loss "
         "is on a CPU only; want tau=0 or 1, or dlogits",
         options.losses.tau);
  }
  if (!router.has_logits()) {
    fail(ErrorCode::kUnsupported,
         "losses of a layer are of its router's logits, and the router {} has none",
         rule_name(router.kind));
  }
  if (router.num_logits() != router.num_experts) {
    fail(ErrorCode::kUnsupported,
         "losses of a layer do not know null experts, which the router {} has: want dlogits",
         rule_name(router.kind));
  }
}

}  // namespace

struct MoeLayer::State {
  LayerOptions options;
  Communicator* communicator = nullptr;
  std::unique_ptr<LayerRunner> runner;
  OneCaller caller;

  /// The other ranks would wait for one that has thrown until their deadline.
  template <typename Body>
  void leave_together(const Body& body) {
    if (communicator == nullptr || communicator->size() == 1) return body();
    collectively(*communicator, body);
  }
};

MoeLayer::MoeLayer(const LayerModel& model, const LayerOptions& options, Communicator* communicator)
    : state_(std::make_unique<State>()) {
  check_model(model, options.backend);
  check_options(options, communicator);
  check_router(model.config.router, model.config.experts.hidden, options);
  check_places(model.config, options);
  state_->options = options;
  const ZeroComputationExperts& others = model.config.router.zero_computation;
  if (others.tau > 0) {
    state_->options.losses.zero_computation = others.total();
    state_->options.losses.tau = others.tau;
  }
  check_losses(model.config.router, state_->options);
  state_->options.weights = weights_of(model, options);
  check_compute(model, state_->options);
  state_->communicator = communicator;
  const ChainConfig chain = model.config.router.chain;
  LayerModel each = model;
  each.config.router.chain = {};
  const bool is_chain = model.config.router.is_chain();
  if (options.backend == Backend::kCuda) {
#ifdef SWITCHYARD_WITH_CUDA
    const bool over_ranks = communicator != nullptr && communicator->size() > 1;
    std::unique_ptr<ChainSums> sums;  // first: when the layer is made other ranks may run theirs
    if (is_chain) {
      sums = make_cuda_chain_sums(chain, compute_type(model, state_->options), options.max_tokens,
                                  over_ranks ? options.max_tokens : 0, model.config.experts.hidden);
    }
    state_->runner = make_cuda_layer(each, state_->options, communicator);
    if (!is_chain) return;
    state_->runner = make_chain_layer(std::move(state_->runner), chain, std::move(sums), false);
    return;
#else
    fail(ErrorCode::kUnsupported, "this build has no layer for the backend cuda");
#endif
  }
  state_->runner = make_cpu_layer(each, state_->options, communicator);
  if (!is_chain) return;
  auto sums = make_cpu_chain_sums(chain, state_->runner->pool);
  state_->runner = make_chain_layer(std::move(state_->runner), chain, std::move(sums), true);
}

MoeLayer::~MoeLayer() = default;
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;

void MoeLayer::forward(const ForwardArgs& args) {
  const OneCaller::Call call(state_->caller, "MoeLayer::forward");
  state_->leave_together([&] {
    check_call(args, state_->runner->config, state_->options);
    if (args.saved != nullptr) {
      check_saves(args, state_->options, state_->communicator);
    }
    state_->runner->forward(args);
  });
}

void MoeLayer::backward(const BackwardArgs& args) {
  const OneCaller::Call call(state_->caller, "MoeLayer::backward");
  state_->leave_together([&] {
    LayerRunner& runner = *state_->runner;
    const Communicator* const ranks = state_->communicator;
    check_backward(args, runner.config, state_->options.losses, runner.weights(), runner.compute,
                   ranks != nullptr && ranks->size() > 1);
    runner.backward(args);
  });
}

void MoeLayer::reload_experts() {
  const OneCaller::Call call(state_->caller, "MoeLayer::reload_experts");
  state_->runner->reload_experts();
}

void MoeLayer::check() {
  const OneCaller::Call call(state_->caller, "MoeLayer::check");
  state_->runner->check();
}

metrics::Routing MoeLayer::stats() {
  const OneCaller::Call call(state_->caller, "MoeLayer::stats");
  return state_->runner->stats();
}

const LayerConfig& MoeLayer::config() const { return state_->runner->config; }
DType MoeLayer::compute_dtype() const { return state_->runner->compute; }
const ExpertWeights& MoeLayer::weights() const { return state_->runner->weights(); }
const Traffic& MoeLayer::traffic() const { return state_->runner->traffic; }
std::int64_t MoeLayer::rows_used() const { return state_->runner->rows_used; }
std::int64_t MoeLayer::rows_executed() const { return state_->runner->rows_executed; }

}  // namespace switchyard
