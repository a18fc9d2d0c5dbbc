// C interface: Soft-MoE over experts, forward and backward.
#include "switchyard/routing/soft_moe.hpp"

#include "capi/capi_backward.hpp"
#include "capi/capi_experts.hpp"
#include "core/gpu/device_scope.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

struct sy_soft_moe_saved_t {
  explicit sy_soft_moe_saved_t(Recompute how) : of_run(how) {}

  SavedSoftMoe of_run;
  std::uint64_t experts = 0;  // number of the object that has filled it; 0: none
  std::int64_t num_tokens = 0;
  SoftMoeConfig config{};
  capi::Calls calls{"the saved run"};
};

namespace {

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

/// Tensors lie where the experts are, on a GPU on the same one.
Backend place_of(const sy_experts_t& experts, std::initializer_list<const sy_tensor*> tensors) {
  if (!experts.fused) return Backend::kCpu;
  for (const sy_tensor* tensor : tensors) {
    require(tensor == nullptr || tensor->device_id == experts.device,
            "a tensor lies on GPU {}, the weights on GPU {}",
            tensor == nullptr ? -1 : tensor->device_id, experts.device);
  }
  return Backend::kCuda;
}

void run(sy_experts_t& experts, SoftMoeArgs args, void* stream) {
  if (experts.fused) {
    const DeviceScope scope(experts.device);
    experts.fused->mix(args, stream);
    return;
  }
  args.weights = experts.weights.get();
  args.execution = experts.execution();
  soft_moe(args);
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

void sy_soft_moe_saved_free(sy_soft_moe_saved saved) {
  if (saved != nullptr && saved->calls.may_free()) delete saved;
}

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
                          const sy_tensor* combine, sy_soft_moe_saved saved, void* stream) {
  return capi::guarded([&] {
    require(experts != nullptr, "experts is NULL");
    const auto call = experts->calls.begin();
    const Backend where = place_of(*experts, {x, phi, y, dispatch, combine});
    const std::int64_t hidden = experts->config.hidden;
    SoftMoeArgs args{.x = capi::raw_matrix("x", x, capi::kAny, hidden, where),
                     .phi = capi::raw_matrix("phi", phi, capi::kAny, hidden, where),
                     .config = to_config(capi::taken("config", config, default_config()))};
    const std::int64_t num_tokens = args.x.rows;
    args.out = capi::raw_matrix("y", y, num_tokens, hidden, where);
    args.dispatch = capi::optional_floats("dispatch", dispatch, num_tokens, args.phi.rows, where);
    args.combine = capi::optional_floats("combine", combine, num_tokens, args.phi.rows, where);
    if (saved == nullptr) {
      run(*experts, args, stream);
      return;
    }
    const auto filling = saved->calls.begin();
    if (where == Backend::kCuda) saved->calls.stays_behind(capi::StaysBehind::kGpu);
    args.saved = &saved->of_run;
    run(*experts, args, stream);
    saved->experts = experts->number;
    saved->num_tokens = num_tokens;
    saved->config = args.config;
  });
}

sy_status sy_soft_moe_backward(sy_experts experts, sy_soft_moe_saved saved, const sy_tensor* phi,
                               const sy_tensor* dy, const sy_gradients* gradients,
                               const sy_tensor* dphi, float* dscale, void* stream) {
  return capi::guarded([&] {
    require(experts != nullptr && saved != nullptr, "experts or saved is NULL");
    const auto call = experts->calls.begin();
    const auto using_up = saved->calls.begin();
    require(saved->experts == 0 || saved->experts == experts->number,
            "what is saved is of other experts");
    const sy_gradients given = capi::taken("gradients", gradients);
    require(given.weight == nullptr && given.gate == nullptr && given.router_bias == nullptr &&
                given.shared_w13 == nullptr && given.shared_w2 == nullptr &&
                given.shared_gate == nullptr && given.dlogits == nullptr &&
                given.loss_counts == nullptr,
            "gradients of a router or of shared experts are asked for: Soft-MoE has neither");
    const Backend where =
        place_of(*experts, {phi, dy, given.tokens, given.w13, given.w2, given.b13, given.b2, dphi});
    const std::int64_t hidden = experts->config.hidden;
    SoftMoeBackwardArgs args{
        .saved = &saved->of_run,
        .phi = capi::raw_matrix("phi", phi, capi::kAny, hidden, where),
        .dout = capi::raw_matrix("dy", dy, capi::kAny, hidden, where),
        .dscale = dscale,
        .experts = capi::expert_gradients(experts->config, given, false, where),
        .accumulate = given.accumulate != 0};
    args.dx = capi::optional_raw("gradients.tokens", given.tokens, args.dout.rows, hidden, where);
    args.dphi = capi::optional_raw("dphi", dphi, args.phi.rows, hidden, where);
    if (experts->fused) {
      const DeviceScope scope(experts->device);
      experts->fused->mix_backward(saved->config, saved->num_tokens, args, stream);
      return;
    }
    args.weights = experts->weights.get();
    args.execution = experts->execution();
    soft_moe_backward(args);
  });
}
