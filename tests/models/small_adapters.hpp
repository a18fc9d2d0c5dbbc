#pragma once

// Small models with adapters of every kind, for tests.

#include <cstring>
#include <string>
#include <vector>

#include "switchyard/models/model.hpp"
#include "tests/models/small_run.hpp"

namespace switchyard::models {

/// Of every kind, beside a model of 4 experts, 2 a token.
inline const std::vector<AdapterConfig>& every_kind() {
  static const std::vector<AdapterConfig> all{
      {.num_adapters = 3, .top_k = 2, .rank = 4, .alpha = 8},
      {.kind = PerftKind::kEmbedded, .num_adapters = 4, .rank = 3, .alpha = 6},
      {.kind = PerftKind::kDense, .num_adapters = 2, .rank = 5, .alpha = 5},
      {.kind = PerftKind::kShared, .num_adapters = 1, .rank = 8, .alpha = 16}};
  return all;
}

inline ModelConfig model_with(const AdapterConfig& adapters, const char* router = "top-k") {
  ModelConfig config = small_bytes_model();
  config.router = router;
  config.adapters = adapters;
  return config;
}

inline bool is_adapter(const ParameterTensor& tensor) { return tensor.group == Group::kAdapters; }

inline bool equal_bits(const float* a, const float* b, std::int64_t size) {
  return std::memcmp(a, b, static_cast<std::size_t>(4 * size)) == 0;
}

inline std::vector<std::int32_t> some_ids(std::size_t count) {
  std::vector<std::int32_t> ids(count);
  for (std::size_t i = 0; i < count; ++i) ids[i] = static_cast<std::int32_t>(37 * i * i % 256);
  return ids;
}

inline std::vector<float> logits_of(Model& model) {
  const std::vector<std::int32_t> ids = some_ids(32);
  std::vector<float> out(32 * 256);
  model.forward({ids.data(), {2, 16}}, {out.data(), {32, 256}});
  return out;
}

}  // namespace switchyard::models
