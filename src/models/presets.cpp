// The table of presets.
#include "core/check.hpp"
#include "core/printable.hpp"
#include "switchyard/models/config.hpp"

namespace switchyard::models {
namespace {

struct Sizes {
  std::int32_t layers;
  std::int64_t hidden;
  std::int32_t heads;
  std::int64_t sequence;
  std::int32_t experts, top_k;
  std::int64_t inner;
  std::int64_t vocabulary = 256;
};

ModelConfig config_of(const Sizes& sizes) {
  ModelConfig config;
  config.vocabulary = sizes.vocabulary;
  config.hidden = sizes.hidden;
  config.layers = sizes.layers;
  config.heads = sizes.heads;
  config.kv_heads = sizes.heads;
  config.head_dim = sizes.hidden / sizes.heads;
  config.sequence = sizes.sequence;
  config.experts = sizes.experts;
  config.top_k = sizes.top_k;
  config.inner = sizes.inner;
  config.losses.balance = 0.01;
  config.losses.z = 0.001;
  return config;
}

}  // namespace

std::span<const Preset> presets() {
  static const Preset table[] = {
      {"smoke", "seconds on a CPU: to see that everything runs",
       config_of({.layers = 2,
                  .hidden = 64,
                  .heads = 2,
                  .sequence = 64,
                  .experts = 4,
                  .top_k = 2,
                  .inner = 64}),
       8, 60, 10, 3e-3},
      {"cpu-10min", "ten minutes on two cores",
       config_of({.layers = 4,
                  .hidden = 192,
                  .heads = 6,
                  .sequence = 256,
                  .experts = 8,
                  .top_k = 2,
                  .inner = 384}),
       16, 600, 60, 2e-3},
      {"s", "82 million parameters, 25 of them active",
       config_of({.layers = 6,
                  .hidden = 512,
                  .heads = 8,
                  .sequence = 512,
                  .experts = 8,
                  .top_k = 2,
                  .inner = 1024}),
       64, 1340, 100, 1e-3},
      {"m", "0.7 billion parameters, 0.13 of them active",
       config_of({.layers = 12,
                  .hidden = 768,
                  .heads = 12,
                  .sequence = 1024,
                  .experts = 32,
                  .top_k = 4,
                  .inner = 768,
                  .vocabulary = 16384}),
       32, 2000, 200, 6e-4},
  };
  return table;
}

const Preset& find_preset(std::string_view name) {
  std::string names;
  for (const Preset& preset : presets()) {
    if (name == preset.name) return preset;
    names += std::string(names.empty() ? "" : ", ") + preset.name;
  }
  fail(ErrorCode::kInvalidArgument, "preset '{}' is not one of: {}", printable(name), names);
}

}  // namespace switchyard::models
