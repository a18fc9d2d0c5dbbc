// C interface: Soft-MoE over experts, forward and backward.
#include "switchyard/routing/soft_moe.hpp"

#include "capi/capi_backward.hpp"
#include "capi/capi_experts.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

struct sy_soft_moe_saved_t {
  explicit sy_soft_moe_saved_t(Recompute how) : of_run(how) {}

  SavedSoftMoe of_run;
  std::uint64_t experts = 0;  // number of the object that has filled it; 0: none
  capi::Calls calls{"the saved run"};
};

namespace {

constexpr Backend kCpu = Backend::kCpu;

sy_soft_moe_config default_config() {
  return {.struct_size = sizeof(sy_soft_moe_config),
          .slots = 1,
          .group = 0,
          .sequence = 0,
          .normalize = 1,
          .causal = 0,
          .scale = 1.0F};
}

SoftMoeConfig to_config(const sy_soft_moe_config& config) {
  return {.slots = config.slots,
          .group = config.group,
          .sequence = config.sequence,
          .normalize = config.normalize != 0,
          .causal = config.causal != 0,
          .scale = config.scale};
}

void require_on_cpu(const sy_experts_t& experts) {
  if (experts.fused) {
    fail(ErrorCode::kUnsupported, "Soft-MoE has no kernel on CUDA: want experts on a CPU");
  }
}

}  // namespace

void sy_soft_moe_config_init(sy_soft_moe_config* config, size_t struct_size) {
  capi::give(config, default_config(), struct_size);
}

sy_status sy_soft_moe_saved_create(int32_t recompute, sy_soft_moe_saved* saved) {
  return capi::guarded([&] {
    require(saved != nullptr, "saved is NULL");
    *saved = new sy_soft_moe_saved_t(
        capi::enumerator("recompute", recompute, "sy_recompute", Recompute::kActivationInput));
  });
}

void sy_soft_moe_saved_free(sy_soft_moe_saved saved) { delete saved; }

int64_t sy_soft_moe_saved_bytes(sy_soft_moe_saved saved) {
  std::int64_t bytes = 0;
  capi::guarded([&] {
    const auto call = saved->calls.begin();
    bytes = saved->of_run.bytes();
  });
  return bytes;
}

sy_status sy_soft_moe_run(sy_experts experts, const sy_soft_moe_config* config, const sy_tensor* x,
                          const sy_tensor* phi, const sy_tensor* y, const sy_tensor* dispatch,
                          const sy_tensor* combine, sy_soft_moe_saved saved) {
  return capi::guarded([&] {
    require(experts != nullptr, "experts is NULL");
    const auto call = experts->calls.begin();
    require_on_cpu(*experts);
    const std::int64_t hidden = experts->config.hidden;
    SoftMoeArgs args{.x = capi::raw_matrix("x", x, capi::kAny, hidden, kCpu),
                     .phi = capi::raw_matrix("phi", phi, capi::kAny, hidden, kCpu),
                     .weights = experts->weights.get(),
                     .config = to_config(capi::taken("config", config, default_config())),
                     .execution = experts->execution()};
    const std::int64_t num_tokens = args.x.rows;
    args.out = capi::raw_matrix("y", y, num_tokens, hidden, kCpu);
    args.dispatch = capi::optional_floats("dispatch", dispatch, num_tokens, args.phi.rows, kCpu);
    args.combine = capi::optional_floats("combine", combine, num_tokens, args.phi.rows, kCpu);
    if (saved == nullptr) {
      soft_moe(args);
      return;
    }
    const auto filling = saved->calls.begin();
    args.saved = &saved->of_run;
    saved->experts = experts->number;
    soft_moe(args);
  });
}

sy_status sy_soft_moe_backward(sy_experts experts, sy_soft_moe_saved saved, const sy_tensor* phi,
                               const sy_tensor* dy, const sy_gradients* gradients,
                               const sy_tensor* dphi, float* dscale) {
  return capi::guarded([&] {
    require(experts != nullptr && saved != nullptr, "experts or saved is NULL");
    const auto call = experts->calls.begin();
    const auto using_up = saved->calls.begin();
    require_on_cpu(*experts);
    require(saved->experts == 0 || saved->experts == experts->number,
            "what is saved is of other experts");
    const sy_gradients given = capi::taken("gradients", gradients);
    require(given.weight == nullptr && given.gate == nullptr && given.router_bias == nullptr &&
                given.shared_w13 == nullptr && given.shared_w2 == nullptr &&
                given.shared_gate == nullptr && given.dlogits == nullptr &&
                given.loss_counts == nullptr,
            "gradients of a router or of shared experts are asked for: Soft-MoE has neither");
    const std::int64_t hidden = experts->config.hidden;
    SoftMoeBackwardArgs args{.saved = &saved->of_run,
                             .phi = capi::raw_matrix("phi", phi, capi::kAny, hidden, kCpu),
                             .weights = experts->weights.get(),
                             .dout = capi::raw_matrix("dy", dy, capi::kAny, hidden, kCpu),
                             .dscale = dscale,
                             .experts = capi::expert_gradients(experts->config, given, false, kCpu),
                             .accumulate = given.accumulate != 0,
                             .execution = experts->execution()};
    args.dx = capi::optional_raw("gradients.tokens", given.tokens, args.dout.rows, hidden, kCpu);
    args.dphi = capi::optional_raw("dphi", dphi, args.phi.rows, hidden, kCpu);
    soft_moe_backward(args);
  });
}
