// C interface: what a forward leaves for its backward, and the way back through the layer.
#include "capi/capi_backward.hpp"

#include <functional>
#include <initializer_list>
#include <numeric>

#include "capi/capi_layer.hpp"
#include "core/gpu/device_scope.hpp"
#include "switchyard/backward.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

namespace switchyard::capi {

std::int64_t SavedExperts::bytes() const {
  if (owner == 0) return 0;
  // As SavedForward's formula, without logits: ids and weights of the routing are 8 bytes.
  return tokens.bytes() + 8 * expert.size() + preactivation.bytes();
}

sy_gradients default_gradients() {
  sy_gradients gradients{};
  gradients.loss_scale = 1;
  return gradients;
}

RawMatrix optional_raw(const char* name, const sy_tensor* tensor, std::int64_t rows,
                       std::int64_t cols, Backend where) {
  return tensor == nullptr ? RawMatrix{} : raw_matrix(name, tensor, rows, cols, where);
}

Matrix<float> optional_floats(const char* name, const sy_tensor* tensor, std::int64_t rows,
                              std::int64_t cols, Backend where) {
  return tensor == nullptr ? Matrix<float>{} : matrix<float>(name, tensor, rows, cols, where);
}

namespace {

/// [E, rows, cols] as [E * rows, cols]; of shared experts [rows, cols].
RawMatrix weight_gradient(const char* name, const sy_tensor* tensor, std::int64_t num_experts,
                          std::int64_t rows, std::int64_t cols, bool shared, Backend where) {
  if (tensor == nullptr) return {};
  if (shared) return raw_matrix(name, tensor, rows, cols, where);
  check_tensor(name, tensor, {num_experts, rows, cols}, where);
  const DType dtype = dtype_of(name, *tensor);
  require(dtype != DType::kI32, "{} is i32, want f32 or the compute type", name);
  return {data_of(*tensor), dtype, num_experts * rows, cols};
}

}  // namespace

ExpertGradients expert_gradients(const ExpertConfig& config, const sy_gradients& gradients,
                                 bool shared, Backend where) {
  const std::int64_t rows = (config.gated ? 2 : 1) * config.inner;
  const std::int32_t num_experts = config.num_experts;
  ExpertGradients result{
      .w13 = weight_gradient(shared ? "gradients.shared_w13" : "gradients.w13",
                             shared ? gradients.shared_w13 : gradients.w13, num_experts, rows,
                             config.hidden, shared, where),
      .w2 = weight_gradient(shared ? "gradients.shared_w2" : "gradients.w2",
                            shared ? gradients.shared_w2 : gradients.w2, num_experts, config.hidden,
                            config.inner, shared, where)};
  if (shared) return result;  // theirs have no biases in C
  require(config.bias || (gradients.b13 == nullptr && gradients.b2 == nullptr),
          "gradients.b13 or gradients.b2 is given, but the experts have no biases");
  result.b13 = optional_floats("gradients.b13", gradients.b13, num_experts, rows, where);
  result.b2 = optional_floats("gradients.b2", gradients.b2, num_experts, config.hidden, where);
  return result;
}

}  // namespace switchyard::capi

sy_status sy_saved_create(int32_t recompute, sy_saved* saved) {
  return capi::guarded([&] {
    require(saved != nullptr, "saved is NULL");
    *saved = new sy_saved_t(
        capi::enumerator("recompute", recompute, "sy_recompute", Recompute::kActivationInput));
  });
}

void sy_saved_free(sy_saved saved) { delete saved; }

int32_t sy_saved_ready(sy_saved saved) {
  bool ready = false;
  capi::guarded([&] {
    const auto call = saved->calls.begin();
    ready = saved->is_of_layer() ? saved->of_layer.ready() : saved->of_experts.ready;
  });
  return ready ? 1 : 0;
}

int64_t sy_saved_bytes(sy_saved saved) {
  std::int64_t bytes = 0;
  capi::guarded([&] {
    const auto call = saved->calls.begin();
    bytes = saved->is_of_layer() ? saved->of_layer.bytes() : saved->of_experts.bytes();
  });
  return bytes;
}

void sy_gradients_init(sy_gradients* gradients, size_t struct_size) {
  capi::give(gradients, capi::default_gradients(), struct_size);
}

sy_status sy_layer_forward_saved(sy_layer layer, const sy_tensor* tokens, const sy_tensor* expert,
                                 const sy_tensor* weight, const sy_tensor* out, sy_saved saved,
                                 void* stream) {
  return capi::guarded([&] {
    require(layer != nullptr && saved != nullptr, "layer or saved is NULL");
    const auto call = layer->calls.begin();
    const auto filling = saved->calls.begin();
    const DeviceScope scope(layer->device);
    ForwardArgs args = capi::forward_args(*layer, tokens, expert, weight, out, stream);
    args.saved = &saved->of_layer;
    saved->of_experts.owner = 0;
    layer->layer.forward(args);
  });
}

sy_status sy_layer_backward(sy_layer layer, sy_saved saved, const sy_tensor* dout,
                            const sy_gradients* gradients, void* stream) {
  return capi::guarded([&] {
    require(layer != nullptr && saved != nullptr, "layer or saved is NULL");
    const auto call = layer->calls.begin();
    const auto using_up = saved->calls.begin();
    const DeviceScope scope(layer->device);
    const sy_gradients given = capi::taken("gradients", gradients, capi::default_gradients());
    require(saved->of_experts.owner == 0, "what is saved is of experts, not of a layer");
    const Backend where = layer->backend;
    const LayerConfig& config = layer->layer.config();
    const std::int64_t hidden = config.experts.hidden;
    const std::int32_t num_logits = config.router.num_logits();
    const std::int64_t gate_rows = config.router.gate_rows();
    BackwardArgs args{.saved = &saved->of_layer,
                      .dout = capi::raw_matrix("dout", dout, capi::kAny, hidden, where),
                      .loss_scale = given.loss_scale,
                      .accumulate = given.accumulate != 0,
                      .stream = stream};
    const std::int64_t num_tokens = args.dout.rows;
    args.loss_counts = capi::loss_counts(given, num_logits, where);
    args.dlogits =
        capi::optional_floats("gradients.dlogits", given.dlogits, num_tokens, num_logits, where);
    args.dtokens = capi::optional_raw("gradients.tokens", given.tokens, num_tokens, hidden, where);
    args.dweight = capi::optional_floats("gradients.weight", given.weight, num_tokens,
                                         config.router.top_k(), where);
    const RouterNetwork& network = config.router.network;
    args.dgate = capi::optional_raw("gradients.gate", given.gate, gate_rows,
                                    network.features(hidden), where);
    args.dnoise_gate =
        capi::optional_raw("gradients.noise_gate", given.noise_gate, num_logits, hidden, where);
    const auto vector = [where](const char* name, const sy_tensor* tensor, std::int64_t size) {
      const Vector<const float> values = capi::optional_vector(name, tensor, size, where);
      return Vector<float>{const_cast<float*>(values.data), values.shape};
    };
    args.drouter_bias = vector("gradients.router_bias", given.router_bias, gate_rows);
    args.drouter_network =
        vector("gradients.router_network", given.router_network, network.size(hidden));
    const auto floats = [where](const char* name, const sy_tensor* tensor,
                                std::initializer_list<std::int64_t> shape) {
      if (tensor == nullptr) return Vector<float>{};
      capi::check_tensor(name, tensor, shape, where);
      capi::check_dtype(name, *tensor, DType::kF32);
      const std::int64_t size =
          std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
      return Vector<float>{reinterpret_cast<float*>(capi::data_of(*tensor)), {size}};
    };
    args.dconstant_experts = floats("gradients.constant_experts", given.constant_experts,
                                    {config.router.zero_computation.constant, 3, hidden});
    args.dgating_residual =
        floats("gradients.gating_residual", given.gating_residual, {num_logits, num_logits});
    args.dprevious_logits = capi::optional_floats(
        "gradients.previous_logits", given.previous_logits, num_tokens, num_logits, where);
    ExpertConfig here = config.experts;
    here.num_experts = layer->layer.weights().num_local();
    args.experts = capi::expert_gradients(here, given, false, where);
    if (config.shared.num_experts > 0) {
      args.shared = capi::expert_gradients(config.shared, given, true, where);
      args.dshared_gate = vector("gradients.shared_gate", given.shared_gate, hidden);
    } else {
      require(
          given.shared_w13 == nullptr && given.shared_w2 == nullptr && given.shared_gate == nullptr,
          "gradients of shared experts are asked for, but the layer has none");
    }
    layer->layer.backward(args);
  });
}

sy_status sy_layer_reload_experts(sy_layer layer) {
  return capi::guarded([&] {
    require(layer != nullptr, "layer is NULL");
    const auto call = layer->calls.begin();
    const DeviceScope scope(layer->device);
    require(layer->can_reload,
            "the layer has copied its arrays: experts that are to be read again are given with "
            "experts_in_place");
    layer->layer.reload_experts();
  });
}
