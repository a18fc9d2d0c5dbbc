#pragma once

// What the blocks of a model, on a CPU and on a GPU, hand to a MoE layer alike.

#include "models/parameters.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/models/config.hpp"

namespace switchyard::models {

/// f32 values as a layer takes them; without memory of no rows: it is not wanted.
inline RawMatrix raw(float* data, std::int64_t rows, std::int64_t cols) {
  return {reinterpret_cast<std::byte*>(data), DType::kF32, data == nullptr ? 0 : rows,
          data == nullptr ? 0 : cols};
}
inline ConstRawMatrix raw(const float* data, std::int64_t rows, std::int64_t cols) {
  return {reinterpret_cast<const std::byte*>(data), DType::kF32, rows, cols};
}

/// Used where it lies, on `backend`; without memory there is no such parameter.
inline Parameter parameter(const float* data, std::int64_t size, Backend backend) {
  return data == nullptr ? Parameter() : Parameter(data, DType::kF32, size, backend);
}

/// Of routed or shared experts; none of frozen ones.
inline ExpertGradients expert_gradients(const Parameters& parameters, std::int64_t w13,
                                        std::int64_t w2) {
  if (parameters.gradient(w13) == nullptr) return {};
  const auto& first = parameters.tensors()[static_cast<std::size_t>(w13)];
  const auto& second = parameters.tensors()[static_cast<std::size_t>(w2)];
  return {.w13 = raw(first.gradient, first.shape[0] * first.shape[1], first.shape[2]),
          .w2 = raw(second.gradient, second.shape[0] * second.shape[1], second.shape[2])};
}

/// A dense layer as a MoE layer of one expert, which no router has to choose.
inline LayerConfig dense_config(const ModelConfig& config) {
  RouterConfig router{.num_experts = 1};
  router.kind = HashRouter{.top_k = 1};
  LayerConfig layer;
  layer.router = router;
  layer.experts = {.num_experts = 1, .hidden = config.hidden, .inner = config.dense_inner};
  return layer;
}

}  // namespace switchyard::models
