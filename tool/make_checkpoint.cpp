// `switchyard make-checkpoint`: a small checkpoint of a family with made-up weights.
#include <fmt/core.h>

#include "core/printable.hpp"
#include "tool/commands.hpp"
#include "tool/options/sizes.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"

namespace switchyard::tool {

int make_checkpoint_command(const Options& options) {
  CheckpointRecipe recipe = recipe_of(options, options.num_experts, options.family);
  if (recipe.family != options.family) {
    throw UsageError("--family: {} is a {}, not a {}", options.model, recipe.family,
                     options.family);
  }
  recipe.num_layers = static_cast<std::int32_t>(options.layers);
  recipe.dtype = enumerator_of<DType>(options.dtype);
  recipe.packing = enumerator_of<WeightPacking>(options.packing);
  recipe.seed = static_cast<std::uint64_t>(options.seed);
  recipe.shards = static_cast<std::int32_t>(options.shards);
  make_checkpoint(recipe, options.output_directory);
  const LayerConfig& layer = recipe.layer;
  const bool is_plain = recipe.packing == WeightPacking::kPlain;
  fmt::print("{}: {}, {} layer{} of E={} K={} H={} I={}, {}{}{}, {} file{}\n",
             printable(options.output_directory), recipe.family, recipe.num_layers,
             recipe.num_layers == 1 ? "" : "s", layer.router.num_experts, layer.router.top_k(),
             layer.experts.hidden, layer.experts.inner, options.dtype, is_plain ? "" : " ",
             is_plain ? "" : to_string(recipe.packing), recipe.shards,
             recipe.shards == 1 ? "" : "s");
  return kFine;
}

}  // namespace switchyard::tool
