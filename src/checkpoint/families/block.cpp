// The tensors of a block: reading them, and what to make up for them, by a family's names.
#include <fmt/core.h>

#include "checkpoint/families/family.hpp"
#include "checkpoint/sources/quantised.hpp"
#include "core/check.hpp"
#include "core/mxfp4.hpp"

namespace switchyard {
namespace {

constexpr StackNames kModuleStack{};

std::string expert_name(const BlockNames& names, const std::string& prefix, std::int32_t expert,
                        std::size_t part) {
  return fmt::format("{}{}{}.{}.weight", prefix, names.experts, expert, names.parts[part]);
}

std::string shared_name(const BlockNames& names, const std::string& prefix, std::size_t part) {
  return fmt::format("{}{}{}.weight", prefix, names.shared, names.parts[part]);
}

std::string joined(const std::string& prefix, const char* name) {
  return name == nullptr ? "" : prefix + name;
}

StackedNames stacked(const StackNames& names, const std::string& prefix) {
  return {.gate = prefix + names.gate,
          .up = joined(prefix, names.up),
          .down = prefix + names.down,
          .form = names.form,
          .down_form = names.down_form,
          .interleaved = names.interleaved,
          .gate_up_bias = joined(prefix, names.gate_up_bias),
          .down_bias = joined(prefix, names.down_bias)};
}

bool has_router(const TensorSet& tensors, const BlockNames& names, const std::string& prefix) {
  return tensors.find(prefix + names.router) != nullptr &&
         (names.selection_bias == nullptr ||
          tensors.find(prefix + names.selection_bias) != nullptr);
}

/// Those of the family's names that these tensors have; of none, those that messages are to name.
const BlockNames& names_in(const TensorSet& tensors, const Family& family,
                           const std::string& prefix) {
  const BlockNames* others = family.module_names;
  const bool is_others = others != nullptr && !has_router(tensors, family.names, prefix) &&
                         has_router(tensors, *others, prefix);
  return is_others ? *others : family.names;
}

/// [E], also where it is stored as [1, E].
std::vector<float> row_of_experts(const TensorSet& tensors, const std::string& name,
                                  std::int64_t num_experts) {
  const StoredTensor* found = tensors.find(name);
  const bool is_matrix = found != nullptr && found->spec.shape.size() == 2;
  return tensors.floats(name, is_matrix ? std::vector<std::int64_t>{1, num_experts}
                                        : std::vector<std::int64_t>{num_experts});
}

std::unique_ptr<ExpertSource> open_experts(const std::shared_ptr<const TensorSet>& tensors,
                                           const LayerConfig& layer, const BlockNames& names,
                                           const std::string& prefix, GptqZeros zeros) {
  const ExpertConfig& experts = layer.experts;
  const std::string stack_prefix = prefix + names.experts;
  const StackNames* stack = names.stack;
  if (stack == nullptr && tensors->find(expert_name(names, prefix, 0, 0)) == nullptr &&
      tensors->find(stack_prefix + kModuleStack.gate) != nullptr) {
    stack = &kModuleStack;
  }
  if (stack != nullptr && stack->mxfp4 &&
      tensors->find(stack_prefix + stack->gate + "_blocks") != nullptr) {
    return make_mxfp4_source(tensors, experts, stack_prefix);
  }
  if (stack != nullptr) {
    StackedNames all = stacked(*stack, stack_prefix);
    all.weightless = layer.router.zero_computation.copy;
    return make_stacked_source(tensors, experts, all);
  }
  std::vector<ExpertTensorNames> tensor_names(static_cast<std::size_t>(experts.num_experts));
  for (std::int32_t expert = 0; expert < experts.num_experts; ++expert) {
    for (std::size_t part = 0; part < 3; ++part) {
      tensor_names[static_cast<std::size_t>(expert)][part] =
          expert_name(names, prefix, expert, part);
    }
  }
  return make_expert_source(tensors, experts, tensor_names, zeros);
}

std::unique_ptr<ExpertSource> open_shared(const std::shared_ptr<const TensorSet>& tensors,
                                          const ExpertConfig& shared, const BlockNames& names,
                                          const std::string& prefix, GptqZeros zeros) {
  if (names.shared_stack != nullptr) {
    return make_stacked_source(tensors, shared,
                               stacked(*names.shared_stack, prefix + names.shared));
  }
  ExpertTensorNames tensor_names;
  for (std::size_t part = 0; part < 3; ++part) {
    tensor_names[part] = shared_name(names, prefix, part);
  }
  return make_expert_source(tensors, shared, {tensor_names}, zeros);
}

constexpr std::int64_t blocks_of_128(std::int64_t extent) { return (extent + 127) / 128; }

/// Tensors of a block as they are made up.
class BlockList {
 public:
  explicit BlockList(const CheckpointRecipe& recipe)
      : recipe_(recipe),
        // The router stays in bf16 where the experts are quantised, as in public checkpoints.
        type_(stored_type(recipe.dtype == DType::kF8E4M3 ? DType::kBF16 : recipe.dtype)) {}

  void add(const std::string& name, const std::vector<std::int64_t>& shape, Fill fill,
           std::int64_t fan_in = 1) {
    tensors_.push_back({{name, type_, shape}, fill, fan_in});
  }
  void add_f32(const std::string& name, const std::vector<std::int64_t>& shape) {
    tensors_.push_back({{name, StoredType::kF32, shape}, Fill::kBias});
  }

  /// A matrix of an expert, in fp8 with its scales, packed, or in the recipe's type.
  void add_matrix(const std::string& name, std::int64_t rows, std::int64_t cols) {
    if (recipe_.packing != WeightPacking::kPlain) return add_packed(name, rows, cols);
    if (recipe_.dtype != DType::kF8E4M3) return add(name, {rows, cols}, Fill::kWeight, cols);
    tensors_.push_back({{name, StoredType::kF8E4M3, {rows, cols}}, Fill::kF8, cols});
    tensors_.push_back(
        {{name + "_scale_inv", StoredType::kF32, {blocks_of_128(rows), blocks_of_128(cols)}},
         Fill::kF8Scale,
         cols});
  }

  void add_stack(const StackNames& names, const std::string& prefix, const ExpertConfig& experts) {
    const std::int64_t num = experts.num_experts;
    const auto add_part = [&](const char* name, std::int64_t rows, std::int64_t cols,
                              StackedForm form) {
      // MXFP4 is what the public checkpoints have; other types than bf16 ask for plain weights.
      if (names.mxfp4 && recipe_.dtype == DType::kBF16) return add_mxfp4(prefix + name, rows, cols);
      const auto [first, second] =
          form == StackedForm::kTransposed ? std::pair(cols, rows) : std::pair(rows, cols);
      add(prefix + name,
          names.flat ? std::vector{num * first, second} : std::vector{num, first, second},
          Fill::kWeight, cols);
    };
    const bool is_split = names.up != nullptr;
    add_part(names.gate, is_split ? experts.inner : 2 * experts.inner, experts.hidden, names.form);
    if (is_split) add_part(names.up, experts.inner, experts.hidden, names.form);
    add_part(names.down, experts.hidden, experts.inner, names.down_form);
    if (names.gate_up_bias != nullptr) {
      add(prefix + names.gate_up_bias, {num, 2 * experts.inner}, Fill::kBias);
      add(prefix + names.down_bias, {num, experts.hidden}, Fill::kBias);
    } else if (names.down_bias != nullptr) {
      add(prefix + names.down_bias, {experts.hidden}, Fill::kBias);
    }
  }

  [[nodiscard]] std::vector<MadeTensor> take() { return std::move(tensors_); }

 private:
  void add_packed(const std::string& name, std::int64_t rows, std::int64_t cols) {
    const std::string module = module_of(name);
    const auto put = [&](const char* what, StoredType type, const std::vector<std::int64_t>& shape,
                         Fill fill, std::int64_t fan_in) {
      tensors_.push_back({{module + what, type, shape}, fill, fan_in});
    };
    const bool is_packed = recipe_.packing == WeightPacking::kNvfp4Packed;
    if (is_packed || recipe_.packing == WeightPacking::kModelOpt) {
      require(cols % kNvfp4Block == 0, "NVFP4 needs hidden and inner to be multiples of {}, not {}",
              kNvfp4Block, cols);
      put(is_packed ? ".weight_packed" : ".weight", StoredType::kU8, {rows, cols / 2}, Fill::kBytes,
          cols);
      put(".weight_scale", StoredType::kF8E4M3, {rows, cols / kNvfp4Block}, Fill::kNvfp4Scale,
          cols);
      if (is_packed) {
        put(".weight_global_scale", StoredType::kF32, {1}, Fill::kNvfp4Divisor, cols);
      } else {
        put(".weight_scale_2", StoredType::kF32, {}, Fill::kNvfp4Factor, cols);
        put(".input_scale", StoredType::kF32, {}, Fill::kNvfp4Factor, cols);
      }
      return;
    }
    const std::int64_t group = made_group(recipe_);
    const std::int64_t groups = cols / group;
    constexpr std::int64_t kCodes = 8;  // of a word
    if (recipe_.packing == WeightPacking::kPackQuantized) {
      put(".weight_packed", StoredType::kI32, {rows, cols / kCodes}, Fill::kBytes, cols);
      put(".weight_scale", type_, {rows, groups}, Fill::kInt4Scale, cols);
      return;
    }
    const bool is_awq = recipe_.packing == WeightPacking::kAwq;
    put(".qweight", StoredType::kI32,
        is_awq ? std::vector{cols, rows / kCodes} : std::vector{cols / kCodes, rows}, Fill::kBytes,
        cols);
    put(".qzeros", StoredType::kI32, {groups, rows / kCodes}, Fill::kInt4Zeros, cols);
    put(".scales", type_, {groups, rows}, Fill::kInt4Scale, cols);
    if (!is_awq) put(".g_idx", StoredType::kI32, {cols}, Fill::kGroupIndex, group);
  }

  void add_mxfp4(const std::string& name, std::int64_t rows, std::int64_t cols) {
    const ExpertConfig& experts = recipe_.layer.experts;
    require(cols % kMxfp4Block == 0,
            "{} in MXFP4 needs hidden={} and inner={} to be multiples of {}; f32 and f16 are "
            "written without it",
            recipe_.family, experts.hidden, experts.inner, kMxfp4Block);
    const std::int64_t num = experts.num_experts;
    const std::int64_t blocks = cols / kMxfp4Block;
    tensors_.push_back(
        {{name + "_blocks", StoredType::kU8, {num, rows, blocks, kMxfp4BlockBytes}}, Fill::kBytes});
    tensors_.push_back(
        {{name + "_scales", StoredType::kU8, {num, rows, blocks}}, Fill::kMxfp4Scale, cols});
  }

  const CheckpointRecipe& recipe_;
  StoredType type_;
  std::vector<MadeTensor> tensors_;
};

}  // namespace

std::string layer_prefix(const ModelConfig& config, std::int32_t layer) {
  return fmt::format("{}{}{}.", config.stem, config.family->model.layers, layer);
}

LayerModel load_layer(const std::shared_ptr<const TensorSet>& tensors, const ModelConfig& config,
                      std::int32_t layer) {
  const std::string prefix = layer_prefix(config, layer);
  const BlockNames& names = names_in(*tensors, *config.family, prefix);
  const std::int32_t num_experts = config.layer.router.num_experts;
  const std::int64_t hidden = config.layer.experts.hidden;
  LayerModel model;
  model.config = config.layer;
  model.gate = tensors->floats(prefix + names.router, {num_experts, hidden});
  if (names.router_bias != nullptr) {
    model.router_bias = tensors->floats(prefix + names.router_bias, {num_experts});
  }
  if (config.selection_bias) {
    model.selection_bias = row_of_experts(*tensors, prefix + names.selection_bias, num_experts);
  }
  model.experts = open_experts(tensors, config.layer, names, prefix, config.gptq_zeros);
  if (config.layer.shared.num_experts > 0) {
    model.shared = open_shared(tensors, config.layer.shared, names, prefix, config.gptq_zeros);
  }
  if (config.layer.shared_gated) {
    model.shared_gate = tensors->floats(prefix + names.shared_gate, {1, hidden});
  }
  return model;
}

std::vector<MadeTensor> list_layer(const CheckpointRecipe& recipe, const ModelConfig& config,
                                   std::int32_t layer_index) {
  const std::string prefix = layer_prefix(config, layer_index);
  const BlockNames& names = config.family->names;
  const LayerConfig& layer = recipe.layer;
  const std::int64_t num_experts = layer.router.num_experts;
  const std::int64_t hidden = layer.experts.hidden;
  BlockList list(recipe);
  list.add(prefix + names.router, {num_experts, hidden}, Fill::kWeight, hidden);
  if (names.router_bias != nullptr) {
    list.add(prefix + names.router_bias, {num_experts}, Fill::kBias);
  }
  if (names.selection_bias != nullptr) list.add_f32(prefix + names.selection_bias, {num_experts});
  const auto add_expert = [&](const ExpertConfig& experts, const auto& name_of) {
    for (std::size_t part = 0; part < 3; ++part) {
      const auto [rows, cols] = part_shape(experts, static_cast<ExpertPart>(part));
      list.add_matrix(name_of(part), rows, cols);
    }
  };
  if (names.stack != nullptr) {
    list.add_stack(*names.stack, prefix + names.experts, layer.experts);
  } else {
    for (std::int32_t expert = 0; expert < layer.experts.num_experts; ++expert) {
      add_expert(layer.experts,
                 [&](std::size_t part) { return expert_name(names, prefix, expert, part); });
    }
  }
  if (layer.shared.num_experts > 0 && names.shared_stack != nullptr) {
    list.add_stack(*names.shared_stack, prefix + names.shared, layer.shared);
  } else if (layer.shared.num_experts > 0) {
    add_expert(layer.shared, [&](std::size_t part) { return shared_name(names, prefix, part); });
  }
  if (layer.shared_gated) {
    list.add(prefix + names.shared_gate, {1, hidden}, Fill::kWeight, hidden);
  }
  return list.take();
}

}  // namespace switchyard
