// A checkpoint out of nothing: what a family's files would have, filled by made_tensor.hpp piece by
// piece, so that one larger than memory can be made.
#include <fmt/core.h>
#include <sys/statvfs.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "checkpoint/families/family.hpp"
#include "checkpoint/file_names.hpp"
#include "checkpoint/files/file_error.hpp"
#include "checkpoint/made/replacement.hpp"
#include "core/check.hpp"
#include "core/human.hpp"
#include "switchyard/checkpoint.hpp"
#include "switchyard/names.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kPiece = 1 << 18;  // elements made at a time

/// The same recipe with what follows from other fields filled in.
CheckpointRecipe completed(CheckpointRecipe recipe) {
  LayerConfig& layer = recipe.layer;
  layer.experts.num_experts = std::max(layer.experts.num_experts, layer.router.num_computing());
  layer.router.num_experts = layer.experts.num_experts + layer.router.zero_computation.total();
  if (recipe.shared_experts > 0) {
    set_shared(layer, recipe.shared_experts * layer.experts.inner);
  }
  return recipe;
}

/// What a family's configuration says otherwise of a layer; empty: nothing.
std::string difference(const LayerConfig& asked, const LayerConfig& read) {
  std::string words;
  const auto compare = [&](const char* name, const auto& a, const auto& b) {
    if (words.empty() && a != b) words = fmt::format("{}={}, but it gives {}", name, a, b);
  };
  const auto compare_words = [&](const char* name, auto a, auto b) {
    compare(name, std::string_view(to_string(a)), std::string_view(to_string(b)));
  };
  const TopKRouter& a = asked.router.as_top_k();
  const TopKRouter& b = read.router.as_top_k();
  compare("shared_experts", asked.shared.num_experts, read.shared.num_experts);
  compare("shared inner", asked.shared.inner, read.shared.inner);
  compare("shared_gated", asked.shared_gated, read.shared_gated);
  compare("copy experts", asked.router.zero_computation.copy, read.router.zero_computation.copy);
  compare("experts", asked.router.num_experts, read.router.num_experts);
  compare("top_k", a.top_k, b.top_k);
  compare_words("score", a.score, b.score);
  compare("renormalize", a.renormalize, b.renormalize);
  compare("scale", a.scale, b.scale);
  compare("groups", a.groups, b.groups);
  compare("top_groups", a.top_groups, b.top_groups);
  if (a.groups != 1) compare_words("group_score", a.group_score, b.group_score);
  compare("inner", asked.experts.inner, read.experts.inner);
  compare("gated", asked.experts.gated, read.experts.gated);
  compare_words("activation", asked.experts.activation, read.experts.activation);
  compare("bias", asked.experts.bias, read.experts.bias);
  compare("limit", asked.experts.limit, read.experts.limit);
  compare("weight_on_input", asked.weight_on_input, read.weight_on_input);
  return words;
}

void check(const CheckpointRecipe& recipe) {
  const ExpertConfig& experts = recipe.layer.experts;
  const auto in_range = [](const char* what, std::int64_t value, std::int64_t high) {
    require(1 <= value && value <= high, "{}={} is not a whole number from 1 to {}", what, value,
            high);
  };
  in_range("hidden", experts.hidden, kMaxWidth);
  in_range("inner", experts.inner, kMaxWidth);
  in_range("experts", experts.num_experts, kMaxExperts);
  in_range("top_k", recipe.layer.router.top_k(), recipe.layer.router.num_experts);
  in_range("layers", recipe.num_layers, 10'000);
  in_range("vocabulary", recipe.vocabulary, INT32_MAX);
  in_range("shards", recipe.shards, 99'999);
  const bool is_fp8 = recipe.dtype == DType::kF8E4M3 && find_family(recipe.family).has_fp8;
  require(is_float(stored_type(recipe.dtype)) || is_fp8,
          "dtype {} of a {} checkpoint: f32, bf16 or f16 (fp8 for deepseek-v3 and qwen3-moe)",
          to_string(recipe.dtype), recipe.family);
  if (recipe.packing == WeightPacking::kPlain) return;
  require(find_family(recipe.family).names.stack == nullptr,
          "weights={} of a {} checkpoint, whose experts lie in one tensor: want a family with a "
          "tensor for each matrix",
          to_string(recipe.packing), recipe.family);
  require(recipe.dtype == DType::kBF16 || recipe.dtype == DType::kF16,
          "dtype {} with weights={}: want bf16 or f16", to_string(recipe.dtype),
          to_string(recipe.packing));
}

/// A family fixes much: what its configuration cannot say would be lost without a word.
ModelConfig check_expressible(const CheckpointRecipe& recipe, const Json& json) {
  ModelConfig config;
  try {
    config = read_config(json, "config.json");
  } catch (const Error& error) {
    fail(ErrorCode::kInvalidArgument, "these options make no {} checkpoint: {}", recipe.family,
         message_of(error));
  }
  const std::string other = difference(recipe.layer, config.layer);
  require(other.empty(), "the {} family cannot express this layer: {}", recipe.family, other);
  return config;
}

StoredType dense_type(const CheckpointRecipe& recipe) {
  return stored_type(recipe.dtype == DType::kF8E4M3 ? DType::kBF16 : recipe.dtype);
}

/// A dense layer's feed-forward network: beside the router, in the names of an expert's parts.
void add_dense(const CheckpointRecipe& recipe, const BlockNames& names,
               const std::string& layer_prefix, std::vector<MadeTensor>& tensors) {
  const std::string_view router = names.router;
  const std::string prefix = layer_prefix + std::string(router.substr(0, router.find('.') + 1));
  const std::int64_t hidden = recipe.layer.experts.hidden;
  const std::int64_t inner = recipe.layer.experts.inner;
  const StoredType type = dense_type(recipe);
  const auto add = [&](ExpertPart part, std::int64_t rows, std::int64_t cols) {
    const std::string name = prefix + names.parts[static_cast<std::size_t>(part)] + ".weight";
    tensors.push_back({{name, type, {rows, cols}}, Fill::kWeight, cols});
  };
  add(ExpertPart::kGate, inner, hidden);
  add(ExpertPart::kUp, inner, hidden);
  add(ExpertPart::kDown, hidden, inner);
}

std::vector<MadeTensor> embedding_tensors(const CheckpointRecipe& recipe,
                                          const ModelConfig& config) {
  const std::vector<std::int64_t> shape = {recipe.vocabulary, recipe.layer.experts.hidden};
  const std::string name = config.stem + config.family->model.embedding;
  return {{{name, dense_type(recipe), shape}, Fill::kWeight, 1}};
}

bool is_moe(const ModelConfig& config, std::int32_t layer) {
  return std::binary_search(config.moe_layers.begin(), config.moe_layers.end(), layer);
}

std::vector<MadeTensor> layer_tensors(const CheckpointRecipe& recipe, const ModelConfig& config,
                                      std::int32_t layer) {
  const std::string prefix = layer_prefix(config, layer);
  const Family& family = *config.family;
  std::vector<MadeTensor> tensors;
  if (family.model.norm != nullptr) {
    const Fill fill = family.model.norm_offset == 0.0F ? Fill::kNorm : Fill::kBias;
    tensors.push_back(
        {{prefix + family.model.norm, dense_type(recipe), {recipe.layer.experts.hidden}}, fill});
  }
  if (is_moe(config, layer)) {
    auto block = list_layer(recipe, config, layer);
    std::move(block.begin(), block.end(), std::back_inserter(tensors));
  } else {
    add_dense(recipe, family.names, prefix, tensors);
  }
  return tensors;
}

std::vector<MadeTensor> list_tensors(const CheckpointRecipe& recipe, const ModelConfig& config) {
  std::vector<MadeTensor> tensors = embedding_tensors(recipe, config);
  for (std::int32_t layer = 0; layer < recipe.num_layers; ++layer) {
    auto more = layer_tensors(recipe, config, layer);
    std::move(more.begin(), more.end(), std::back_inserter(tensors));
  }
  return tensors;
}

/// Of all files, but for a few bytes. As a double, and without a list of all tensors: what is asked
/// for may be more than a machine can count or list.
double bytes_of_checkpoint(const CheckpointRecipe& recipe, const ModelConfig& config) {
  constexpr double kEntry = 80;  // of a header, about, beside the name
  const auto bytes_of = [&](const std::vector<MadeTensor>& tensors) {
    double sum = 0;
    for (const MadeTensor& tensor : tensors) {
      double elements = 1;
      for (const std::int64_t extent : tensor.spec.shape) elements *= static_cast<double>(extent);
      sum += elements * static_cast<double>(size_of(tensor.spec.type)) + kEntry +
             static_cast<double>(tensor.spec.name.size());
    }
    return sum;
  };
  double sum = bytes_of(embedding_tensors(recipe, config));
  std::array<std::optional<double>, 2> of_layer;  // dense, MoE: all of a kind are alike
  for (std::int32_t layer = 0; layer < recipe.num_layers; ++layer) {
    std::optional<double>& bytes = of_layer[is_moe(config, layer) ? 1 : 0];
    if (!bytes) bytes = bytes_of(layer_tensors(recipe, config, layer));
    sum += *bytes;
  }
  return sum;
}

/// The disk has so much room, beside what is on it: an older checkpoint goes when the new one is
/// there. A system that does not say has it.
void require_room(const std::filesystem::path& directory, double bytes) {
  std::filesystem::path there = directory;
  struct statvfs disk = {};
  while (::statvfs(there.empty() ? "." : there.c_str(), &disk) != 0) {
    if (there.empty() || there == there.parent_path()) return;
    there = there.parent_path();
  }
  const double free = static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize);
  if (disk.f_blocks == 0 || bytes <= free) return;
  fail(ErrorCode::kIo, "{}: the checkpoint has {}, but {} are free", directory.string(),
       human_count(bytes, "B"), human_count(free, "B"));
}

void write_tensors(AtomicFile& file, std::span<const MadeTensor> tensors, std::uint64_t seed) {
  std::vector<TensorSpec> specs;
  for (const MadeTensor& tensor : tensors) specs.push_back(tensor.spec);
  SafetensorsWriter writer(file, specs);
  std::vector<std::uint64_t> piece;  // aligned for every type
  for (const std::size_t index : writer.order()) {
    const MadeTensor& tensor = tensors[index];
    const std::int64_t elements = *num_elements(tensor.spec.shape);
    for (std::int64_t first = 0; first < elements; first += kPiece) {
      const std::int64_t count = std::min(kPiece, elements - first);
      const auto num_bytes = static_cast<std::size_t>(count * size_of(tensor.spec.type));
      piece.resize((num_bytes + 7) / 8);
      make_elements(tensor, seed, first, count, piece.data());
      writer.append(std::as_bytes(std::span(piece)).first(num_bytes));
    }
  }
  writer.finish();
}

/// Consecutive tensors, about the same number of bytes a shard.
std::vector<std::vector<MadeTensor>> split(const std::vector<MadeTensor>& tensors,
                                           std::int32_t shards, std::int64_t total_bytes) {
  std::vector<std::vector<MadeTensor>> parts(static_cast<std::size_t>(shards));
  double begin = 0.0;
  for (const MadeTensor& tensor : tensors) {
    const double share = begin / static_cast<double>(total_bytes);
    const auto part = static_cast<std::size_t>(share * shards);
    parts[std::min(part, parts.size() - 1)].push_back(tensor);
    begin += static_cast<double>(tensor.spec.num_bytes());
  }
  return parts;
}

void write_shards(const CheckpointRecipe& recipe, const std::vector<MadeTensor>& tensors,
                  CheckpointReplacement& files) {
  std::int64_t total_bytes = 0;
  for (const MadeTensor& tensor : tensors) total_bytes += tensor.spec.num_bytes();
  Json weight_map = Json::object();
  std::int32_t number = 0;
  for (const auto& part : split(tensors, recipe.shards, total_bytes)) {
    const std::string name = shard_name(++number, recipe.shards);
    write_tensors(files.add(name), part, recipe.seed);
    for (const MadeTensor& tensor : part) weight_map[tensor.spec.name] = name;
  }
  const Json index = {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", weight_map}};
  files.add_text(kIndexFile, index.dump(2) + "\n");
}

}  // namespace

void make_checkpoint(const CheckpointRecipe& recipe, const std::filesystem::path& directory) {
  const CheckpointRecipe whole = completed(recipe);
  check(whole);
  const Json json = write_config(whole);
  const ModelConfig config = check_expressible(whole, json);
  const double bytes = bytes_of_checkpoint(whole, config);
  std::error_code error;
  if (!std::filesystem::exists(directory, error)) require_room(directory, bytes);

  CheckpointReplacement files(directory);
  require_room(directory, bytes);
  const std::vector<MadeTensor> tensors = list_tensors(whole, config);
  if (whole.shards > 1) {
    write_shards(whole, tensors, files);
  } else {
    write_tensors(files.add(kSingleFile), tensors, whole.seed);
  }
  files.add_text(kConfigFile, json.dump(2) + "\n");
  files.commit();
}

}  // namespace switchyard
