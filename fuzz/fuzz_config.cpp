// Any text is either refused, or a layer that the library accepts; without tensors it then fails
// with the name of one.
#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "checkpoint/families/family.hpp"
#include "switchyard/error.hpp"

using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::ModelConfig;
using switchyard::TopKRouter;

namespace {

bool is_sound(const ModelConfig& config) {
  const std::int32_t num_experts = config.layer.router.num_experts;
  const TopKRouter& router = config.layer.router.as_top_k();
  if (num_experts < 1 || router.top_k < 1 || router.groups < 1 || router.top_groups < 1) {
    return false;
  }
  return num_experts % router.groups == 0 && router.top_groups <= router.groups &&
         router.top_k <= num_experts / router.groups * router.top_groups &&
         config.layer.experts.hidden > 0 && config.layer.experts.inner > 0 &&
         config.moe_layers.size() <= static_cast<std::size_t>(config.num_layers);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const ModelConfig config =
        switchyard::read_config(switchyard::parse_json(text, "fuzz"), "fuzz");
    if (!is_sound(config)) std::abort();
    const auto nothing = std::make_shared<const switchyard::TensorSet>();
    (void)load_layer(nothing, config, 0);
    std::abort();  // it has no tensors
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBadFile) std::abort();
  }
  return 0;
}
