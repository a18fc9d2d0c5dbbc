// Where a router's parameters lie on a GPU, and all memory that its calls need.
#include <algorithm>

#include "core/check.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "core/half.hpp"
#include "core/row_ops.hpp"
#include "layer/gpu/router/router.hpp"
#include "route/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard {

namespace {

/// Where it lies if that is a GPU, else in `to`, in the tokens' type where that loses nothing:
/// products are then exact in one step.
Parameter gate_on_gpu(const Parameter& gate, DType of_tokens, DeviceBuffer& to) {
  if (gate.empty()) return gate;
  if (gate.where() == Backend::kCuda) {
    if (gate.dtype() != DType::kF32 && gate.dtype() != of_tokens) {
      fail(ErrorCode::kUnsupported,
           "a gate of {} that is used where it lies on the GPU, tokens of {}: it can be f32 or "
           "the tokens' type; with jitter or a network the router's tokens are f32",
           to_string(gate.dtype()), to_string(of_tokens));
    }
    return gate;
  }
  const std::vector<float> values = gate.widened();
  const bool exact = std::all_of(values.begin(), values.end(),
                                 [of_tokens](float x) { return round_to(of_tokens, x) == x; });
  const DType dtype = exact ? of_tokens : DType::kF32;
  std::vector<std::byte> bytes(values.size() * static_cast<std::size_t>(size_of(dtype)));
  row_ops::narrow(dtype, values.data(), bytes.data(), gate.size());
  to.reserve(std::ssize(bytes));
  copy_to_device(to.data(), bytes.data(), bytes.size());
  return {to.data(), dtype, gate.size(), Backend::kCuda};
}

Parameter bias_on_gpu(const Parameter& bias, DeviceBuffer& to) {
  if (bias.empty() || bias.where() == Backend::kCuda) return bias;
  upload(bias.widened(), to);
  return {to.data(), DType::kF32, bias.size(), Backend::kCuda};
}

/// As the gate's product has them: jitter and networks make them f32.
DType type_of_tokens(const RouterConfig& config, DType compute) {
  const bool f32 =
      config.noise.kind == RouterNoise::Kind::kInputJitter || !config.network.is_linear();
  return f32 ? DType::kF32 : compute;
}

std::int32_t gates_of(const LayerModel& model) {
  const RouterConfig& router = model.config.router;
  if (model.gate.empty()) return 1;
  const std::int64_t of_one =
      router.num_logits() * router.network.features(model.config.experts.hidden);
  return static_cast<std::int32_t>(model.gate.size() / of_one);
}

void upload_table(const RouterConfig& config, DeviceBuffer& to) {
  const auto* hash = std::get_if<HashRouter>(&config.kind);
  if (hash == nullptr || hash->table == nullptr || hash->table->empty()) return;
  const std::size_t bytes = sizeof(std::int32_t) * hash->table->size();
  to.reserve(static_cast<std::int64_t>(bytes));
  copy_to_device(to.data(), hash->table->data(), bytes);
}

}  // namespace

void upload(const std::vector<float>& values, DeviceBuffer& to) {
  if (values.empty()) return;
  to.reserve(static_cast<std::int64_t>(4 * values.size()));
  copy_to_device(to.data(), values.data(), 4 * values.size());
}

Vector<const float> uploaded(const DeviceBuffer& buffer) {
  return {reinterpret_cast<const float*>(buffer.data()), {buffer.bytes() / 4}};
}

CudaRouter::CudaRouter(const LayerModel& model, const LayerOptions& options, DType compute)
    : config_(model.config.router),
      hidden_(model.config.experts.hidden),
      num_gates_(gates_of(model)),
      capacity_factor_(options.capacity_factor),
      drop_policy_(options.drop_policy),
      losses_(options.losses),
      used_in_place_(model.gate.where() == Backend::kCuda ||
                     model.noise_gate.where() == Backend::kCuda ||
                     model.router_bias.where() == Backend::kCuda ||
                     model.router_network.where() == Backend::kCuda ||
                     model.gating_residual.where() == Backend::kCuda ||
                     model.selection_bias.where() == Backend::kCuda),
      gate_(gate_on_gpu(model.gate, type_of_tokens(config_, compute), uploaded_gate_)),
      noise_gate_(gate_on_gpu(model.noise_gate, compute, uploaded_noise_gate_)),
      bias_(bias_on_gpu(model.router_bias, uploaded_bias_)),
      selection_bias_(bias_on_gpu(model.selection_bias, uploaded_selection_bias_)),
      network_(config_.network, hidden_, bias_on_gpu(model.router_network, uploaded_network_)),
      residual_(config_.num_logits(), bias_on_gpu(model.gating_residual, uploaded_residual_)) {
  upload_table(config_, hash_table_);
}

void CudaRouter::reserve(std::int64_t num_tokens) {
  const std::int64_t experts = config_.num_experts;
  if (config_.has_logits()) (void)logits_.matrix<float>(num_tokens, config_.num_logits());
  if (config_.noise.kind == RouterNoise::Kind::kLearned) {
    (void)noise_logits_.matrix<float>(num_tokens, config_.num_logits());
  }
  if (config_.noise.kind == RouterNoise::Kind::kInputJitter) {
    (void)jittered_.matrix<float>(num_tokens, hidden_);
  }
  if (std::holds_alternative<HashRouter>(config_.kind)) {
    (void)token_ids_.vector<std::int32_t>(num_tokens);
  }
  network_.reserve(num_tokens, config_.num_logits());
  residual_.reserve(num_tokens);
  (void)expert_.matrix<std::int32_t>(num_tokens, config_.top_k());
  (void)weight_.matrix<float>(num_tokens, config_.top_k());
  (void)score_.vector<float>(num_tokens);
  (void)kept_.matrix<std::uint8_t>(num_tokens, config_.top_k());
  (void)counts_.vector<std::int64_t>(experts);
  (void)counts_kept_.vector<std::int64_t>(experts);
}

std::int64_t CudaRouter::workspace_bytes(std::int64_t num_tokens) const {
  if (!config_.has_logits()) return 0;
  return std::max({router_gemm_workspace_bytes(num_tokens, config_.num_logits(),
                                               config_.network.features(hidden_)),
                   network_.workspace_bytes(num_tokens), residual_.workspace_bytes(num_tokens)});
}

std::int64_t CudaRouter::backward_workspace_bytes(std::int64_t num_tokens) const {
  return std::max({router_gemm_backward_workspace_bytes(num_tokens, config_.num_logits(), hidden_),
                   network_.backward_workspace_bytes(num_tokens, config_.num_logits()),
                   residual_.backward_workspace_bytes(num_tokens)});
}

void CudaRouter::reserve_backward(std::int64_t num_tokens) {
  network_.reserve_backward(num_tokens, config_.num_logits());
  residual_.reserve_backward(num_tokens);
}

void CudaRouter::logits_backward(RouterGemmBackwardArgs args, Vector<float> dnetwork,
                                 const Execution& scratch) {
  args.gate = gate();
  network_.backward(args, dnetwork, scratch);
}

}  // namespace switchyard
