// What MoeLayer::backward() is given.
#include "layer/backward_check.hpp"

#include "core/shape_check.hpp"
#include "experts/gradient_check.hpp"
#include "layer/chain.hpp"
#include "layer/saved_forward.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

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
  const std::int64_t num_logits = config.router.gate_rows();
  const bool asked = args.dlogits.data != nullptr || args.dgate.data != nullptr ||
                     args.dnoise_gate.data != nullptr || args.drouter_bias.data != nullptr ||
                     args.drouter_network.data != nullptr ||
                     args.dgating_residual.data != nullptr || args.dprevious_logits.data != nullptr;
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
  const bool of_residual =
      args.dgating_residual.data != nullptr || args.dprevious_logits.data != nullptr;
  require(
      config.router.gating_residual || !of_residual,
      "dgating_residual or dprevious_logits is asked for, but the router has no gating residual");
  if (args.dgating_residual.data != nullptr) {
    require_shape("dgating_residual", args.dgating_residual, num_logits * num_logits);
  }
  if (args.dprevious_logits.data != nullptr) {
    require_shape("dprevious_logits", args.dprevious_logits, num_tokens, num_logits);
  }
}

void check_constant_gradients(const BackwardArgs& args, const LayerConfig& config) {
  if (args.dconstant_experts.data == nullptr) return;
  const std::int32_t constant = config.router.zero_computation.constant;
  require(constant > 0, "dconstant_experts is asked for, but the layer has no constant experts");
  require_shape("dconstant_experts", args.dconstant_experts, 3 * config.experts.hidden * constant);
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

}  // namespace

void check_backward(const BackwardArgs& args, const LayerConfig& config, const LossConfig& losses,
                    const ExpertWeights& experts, DType compute, bool over_ranks) {
  require(args.saved != nullptr, "backward has no saved forward");
  const SavedForward::State& saved = args.saved->state();
  using Use = SavedForward::State::Use;
  require(saved.use != Use::kUsed, "a backward has used this saved forward already");
  require(saved.use == Use::kReady, "no forward has filled this saved forward");
  check_chain_call(args, config.router, losses, over_ranks);
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
  check_constant_gradients(args, config);
  check_losses(args, saved, losses, config.router.num_experts, over_ranks);
  check_gradients(args.experts, config.experts, experts.num_local(), compute);
  check_shared_gradients(args, config, compute);
}

}  // namespace switchyard
