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
