// Families whose experts are tensors of their own: reading them, and what to make up for them.
#include <fmt/core.h>

#include "checkpoint/families/family.hpp"
#include "checkpoint/sources/expert_source.hpp"

namespace switchyard {
namespace {

std::string expert_name(const PerExpertNames& names, const std::string& prefix, std::int32_t expert,
                        std::size_t part) {
  return fmt::format("{}{}{}.{}.weight", prefix, names.experts, expert, names.parts[part]);
}

std::string shared_name(const PerExpertNames& names, const std::string& prefix, std::size_t part) {
  return fmt::format("{}{}{}.weight", prefix, names.shared, names.parts[part]);
}

constexpr std::int64_t blocks_of_128(std::int64_t extent) { return (extent + 127) / 128; }

/// A matrix of an expert, in fp8 with its scales or in the recipe's type.
void add_matrix(const CheckpointRecipe& recipe, const std::string& name, std::int64_t rows,
                std::int64_t cols, std::vector<MadeTensor>& tensors) {
  if (recipe.dtype != DType::kF8E4M3) {
    tensors.push_back({{name, stored_type(recipe.dtype), {rows, cols}}, Fill::kWeight, cols});
    return;
  }
  tensors.push_back({{name, StoredType::kF8E4M3, {rows, cols}}, Fill::kF8, cols});
  tensors.push_back(
      {{name + "_scale_inv", StoredType::kF32, {blocks_of_128(rows), blocks_of_128(cols)}},
       Fill::kF8Scale,
       cols});
}

}  // namespace

LayerModel load_per_expert(const std::shared_ptr<const TensorSet>& tensors,
                           const ModelConfig& config, const std::string& layer_prefix) {
  const PerExpertNames& names = *config.family->names;
  const ExpertConfig& experts = config.layer.experts;
  LayerModel model;
  model.config = config.layer;
  model.gate = tensors->floats(layer_prefix + names.router, {experts.num_experts, experts.hidden});
  if (names.selection_bias != nullptr) {
    model.selection_bias =
        tensors->floats(layer_prefix + names.selection_bias, {experts.num_experts});
  }
  std::vector<ExpertTensorNames> expert_names(static_cast<std::size_t>(experts.num_experts));
  for (std::int32_t expert = 0; expert < experts.num_experts; ++expert) {
    for (std::size_t part = 0; part < 3; ++part) {
      expert_names[static_cast<std::size_t>(expert)][part] =
          expert_name(names, layer_prefix, expert, part);
    }
  }
  model.experts = make_matrix_source(tensors, experts, expert_names);
  if (config.layer.shared.num_experts > 0) {
    ExpertTensorNames shared;
    for (std::size_t part = 0; part < 3; ++part) {
      shared[part] = shared_name(names, layer_prefix, part);
    }
    model.shared = make_matrix_source(tensors, config.layer.shared, {shared});
  }
  if (config.layer.shared_gated) {
    model.shared_gate = tensors->floats(layer_prefix + names.shared_gate, {1, experts.hidden});
  }
  return model;
}

std::vector<MadeTensor> list_per_expert(const CheckpointRecipe& recipe,
                                        const std::string& layer_prefix) {
  const PerExpertNames& names = *find_family(recipe.family).names;
  const ExpertConfig& experts = recipe.layer.experts;
  const std::int64_t hidden = experts.hidden;
  // The router stays in bf16 where the experts are quantised, as it does in public checkpoints.
  const StoredType type = stored_type(recipe.dtype == DType::kF8E4M3 ? DType::kBF16 : recipe.dtype);
  std::vector<MadeTensor> tensors;
  tensors.push_back(
      {{layer_prefix + names.router, type, {experts.num_experts, hidden}}, Fill::kWeight, hidden});
  if (names.selection_bias != nullptr) {
    tensors.push_back(
        {{layer_prefix + names.selection_bias, StoredType::kF32, {experts.num_experts}},
         Fill::kBias});
  }
  const auto add_expert = [&](const ExpertConfig& config, const auto& name_of) {
    for (std::size_t part = 0; part < 3; ++part) {
      const auto [rows, cols] = part_shape(config, static_cast<ExpertPart>(part));
      add_matrix(recipe, name_of(part), rows, cols, tensors);
    }
  };
  for (std::int32_t expert = 0; expert < experts.num_experts; ++expert) {
    add_expert(experts,
               [&](std::size_t part) { return expert_name(names, layer_prefix, expert, part); });
  }
  if (recipe.layer.shared.num_experts > 0) {
    add_expert(recipe.layer.shared,
               [&](std::size_t part) { return shared_name(names, layer_prefix, part); });
  }
  if (recipe.layer.shared_gated) {
    tensors.push_back(
        {{layer_prefix + names.shared_gate, type, {1, hidden}}, Fill::kWeight, hidden});
  }
  return tensors;
}

}  // namespace switchyard
