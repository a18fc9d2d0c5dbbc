// C interface: PERFT's adapters beside a frozen layer, forward and backward.
#include "switchyard/perft.hpp"

#include <limits>
#include <optional>

#include "capi/capi_backward.hpp"
#include "capi/capi_layer.hpp"
#include "core/gpu/device_scope.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

struct sy_perft_t {
  PerftAdapters adapters;
  Backend backend;
  int device;  // -1: the thread's current one
  capi::Calls calls;
};

namespace {

sy_perft_config default_config() {
  const PerftConfig defaults;
  return {.struct_size = sizeof(sy_perft_config),
          .kind = SY_PERFT_ROUTED,
          .alpha = defaults.alpha,
          .activation = SY_IDENTITY,
          .compute = -1,
          .num_threads = 1,
          .router = nullptr,
          .losses = nullptr,
          .max_tokens = 0};
}

/// A [M, r, H] and B [M, H, r], of one type and in one place, where the gate is as well.
void check_adapters(const sy_tensor* a, const sy_tensor* b, const sy_tensor* gate) {
  const Backend where = capi::backend_of("a", a);
  capi::check_tensor("a", a, {capi::kAny, capi::kAny, capi::kAny}, where);
  require(a->shape[0] <= std::numeric_limits<std::int32_t>::max(), "a has {} adapters",
          a->shape[0]);
  capi::check_tensor("b", b, {a->shape[0], a->shape[2], a->shape[1]}, where);
  require(capi::dtype_of("b", *b) == capi::dtype_of("a", *a), "b is {}, but a is {}",
          to_string(capi::dtype_of("b", *b)), to_string(capi::dtype_of("a", *a)));
  for (const sy_tensor* tensor : {b, gate}) {
    require(tensor == nullptr || tensor->device_id == a->device_id,
            "a lies on device {}, b or gate on device {}", a->device_id,
            tensor == nullptr ? 0 : tensor->device_id);
  }
}

PerftConfig to_perft(const sy_perft_config& given, const sy_tensor& a) {
  PerftConfig config{
      .kind = capi::enumerator("kind", given.kind, "sy_perft_kind", PerftKind::kShared),
      .num_adapters = static_cast<std::int32_t>(a.shape[0]),
      .hidden = a.shape[2],
      .rank = a.shape[1],
      .alpha = given.alpha,
      .activation =
          capi::enumerator("activation", given.activation, "sy_activation", Activation::kIdentity)};
  const bool by_rule = config.kind == PerftKind::kRouted || config.kind == PerftKind::kEmbedded;
  require(by_rule || given.router == nullptr,
          "a router is given to adapters of kind {}, which every token meets",
          to_string(config.kind));
  require(!by_rule || given.router != nullptr, "adapters of kind {} want a router",
          to_string(config.kind));
  if (by_rule) config.router = capi::to_config(capi::taken("router", given.router));
  check(config);
  return config;
}

PerftOptions to_options(const sy_perft_config& given, Backend where, DType of_a) {
  PerftOptions options{.backend = where,
                       .compute = of_a,
                       .num_threads = given.num_threads,
                       .max_tokens = given.max_tokens};
  if (given.compute != -1) options.compute = capi::to_dtype("compute", given.compute);
  if (given.losses != nullptr) options.losses = capi::to_losses(*given.losses);
  return options;
}

PerftModel to_model(const PerftConfig& config, const sy_tensor* a, const sy_tensor* b,
                    const sy_tensor* gate, Backend where) {
  PerftModel model{
      .config = config,
      .adapters = capi::source_of(config.experts(), a, b, nullptr, nullptr, "", where)};
  if (gate == nullptr) return model;
  const std::int64_t rows =
      config.kind == PerftKind::kRouted ? config.router.num_logits() : capi::kAny;
  const ConstRawMatrix values = capi::raw_matrix("gate", gate, rows, config.hidden, where);
  model.gate = {values.data, values.dtype, values.rows * values.cols, where};
  return model;
}

}  // namespace

void sy_perft_config_init(sy_perft_config* config, size_t struct_size) {
  capi::give(config, default_config(), struct_size);
}

sy_status sy_perft_create(const sy_perft_config* config, const sy_tensor* a, const sy_tensor* b,
                          const sy_tensor* gate, sy_communicator communicator, sy_perft* perft) {
  return capi::guarded([&] {
    require(perft != nullptr, "perft is NULL");
    const sy_perft_config given = capi::taken("config", config, default_config());
    check_adapters(a, b, gate);
    const Backend where = capi::backend_of("a", a);
    const PerftModel model = to_model(to_perft(given, *a), a, b, gate, where);
    const PerftOptions options = to_options(given, where, capi::dtype_of("a", *a));
    const int device = where == Backend::kCuda ? a->device_id : DeviceScope::kNone;
    const DeviceScope scope(device);
    Communicator* ranks = nullptr;
    std::shared_ptr<capi::CallLock> lock;  // handles of one communicator take turns
    std::unique_lock<capi::CallLock> call;
    if (communicator != nullptr) {
      ranks = communicator->communicator.get();
      lock = communicator->calls.lock();
      call = communicator->calls.begin();
    }
    const capi::StaysBehind part = where == Backend::kCuda ? capi::StaysBehind::kGpu
                                   : ranks != nullptr && ranks->size() > 1
                                       ? capi::StaysBehind::kRanks
                                       : capi::StaysBehind::kNothing;
    *perft = new sy_perft_t{PerftAdapters(model, options, ranks), where, device,
                            capi::Calls("the adapters", part, lock)};
  });
}

void sy_perft_free(sy_perft perft) {
  if (perft == nullptr || !perft->calls.may_free()) return;
  const DeviceScope scope(perft->device);
  delete perft;
}

sy_status sy_perft_forward(sy_perft perft, const sy_tensor* tokens, const sy_tensor* base,
                           const sy_tensor* expert, const sy_tensor* weight,
                           const sy_route_request* request, const sy_tensor* out, sy_saved saved,
                           void* stream) {
  return capi::guarded([&] {
    require(perft != nullptr, "perft is NULL");
    const auto call = perft->calls.begin();
    std::optional<std::unique_lock<capi::CallLock>> filling;
    const DeviceScope scope(perft->device);
    const Backend where = perft->backend;
    const PerftConfig& config = perft->adapters.config();
    PerftForwardArgs args{
        .tokens = capi::raw_matrix("tokens", tokens, capi::kAny, config.hidden, where),
        .stream = stream};
    const std::int64_t num_tokens = args.tokens.rows;
    args.base = capi::optional_raw("base", base, num_tokens, config.hidden, where);
    args.out = capi::raw_matrix("out", out, num_tokens, config.hidden, where);
    if (expert != nullptr) {
      args.expert = capi::matrix<std::int32_t>("expert", expert, num_tokens, capi::kAny, where);
    }
    if (weight != nullptr) {
      args.weight = capi::matrix<float>("weight", weight, num_tokens, capi::kAny, where);
    }
    if (request != nullptr) args.request = capi::to_request(request, num_tokens, where);
    if (saved != nullptr) {
      filling.emplace(saved->calls.begin());
      args.saved = &saved->of_layer;
      saved->of_experts.owner = 0;
    }
    perft->adapters.forward(args);
  });
}

sy_status sy_perft_backward(sy_perft perft, sy_saved saved, const sy_tensor* dout,
                            const sy_tensor* base, const sy_gradients* gradients, void* stream) {
  return capi::guarded([&] {
    require(perft != nullptr && saved != nullptr, "perft or saved is NULL");
    const auto call = perft->calls.begin();
    const auto using_up = saved->calls.begin();
    const DeviceScope scope(perft->device);
    const sy_gradients given = capi::taken("gradients", gradients, capi::default_gradients());
    require(saved->of_experts.owner == 0, "what is saved is of experts, not of adapters");
    require(
        given.b13 == nullptr && given.b2 == nullptr && given.router_bias == nullptr &&
            given.noise_gate == nullptr && given.router_network == nullptr &&
            given.shared_w13 == nullptr && given.shared_w2 == nullptr &&
            given.shared_gate == nullptr && given.dlogits == nullptr,
        "gradients are asked for that adapters have not: want tokens, weight, w13, w2 and gate");
    const Backend where = perft->backend;
    const PerftConfig& config = perft->adapters.config();
    const ExpertGradients of_experts =
        capi::expert_gradients(config.experts(), given, false, where);
    PerftBackwardArgs args{.saved = &saved->of_layer,
                           .dout = capi::raw_matrix("dout", dout, capi::kAny, config.hidden, where),
                           .loss_scale = given.loss_scale,
                           .da = of_experts.w13,
                           .db = of_experts.w2,
                           .accumulate = given.accumulate != 0,
                           .stream = stream};
    const std::int64_t num_tokens = args.dout.rows;
    args.base = capi::optional_raw("base", base, num_tokens, config.hidden, where);
    args.dtokens =
        capi::optional_raw("gradients.tokens", given.tokens, num_tokens, config.hidden, where);
    args.dweight =
        capi::optional_floats("gradients.weight", given.weight, num_tokens, capi::kAny, where);
    args.dgate = capi::optional_raw("gradients.gate", given.gate, capi::kAny, config.hidden, where);
    if (config.kind == PerftKind::kRouted) {
      args.loss_counts = capi::loss_counts(given, config.router.num_logits(), where);
    }
    perft->adapters.backward(args);
  });
}

sy_status sy_perft_reload(sy_perft perft) {
  return capi::guarded([&] {
    require(perft != nullptr, "perft is NULL");
    const auto call = perft->calls.begin();
    const DeviceScope scope(perft->device);
    perft->adapters.reload();
  });
}

sy_status sy_perft_check(sy_perft perft) {
  return capi::guarded([&] {
    require(perft != nullptr, "perft is NULL");
    const auto call = perft->calls.begin();
    const DeviceScope scope(perft->device);
    perft->adapters.check();
  });
}

sy_status sy_perft_stats(sy_perft perft, sy_routing_stats* stats) {
  return capi::guarded([&] {
    require(perft != nullptr, "perft is NULL");
    capi::check_struct("stats", stats);
    const auto call = perft->calls.begin();
    const DeviceScope scope(perft->device);
    capi::give_stats(perft->adapters.stats(), 0, perft->adapters.config().router.top_k(), *stats);
  });
}
