// MoeLayer: the contract is checked here, once, for every backend.
#include "switchyard/layer.hpp"

#include <algorithm>
#include <utility>

#include "comm/ranks/collectively.hpp"
#include "core/id_check.hpp"
#include "core/one_caller.hpp"
#include "core/shape_check.hpp"
#include "experts/gradient_check.hpp"
#include "layer/chain.hpp"
#include "layer/compute_check.hpp"
#include "layer/layer_runner.hpp"
#include "layer/saved_forward.hpp"
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
  check_length("router_network", model.router_network.size(), network.size(hidden));
  require(model.router_network.dtype() == DType::kF32, "router_network is {}, want f32",
          to_string(model.router_network.dtype()));
  check_place("router_network", model.router_network, backend);
  check_place("gate", model.gate, backend);
  const bool noisy = model.config.router.noise.kind == RouterNoise::Kind::kLearned;
  check_length("noise_gate", model.noise_gate.size(), noisy ? num_logits * hidden : 0);
  check_place("noise_gate", model.noise_gate, backend);
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
void check_router(const RouterConfig& router, const LayerOptions& options) {
  const char* const name = rule_name(router.kind);
  require(!router.is_variable() || !options.capacity_factor,
          "capacity_factor={} with the router {}: a token has any number of experts, so there is "
          "no K T / E to take it of; leave it out",
          options.capacity_factor.value_or(0), name);
  if (options.drop_policy == DropPolicy::kReroute) {
    check_reroutes(router);
    if (options.backend == Backend::kCuda) {
      fail(ErrorCode::kUnsupported,
           "drop_policy=reroute on CUDA: tokens take the experts that are left one after the "
           "other, on a CPU only; want token, choice, probs, bpr or backend cpu");
    }
  }
  if (options.backend == Backend::kCuda && !router.network.is_linear()) {
    fail(ErrorCode::kUnsupported,
         "the router {} with network={} on CUDA: its logits are made on a CPU only; want "
         "network=linear or backend cpu",
         name, to_string(router.network.kind));
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

/// What weights on inputs and experts that return their input do not go with.
void check_places(const LayerConfig& config, const LayerOptions& options) {
  if (!config.weight_on_input && config.identity_experts == 0) return;
  const std::string name = config.weight_on_input
                               ? "weight_on_input"
                               : fmt::format("identity_experts={}", config.identity_experts);
  if (config.router.is_chain()) {
    fail(ErrorCode::kUnsupported, "{} with the router chain: want another router", name);
  }
  if (options.drop_policy == DropPolicy::kReroute && config.identity_experts > 0) {
    fail(ErrorCode::kUnsupported,
         "identity_experts={} with drop_policy=reroute: experts that return their input are never "
         "full, which the router does not know; want token, choice, probs or bpr",
         config.identity_experts);
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

void check_losses(const RouterConfig& router, const LayerOptions& options,
                  const Communicator* communicator) {
  check(options.losses, router.num_experts);
  if (!options.losses.any()) return;
  if (options.backend == Backend::kCuda && communicator != nullptr && communicator->size() > 1) {
    fail(ErrorCode::kUnsupported, "a layer over ranks on CUDA has no losses: one rank only");
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

void check_losses(const BackwardArgs& args, const SavedForward::State& saved,
                  const LossConfig& losses, std::int64_t num_experts, bool over_ranks) {
  const bool global = saved.losses.values.data != nullptr && losses.scope == LossScope::kGlobal;
  const bool given = args.loss_counts.data != nullptr;
  require(given ? global : !global || over_ranks,
          "loss_counts are {}given, and the layer {} losses of scope global: they go together",
          given ? "" : "not ", global ? "has" : "has no");
  if (given) require_shape("loss_counts", args.loss_counts, num_experts);
}

void check_router_gradients(const BackwardArgs& args, bool routed, std::int64_t num_tokens,
                            const LayerConfig& config) {
  const std::int64_t num_logits =
      std::int64_t{config.router.num_gates()} * config.router.num_logits();
  const bool asked = args.dlogits.data != nullptr || args.dgate.data != nullptr ||
                     args.dnoise_gate.data != nullptr || args.drouter_bias.data != nullptr ||
                     args.drouter_network.data != nullptr;
  require(config.router.has_logits() || !asked,
          "dlogits, dgate and drouter_bias are asked for, but the router {} has no logits",
          rule_name(config.router.kind));
  require(routed || !asked,
          "dlogits, dgate and drouter_bias are the router's, but the routing was given");
  if (args.dlogits.data != nullptr) {
    require_shape("dlogits", args.dlogits, num_tokens, num_logits);
  }
  if (args.dgate.data != nullptr) {
    require_shape("dgate", args.dgate, num_logits,
                  config.router.network.features(config.experts.hidden));
    require_float("dgate", args.dgate.dtype);
  }
  if (args.dnoise_gate.data != nullptr) {
    require(config.router.noise.kind == RouterNoise::Kind::kLearned,
            "dnoise_gate is asked for, but the router's noise is not learned");
    require_shape("dnoise_gate", args.dnoise_gate, num_logits, config.experts.hidden);
    require_float("dnoise_gate", args.dnoise_gate.dtype);
  }
  if (args.drouter_bias.data != nullptr) {
    require_shape("drouter_bias", args.drouter_bias, num_logits);
  }
  if (args.drouter_network.data != nullptr) {
    require(!config.router.network.is_linear(),
            "drouter_network is asked for, but the router's network is linear");
    require_shape("drouter_network", args.drouter_network,
                  config.router.network.size(config.experts.hidden));
  }
}

void check_shared_gradients(const BackwardArgs& args, const LayerConfig& config, DType compute) {
  const ExpertGradients& shared = args.shared;
  const bool asked = shared.w13.data != nullptr || shared.w2.data != nullptr ||
                     shared.b13.data != nullptr || shared.b2.data != nullptr;
  require(!asked || config.shared.num_experts > 0,
          "gradients of shared experts are asked for, but the layer has none");
  if (asked) check_gradients(shared, config.shared, 1, compute, "shared ");
  if (args.dshared_gate.data == nullptr) return;
  require(config.shared_gated, "dshared_gate is asked for, but shared experts have no gate");
  require_shape("dshared_gate", args.dshared_gate, config.experts.hidden);
}

/// All of it before anything is written or used up.
void check_backward(const BackwardArgs& args, const LayerConfig& config, const LossConfig& losses,
                    const ExpertWeights& experts, DType compute, bool over_ranks) {
  require(args.saved != nullptr, "backward has no saved forward");
  const SavedForward::State& saved = args.saved->state();
  using Use = SavedForward::State::Use;
  require(saved.use != Use::kUsed, "a backward has used this saved forward already");
  require(saved.use == Use::kReady, "no forward has filled this saved forward");
  check_chain_call(args, config.router);
  const std::int64_t hidden = config.experts.hidden;
  require_shape("dout", args.dout, saved.num_tokens, hidden);
  require_float("dout", args.dout.dtype);
  if (args.dtokens.data != nullptr) {
    require_shape("dtokens", args.dtokens, saved.num_tokens, hidden);
    require_float("dtokens", args.dtokens.dtype);
    require_apart("dtokens", args.dtokens, "dout", args.dout);
  }
  if (args.dweight.data != nullptr) {
    require_shape("dweight", args.dweight, saved.num_tokens, config.router.top_k());
  }
  check_router_gradients(args, saved.routed, saved.num_tokens, config);
  check_losses(args, saved, losses, config.router.num_experts, over_ranks);
  check_gradients(args.experts, config.experts, experts.num_local(), compute);
  check_shared_gradients(args, config, compute);
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
  check_router(model.config.router, options);
  check_places(model.config, options);
  check_chain(model.config.router, options);
  check_losses(model.config.router, options, communicator);
  state_->options = options;
  state_->options.weights = weights_of(model, options);
  check_compute(model, state_->options);
  state_->communicator = communicator;
  if (options.backend == Backend::kCuda) {
#ifdef SWITCHYARD_WITH_CUDA
    state_->runner = make_cuda_layer(model, state_->options, communicator);
    return;
#else
    fail(ErrorCode::kUnsupported, "this build has no layer for the backend cuda");
#endif
  }
  LayerModel each = model;
  each.config.router.chain = {};
  state_->runner = make_cpu_layer(each, state_->options, communicator);
  if (model.config.router.is_chain()) {
    state_->runner = make_chain_layer(std::move(state_->runner), model.config.router.chain);
  }
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
