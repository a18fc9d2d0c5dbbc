// A layer from a name or from sizes.
#include "tool/options/sizes.hpp"

#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"

namespace switchyard::tool {
namespace {

std::int64_t needed(const char* option, std::optional<std::int64_t> value) {
  if (!value) {
    throw UsageError("{} is missing, want --model, or --hidden, --inner, --experts and --top-k",
                     option);
  }
  return *value;
}

CheckpointRecipe named_recipe(const Options& options) {
  std::vector<std::string_view> names;
  for (const NamedModel& model : named_models()) {
    if (model.name == options.model) return model_recipe(model);
    names.emplace_back(model.name);
  }
  throw UsageError("--model: '{}' is unknown, want one of {}{}", options.model,
                   fmt::join(names, ", "), suggestion(options.model, names));
}

void check_sizes(const LayerSizes& sizes) {
  if (sizes.top_k > sizes.num_experts) {
    throw UsageError("--top-k: {} exceeds --experts {}", sizes.top_k, sizes.num_experts);
  }
  if (sizes.num_experts % sizes.groups != 0) {
    throw UsageError("--groups: {} does not divide --experts {}", sizes.groups, sizes.num_experts);
  }
  if (sizes.top_groups > sizes.groups) {
    throw UsageError("--top-groups: {} exceeds --groups {}", sizes.top_groups, sizes.groups);
  }
  const std::int64_t choice = sizes.num_experts / sizes.groups * std::int64_t{sizes.top_groups};
  if (sizes.top_k > choice) {
    throw UsageError("--top-k: {} exceeds the {} experts of --top-groups {}", sizes.top_k, choice,
                     sizes.top_groups);
  }
}

}  // namespace

CheckpointRecipe recipe_of(const Options& options, std::optional<std::int64_t> num_experts,
                           std::string_view family) {
  const bool sizes_given = options.hidden || options.inner || num_experts || options.top_k ||
                           options.shared_experts || options.groups || options.top_groups;
  if (!options.model.empty()) {
    if (sizes_given) throw UsageError("--model: {} has its sizes, want no others", options.model);
    return named_recipe(options);
  }
  const auto small = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  const LayerSizes sizes{.hidden = needed("--hidden", options.hidden),
                         .inner = needed("--inner", options.inner),
                         .num_experts = small(needed("--experts", num_experts)),
                         .top_k = small(needed("--top-k", options.top_k)),
                         .shared_experts = small(options.shared_experts.value_or(0)),
                         .groups = small(options.groups.value_or(1)),
                         .top_groups = small(options.top_groups.value_or(1))};
  check_sizes(sizes);
  return family_recipe(family, sizes);
}

}  // namespace switchyard::tool
