// Any text is either refused, or the configuration of a whole model whose sizes are sound and whose
// positions have angles.
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "models/released/config.hpp"
#include "switchyard/error.hpp"

using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::models::ReleasedConfig;

namespace {

bool is_sound(const ReleasedConfig& config) {
  const auto finite = [](float x) { return std::isfinite(x); };
  if (config.heads < 1 || config.kv_heads < 1 || config.heads % config.kv_heads != 0) return false;
  if (config.query_dim < 1 || config.value_dim < 1 || config.rope.dim % 2 != 0) return false;
  if (std::ssize(config.windows) != config.blocks.num_layers || config.positions < 1) return false;
  if (config.rope.dim > config.query_dim || !finite(config.score_scale)) return false;
  const std::vector<float> frequencies = rope_frequencies(config.rope);
  const auto angles = rope_angles(config.rope, frequencies, config.positions - 1, 1);
  return std::all_of(frequencies.begin(), frequencies.end(), finite) &&
         std::all_of(angles.cosine.begin(), angles.cosine.end(), finite) &&
         std::all_of(angles.sine.begin(), angles.sine.end(), finite);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const ReleasedConfig config =
        switchyard::models::read_released_config(switchyard::parse_json(text, "fuzz"), "fuzz");
    if (!is_sound(config)) std::abort();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBadFile) std::abort();
  }
  return 0;
}
