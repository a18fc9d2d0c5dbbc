#pragma once

// What the tests of checkpoints share: small recipes, and comparing a source with what it was made
// from.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/families/family.hpp"
#include "checkpoint/made/made_tensor.hpp"
#include "checkpoint/models.hpp"
#include "checkpoint/sources/expert_source.hpp"
#include "core/half.hpp"

namespace switchyard::test {

inline constexpr LayerSizes kSmall = {
    .hidden = 64, .inner = 96, .num_experts = 8, .top_k = 3, .shared_experts = 0};

/// A small recipe of each family that uses what the family has.
inline CheckpointRecipe small_recipe(const std::string& family, DType dtype) {
  LayerSizes sizes = kSmall;
  const ConfigUse& use = find_family(family).config;
  if (family == "phimoe") sizes.top_k = 2;
  if (family == "llama4") sizes.top_k = 1;
  const bool has_groups = use.groups || family == "deepseek-v2";
  if (has_groups) {
    sizes.groups = 4;
    sizes.top_groups = 2;
  }
  if (use.shared_width == SharedWidth::kCounted) sizes.shared_experts = 2;
  if (use.shared_width == SharedWidth::kOwn || use.shared_width == SharedWidth::kInner) {
    sizes.shared_experts = 1;
  }
  CheckpointRecipe recipe = family_recipe(family, sizes);
  const bool has_scale = use.scale != nullptr || family == "deepseek-v2";
  if (has_scale) recipe.layer.router.as_top_k().scale = 2.5F;
  recipe.num_layers = 2;
  recipe.vocabulary = 40;
  recipe.dtype = dtype;
  recipe.seed = 7;
  return recipe;
}

/// Element i of a tensor as the generator makes it, through the type it is stored in.
inline float made(const MadeTensor& tensor, std::uint64_t seed, std::int64_t i) {
  float value = 0.0F;
  make_elements(tensor, seed, i, 1, &value);
  return load_float(&value, *dtype_of(tensor.spec.type), 0);
}

/// Every matrix of every expert, whole or from its middle, has the value of
/// `expected(expert, part)(row, col)`.
template <typename Expected>
void expect_weights(const ExpertSource& source, const ExpertConfig& config, DType dtype,
                    const Expected& expected) {
  for (std::int32_t expert = 0; expert < config.num_experts; ++expert) {
    for (const ExpertPart part : {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown}) {
      const auto [rows, cols] = part_shape(config, part);
      const std::int64_t first = expert % 2 == 0 ? 0 : 5;
      const std::int64_t count = expert % 2 == 0 ? rows : rows - 7;
      std::vector<std::byte> out(static_cast<std::size_t>(count * cols * size_of(dtype)));
      source.read(expert, part, first, count, dtype, out.data());
      const auto value = expected(expert, part);
      for (std::int64_t i = 0; i < count * cols; ++i) {
        ASSERT_EQ(load_float(out.data(), dtype, i),
                  round_to(dtype, value(first + i / cols, i % cols)))
            << "expert " << expert << " row " << first + i / cols;
      }
    }
  }
}

}  // namespace switchyard::test
