// A model's directory: configuration, tensors, and the family that says what they mean.
#include "switchyard/checkpoint.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <utility>

#include "checkpoint/families/family.hpp"
#include "checkpoint/file_names.hpp"
#include "checkpoint/files/file_error.hpp"
#include "core/check.hpp"
#include "core/row_ops.hpp"

namespace switchyard {
namespace {

struct Location {
  std::filesystem::path config;
  std::shared_ptr<const TensorSet> tensors;
};

Location locate(const std::filesystem::path& path) {
  const FileKind kind = kind_of(path);
  require_file(kind != FileKind::kNothing, path.string(), "no such file or directory");
  if (kind == FileKind::kDirectory) return {path / kConfigFile, TensorSet::open(path)};
  const std::filesystem::path directory =
      path.parent_path().empty() ? std::filesystem::path(".") : path.parent_path();
  const bool is_tensors = path.extension() == ".safetensors";
  return {directory / kConfigFile,
          is_tensors ? TensorSet::open_file(path) : TensorSet::open(directory)};
}

/// Where the text model's tensors are in one that has others beside it: Qwen3-VL and Qwen3.5 put
/// it under the first, Llama 4 and others under the second.
constexpr std::array<const char*, 2> kNestedStems = {"model.language_model.",
                                                     "language_model.model."};

void find_stem(const TensorSet& tensors, ModelConfig& config) {
  if (!config.nested) return;
  for (const char* stem : kNestedStems) {
    if (tensors.find(std::string(stem) + config.family->model.embedding) == nullptr) continue;
    config.stem = stem;
    return;
  }
}

std::string layers_text(const std::vector<std::int32_t>& layers) {
  if (layers.empty()) return "it has no MoE layer";
  // Nearly always one run of neighbours.
  const bool is_run =
      layers.back() - layers.front() + 1 == static_cast<std::int32_t>(layers.size());
  if (layers.size() == 1) return fmt::format("its MoE layer is {}", layers.front());
  return fmt::format("its MoE layers are {} to {}{}", layers.front(), layers.back(),
                     is_run ? "" : ", not all of them");
}

}  // namespace

struct Checkpoint::State {
  std::string name;
  std::filesystem::path config_file;
  ModelConfig config;
  std::shared_ptr<const TensorSet> tensors;
  const StoredTensor* embedding = nullptr;  ///< [V, H], or null.
};

Checkpoint::Checkpoint(const std::filesystem::path& path) : state_(std::make_unique<State>()) {
  Location location = locate(path);
  const std::string config_name = location.config.string();
  state_->name = path.string();
  state_->config_file = location.config;
  state_->tensors = std::move(location.tensors);
  state_->config = read_config(parse_json(read_text(location.config), config_name), config_name);
  ModelConfig& config = state_->config;
  find_stem(*state_->tensors, config);
  state_->embedding = state_->tensors->find(config.stem + config.family->model.embedding);
  if (state_->embedding != nullptr) {
    const TensorSpec& spec = state_->embedding->spec;
    require_file(spec.shape.size() == 2 && spec.shape[1] == config.layer.experts.hidden &&
                     is_float(spec.type),
                 state_->tensors->name(), "tensor '{}' is {} {}, expected F32, BF16 or F16 [V, {}]",
                 spec.name, to_string(spec.type), shape_text(spec.shape),
                 config.layer.experts.hidden);
    config.vocabulary = spec.shape[0];
  }
}

Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

std::string_view Checkpoint::family() const { return state_->config.family->name; }
std::int32_t Checkpoint::num_layers() const { return state_->config.num_layers; }
const std::vector<std::int32_t>& Checkpoint::moe_layers() const {
  return state_->config.moe_layers;
}
std::int64_t Checkpoint::vocabulary() const { return state_->config.vocabulary; }
float Checkpoint::rms_norm_eps() const { return state_->config.rms_norm_eps; }

std::vector<std::filesystem::path> Checkpoint::files() const {
  std::vector<std::filesystem::path> files = state_->tensors->paths();
  files.push_back(state_->config_file);
  return files;
}

LayerModel Checkpoint::layer(std::int32_t index) const {
  const ModelConfig& config = state_->config;
  require(0 <= index && index < config.num_layers, "{}: layer {} of {} layers; {}", state_->name,
          index, config.num_layers, layers_text(config.moe_layers));
  require(std::binary_search(config.moe_layers.begin(), config.moe_layers.end(), index),
          "{}: layer {} is dense; {}", state_->name, index, layers_text(config.moe_layers));
  return load_layer(state_->tensors, config, index);
}

std::vector<float> Checkpoint::embed(const std::vector<std::int32_t>& ids) const {
  require_file(state_->embedding != nullptr, state_->name, "has no tensor '{}{}'",
               state_->config.stem, state_->config.family->model.embedding);
  const std::int64_t hidden = state_->config.layer.experts.hidden;
  const StoredTensor& table = *state_->embedding;
  std::vector<float> rows(ids.size() * static_cast<std::size_t>(hidden));
  float* out = rows.data();
  for (const std::int32_t id : ids) {
    require(0 <= id && id < state_->config.vocabulary, "token id {} of a vocabulary of {}", id,
            state_->config.vocabulary);
    row_ops::widen(*dtype_of(table.spec.type),
                   table.bytes.data() + id * hidden * size_of(table.spec.type), out, hidden);
    out += hidden;
  }
  return rows;
}

std::vector<float> Checkpoint::post_attention_norm(std::int32_t index) const {
  const ModelConfig& config = state_->config;
  const ModelNames& names = config.family->model;
  if (names.norm == nullptr) return {};
  const std::string name = layer_prefix(config, index) + names.norm;
  if (state_->tensors->find(name) == nullptr) return {};
  std::vector<float> norm = state_->tensors->floats(name, {config.layer.experts.hidden});
  for (float& weight : norm) weight += names.norm_offset;
  return norm;
}

}  // namespace switchyard
