// A checkpoint out of nothing: what a family's files would have, filled by made_tensor.hpp piece by
// piece, so that one larger than memory can be made.
#include <algorithm>
#include <utility>

#include "checkpoint/families/family.hpp"
#include "checkpoint/files/file_error.hpp"
#include "core/check.hpp"
#include "switchyard/checkpoint.hpp"

namespace switchyard {
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr std::int64_t kPiece = 1 << 18;  // elements made at a time

/// The same recipe with what follows from other fields filled in.
CheckpointRecipe completed(CheckpointRecipe recipe) {
  LayerConfig& layer = recipe.layer;
  layer.experts.num_experts = std::max(layer.experts.num_experts, layer.router.num_experts);
  layer.router.num_experts = layer.experts.num_experts;
  if (recipe.shared_experts > 0) {
    set_shared(layer, recipe.shared_experts * layer.experts.inner);
  }
  return recipe;
}

bool same_meaning(const TopKRouter& a, const TopKRouter& b) {
  return a.top_k == b.top_k && a.score == b.score && a.renormalize == b.renormalize &&
         a.scale == b.scale && a.groups == b.groups && a.top_groups == b.top_groups &&
         (a.groups == 1 || a.group_score == b.group_score);
}

bool same_meaning(const LayerConfig& a, const LayerConfig& b) {
  return a.router.num_experts == b.router.num_experts &&
         same_meaning(a.router.as_top_k(), b.router.as_top_k()) &&
         a.experts.inner == b.experts.inner && a.experts.gated == b.experts.gated &&
         a.experts.activation == b.experts.activation && a.experts.bias == b.experts.bias &&
         a.experts.limit == b.experts.limit && a.shared.num_experts == b.shared.num_experts &&
         a.shared.inner == b.shared.inner && a.shared_gated == b.shared_gated;
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
  in_range("top_k", recipe.layer.router.top_k(), experts.num_experts);
  in_range("layers", recipe.num_layers, 10'000);
  in_range("vocabulary", recipe.vocabulary, INT32_MAX);
  in_range("shards", recipe.shards, 99'999);
  const bool is_fp8 = recipe.dtype == DType::kF8E4M3 && recipe.family == "deepseek-v3";
  require(is_float(stored_type(recipe.dtype)) || is_fp8,
          "dtype {} of a {} checkpoint: f32, bf16 or f16 (fp8 for deepseek-v3)",
          to_string(recipe.dtype), recipe.family);
}

/// A family fixes much: what its configuration cannot say would be lost without a word.
ModelConfig check_expressible(const CheckpointRecipe& recipe, const Json& json) {
  ModelConfig config;
  try {
    config = read_config(json, "config.json");
  } catch (const Error& error) {
    fail(ErrorCode::kInvalidArgument, "these options make no {} checkpoint: {}", recipe.family,
         error.what());
  }
  require(same_meaning(config.layer, recipe.layer),
          "the {} family cannot express this layer (its router, activation or shared experts)",
          recipe.family);
  return config;
}

void add_dense(const CheckpointRecipe& recipe, const std::string& prefix,
               std::vector<MadeTensor>& tensors) {
  const std::int64_t hidden = recipe.layer.experts.hidden;
  const std::int64_t inner = recipe.layer.experts.inner;
  const StoredType type = stored_type(recipe.dtype == DType::kF8E4M3 ? DType::kBF16 : recipe.dtype);
  tensors.push_back(
      {{prefix + "mlp.gate_proj.weight", type, {inner, hidden}}, Fill::kWeight, hidden});
  tensors.push_back(
      {{prefix + "mlp.up_proj.weight", type, {inner, hidden}}, Fill::kWeight, hidden});
  tensors.push_back(
      {{prefix + "mlp.down_proj.weight", type, {hidden, inner}}, Fill::kWeight, inner});
}

std::vector<MadeTensor> list_tensors(const CheckpointRecipe& recipe, const ModelConfig& config) {
  const std::int64_t hidden = recipe.layer.experts.hidden;
  const StoredType type = stored_type(recipe.dtype == DType::kF8E4M3 ? DType::kBF16 : recipe.dtype);
  std::vector<MadeTensor> tensors = {
      {{"model.embed_tokens.weight", type, {recipe.vocabulary, hidden}}, Fill::kWeight, 1}};
  for (std::int32_t layer = 0; layer < recipe.num_layers; ++layer) {
    const std::string prefix = layer_prefix(layer);
    tensors.push_back({{prefix + "post_attention_layernorm.weight", type, {hidden}}, Fill::kNorm});
    const auto& moe = config.moe_layers;
    if (std::find(moe.begin(), moe.end(), layer) == moe.end()) {
      add_dense(recipe, prefix, tensors);
      continue;
    }
    auto block = config.family->list(recipe, prefix);
    std::move(block.begin(), block.end(), std::back_inserter(tensors));
  }
  return tensors;
}

void write_tensors(const std::filesystem::path& path, std::span<const MadeTensor> tensors,
                   std::uint64_t seed) {
  std::vector<TensorSpec> specs;
  for (const MadeTensor& tensor : tensors) specs.push_back(tensor.spec);
  SafetensorsWriter writer(path, std::move(specs));
  std::vector<std::uint64_t> piece;  // aligned for every type
  for (const TensorSpec& spec : writer.tensors()) {
    const auto tensor = std::find_if(tensors.begin(), tensors.end(),
                                     [&](const MadeTensor& t) { return t.spec.name == spec.name; });
    const std::int64_t elements = *num_elements(spec.shape);
    for (std::int64_t first = 0; first < elements; first += kPiece) {
      const std::int64_t count = std::min(kPiece, elements - first);
      const auto num_bytes = static_cast<std::size_t>(count * size_of(spec.type));
      piece.resize((num_bytes + 7) / 8);
      make_elements(*tensor, seed, first, count, piece.data());
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
                  const std::filesystem::path& directory) {
  std::int64_t total_bytes = 0;
  for (const MadeTensor& tensor : tensors) total_bytes += tensor.spec.num_bytes();
  Json weight_map = Json::object();
  std::int32_t number = 0;
  for (const auto& part : split(tensors, recipe.shards, total_bytes)) {
    const std::string name =
        fmt::format("model-{:05}-of-{:05}.safetensors", ++number, recipe.shards);
    write_tensors(directory / name, part, recipe.seed);
    for (const MadeTensor& tensor : part) weight_map[tensor.spec.name] = name;
  }
  const Json index = {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", weight_map}};
  write_text(directory / kIndexFile, index.dump(2) + "\n");
}

}  // namespace

void make_checkpoint(const CheckpointRecipe& recipe, const std::filesystem::path& directory) {
  const CheckpointRecipe whole = completed(recipe);
  check(whole);
  const Json json = write_config(whole);
  const ModelConfig config = check_expressible(whole, json);
  const std::vector<MadeTensor> tensors = list_tensors(whole, config);

  std::error_code error;
  std::filesystem::create_directories(directory, error);
  require(std::filesystem::is_directory(directory, error), "cannot make the directory {}",
          directory.string());
  // What an earlier checkpoint left would be read instead of, or beside, this one.
  if (whole.shards > 1) {
    write_shards(whole, tensors, directory);
    std::filesystem::remove(directory / kSingleFile, error);
  } else {
    write_tensors(directory / kSingleFile, tensors, whole.seed);
    std::filesystem::remove(directory / kIndexFile, error);
  }
  write_text(directory / "config.json", json.dump(2) + "\n");
}

}  // namespace switchyard
