// C interface: the arrays of a layer's router.
#include <initializer_list>
#include <memory>
#include <vector>

#include "capi/capi_layer.hpp"
#include "core/check.hpp"

namespace switchyard::capi {

Parameter parameter(ConstRawMatrix values, Backend where, bool in_place) {
  if (in_place) return {values.data, values.dtype, values.rows * values.cols, where};
  const auto copy =
      std::make_shared<const std::vector<std::byte>>(values.data, values.data + values.bytes());
  return {copy->data(), values.dtype, values.rows * values.cols, Backend::kCpu, copy};
}

void set_router(const sy_layer_arrays& arrays, const sy_layer_options& options, LayerModel& model) {
  const bool in_place = arrays.router_in_place != 0;
  const Backend where =
      in_place && options.device_type == SY_DEVICE_CUDA ? Backend::kCuda : Backend::kCpu;
  const std::int64_t gates = model.config.router.num_gates();
  const std::int64_t num_logits = gates * model.config.router.num_logits();
  const auto bias = [&](const char* name, const sy_tensor* tensor, std::int64_t size) {
    const Vector<const float> values = optional_vector(name, tensor, size, where);
    if (values.data == nullptr) return Parameter();
    return parameter({reinterpret_cast<const std::byte*>(values.data), DType::kF32, 1, size}, where,
                     in_place);
  };
  const RouterNetwork& network = model.config.router.network;
  const std::int64_t hidden = model.config.experts.hidden;
  const auto matrix = [&](const char* name, const sy_tensor* tensor, std::int64_t cols) {
    return parameter(raw_matrix(name, tensor, num_logits, cols, where), where, in_place);
  };
  model.gate = matrix("gate", arrays.gate, network.features(hidden));
  if (arrays.noise_gate != nullptr) {
    model.noise_gate = matrix("noise_gate", arrays.noise_gate, hidden);
  }
  model.router_network = bias("router_network", arrays.router_network, network.size(hidden));
  model.router_bias = bias("router_bias", arrays.router_bias, num_logits);
  model.selection_bias =
      bias("selection_bias", arrays.selection_bias, gates * model.config.router.num_experts);
  const auto floats = [&](const char* name, const sy_tensor* tensor,
                          std::initializer_list<std::int64_t> shape, std::int64_t size) {
    require(size > 0 || tensor == nullptr, "{} is given, but the router has none", name);
    if (size == 0) return Parameter();
    require(tensor != nullptr, "{} is missing: the router moe++ wants {} values", name, size);
    check_tensor(name, tensor, shape, where);
    check_dtype(name, *tensor, DType::kF32);
    return parameter({data_of(*tensor), DType::kF32, 1, size}, where, in_place);
  };
  const std::int64_t constant = model.config.router.zero_computation.constant;
  model.constant_experts = floats("constant_experts", arrays.constant_experts,
                                  {constant, 3, hidden}, constant * 3 * hidden);
  const bool residual = model.config.router.gating_residual;
  model.gating_residual = floats("gating_residual", arrays.gating_residual,
                                 {num_logits, num_logits}, residual ? num_logits * num_logits : 0);
  if (where == Backend::kCpu || options.device_id < 0) return;
  for (const sy_tensor* tensor :
       {arrays.gate, arrays.noise_gate, arrays.router_network, arrays.router_bias,
        arrays.selection_bias, arrays.constant_experts, arrays.gating_residual}) {
    if (tensor == nullptr) continue;
    require(tensor->device_id == options.device_id,
            "gate or biases lie on GPU {}, the layer on GPU {}", tensor->device_id,
            options.device_id);
  }
}

void set_copies(std::int32_t identity_experts, RouterConfig& router) {
  ZeroComputationExperts& free = router.zero_computation;
  require(identity_experts == 0 || free.total() == 0,
          "identity_experts={} with the router moe++, which says how many copy experts there are",
          identity_experts);
  if (free.total() == 0) free.copy = identity_experts;
}

}  // namespace switchyard::capi
