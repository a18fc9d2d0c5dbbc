// A whole model from its own files: what load() brings, and run() as a list of calls.
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/file_names.hpp"
#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/json.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "checkpoint/sources/expert_source.hpp"
#include "core/check.hpp"
#include "core/row_ops.hpp"
#include "core/shape_check.hpp"
#include "models/cpu/rms_norm.hpp"
#include "models/released/attention.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/models/released.hpp"

namespace switchyard::models {
namespace {

struct Layer {
  std::vector<float> norm1, norm2;
  ReleasedAttention attention;
  bool dense;
  MoeLayer block;
};

Json config_of(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / kConfigFile;
  return parse_json(read_text(file), file.string());
}

/// One expert that all tokens are given to.
LayerModel dense_block(const std::shared_ptr<const TensorSet>& tensors,
                       const ReleasedConfig& config, const std::string& prefix) {
  RouterConfig router{.num_experts = 1};
  router.kind = HashRouter{.top_k = 1};
  LayerModel model;
  model.config.router = router;
  model.config.experts = {.num_experts = 1,
                          .hidden = config.hidden(),
                          .inner = config.dense_inner,
                          .activation = config.blocks.layer.experts.activation};
  ExpertTensorNames names;
  const char* const parts[] = {"gate_proj", "up_proj", "down_proj"};
  for (std::size_t i = 0; i < 3; ++i) names[i] = fmt::format("{}mlp.{}.weight", prefix, parts[i]);
  model.experts = make_matrix_source(tensors, model.config.experts, {names});
  return model;
}

}  // namespace

struct ReleasedModel::State {
  State(const std::filesystem::path& path, const ReleasedOptions& how);

  [[nodiscard]] Layer load_layer_of(std::int32_t l);
  void load_head();
  void check(Matrix<const std::int32_t> tokens, std::int64_t before) const;
  /// The stream behind the last layer, normalised: [T, H].
  const float* run(Matrix<const std::int32_t> tokens, Cache::State* cache);
  void embed(Matrix<const std::int32_t> tokens, float* x) const;
  void run_block(Layer& layer, const float* x, std::int64_t rows, float* out);
  void norm(const std::vector<float>& weight, const float* x, std::int64_t rows, float* y) const;

  std::filesystem::path directory;
  ReleasedOptions options;
  ReleasedConfig config;
  ThreadPool pool;
  ThreadPool* threads;  ///< Null: the calling thread alone.
  std::shared_ptr<const TensorSet> tensors;
  DenseTensors dense;
  const StoredTensor* embedding = nullptr;
  std::vector<Layer> layers;
  std::vector<float> last_norm;
  std::optional<Projection> head;
  std::vector<float> frequencies;
  AttentionRooms rooms;
  Floats stream, normed, added;
  std::vector<std::int32_t> one_expert;  ///< Dense: all tokens' expert 0,
  std::vector<float> one_weight;         ///< with the weight 1.
};

ReleasedModel::State::State(const std::filesystem::path& path, const ReleasedOptions& how)
    : directory(path),
      options(how),
      config(read_released_config(config_of(path), (path / kConfigFile).string())),
      pool(how.num_threads),
      threads(pool.num_threads() > 1 ? &pool : nullptr),
      tensors(TensorSet::open(path)),
      dense(tensors, threads),
      frequencies(rope_frequencies(config.rope)) {
  const std::string name = config.blocks.stem + config.blocks.family->model.embedding;
  embedding = &tensors->at(name, {config.blocks.vocabulary, config.hidden()});
  require_file(is_float(embedding->spec.type), tensors->name(),
               "tensor '{}' is {}, expected F32, BF16 or F16", name,
               to_string(embedding->spec.type));
  for (std::int32_t l = 0; l < config.blocks.num_layers; ++l) {
    layers.push_back(load_layer_of(l));
    if (options.progress) options.progress(double(l + 1) / double(config.blocks.num_layers));
  }
  last_norm = dense.vector(config.blocks.stem + "norm.weight", config.hidden());
  load_head();
}

Layer ReleasedModel::State::load_layer_of(std::int32_t l) {
  const std::string prefix = layer_prefix(config.blocks, l);
  const std::vector<std::int32_t>& moe = config.blocks.moe_layers;
  const bool is_dense = !std::binary_search(moe.begin(), moe.end(), l);
  LayerOptions how;
  how.compute = options.compute;
  how.num_threads = options.num_threads;
  if (!is_dense) how.weights = options.weights;
  Layer layer{.norm1 = dense.vector(prefix + "input_layernorm.weight", config.hidden()),
              .norm2 = dense.vector(prefix + "post_attention_layernorm.weight", config.hidden()),
              .attention = ReleasedAttention(config, l, prefix + "self_attn.", dense),
              .dense = is_dense,
              .block = MoeLayer(is_dense ? dense_block(tensors, config, prefix)
                                         : load_layer(tensors, config.blocks, l),
                                how)};
  dense.refuse_unread(prefix, {prefix + "mlp.", prefix + "block_sparse_moe."});
  return layer;
}

void ReleasedModel::State::load_head() {
  const std::string own = "lm_head.weight";
  const std::string table = config.blocks.stem + config.blocks.family->model.embedding;
  const StoredTensor* const stored = tensors->find(own);
  if (config.tied && stored != nullptr) {
    require_file(std::ranges::equal(stored->bytes, embedding->bytes), tensors->name(),
                 "tie_word_embeddings=true, but '{}' and '{}' differ", own, table);
  }
  const std::string name = config.tied ? table : own;
  head.emplace(dense.projection({{name.substr(0, name.rfind(".weight")), config.blocks.vocabulary}},
                                config.hidden(), false));
}

void ReleasedModel::State::check(Matrix<const std::int32_t> tokens, std::int64_t before) const {
  require(before + tokens.shape[1] <= config.positions,
          "{} positions exceed the model's max_position_embeddings of {}", before + tokens.shape[1],
          config.positions);
  for (std::int64_t i = 0; i < tokens.size(); ++i) {
    const std::int32_t id = tokens.data[i];
    require(id >= 0 && id < config.blocks.vocabulary, "tokens[{}][{}] is {}, want 0 to {}",
            i / tokens.shape[1], i % tokens.shape[1], id, config.blocks.vocabulary - 1);
  }
}

void ReleasedModel::State::embed(Matrix<const std::int32_t> tokens, float* x) const {
  const std::int64_t hidden = config.hidden();
  const std::int64_t row_bytes = hidden * size_of(embedding->spec.type);
  for (std::int64_t t = 0; t < tokens.size(); ++t) {
    row_ops::widen(*dtype_of(embedding->spec.type),
                   embedding->bytes.data() + tokens.data[t] * row_bytes, x + t * hidden, hidden);
  }
}

void ReleasedModel::State::norm(const std::vector<float>& weight, const float* x, std::int64_t rows,
                                float* y) const {
  rms_norm({.x = x,
            .weight = weight.data(),
            .rows = rows,
            .size = config.hidden(),
            .epsilon = config.norm_epsilon,
            .y = y,
            .scale = nullptr,
            .pool = threads});
}

void ReleasedModel::State::run_block(Layer& layer, const float* x, std::int64_t rows, float* out) {
  const std::int64_t hidden = config.hidden();
  ForwardArgs args{.tokens = {reinterpret_cast<const std::byte*>(x), DType::kF32, rows, hidden},
                   .out = {reinterpret_cast<std::byte*>(out), DType::kF32, rows, hidden}};
  if (layer.dense) {
    one_expert.resize(static_cast<std::size_t>(rows), 0);
    one_weight.resize(static_cast<std::size_t>(rows), 1.0F);
    args.expert = {one_expert.data(), {rows, 1}};
    args.weight = {one_weight.data(), {rows, 1}};
  }
  layer.block.forward(args);
}

const float* ReleasedModel::State::run(Matrix<const std::int32_t> tokens, Cache::State* cache) {
  const std::int64_t rows = tokens.size(), hidden = config.hidden();
  const std::int64_t before = cache == nullptr ? 0 : cache->length;
  const RopeAngles angles = rope_angles(config.rope, frequencies, before, tokens.shape[1]);
  float* const x = stream.reserve(rows * hidden);
  float* const y = normed.reserve(rows * hidden);
  float* const more = added.reserve(rows * hidden);
  embed(tokens, x);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    Layer& layer = layers[l];
    norm(layer.norm1, x, rows, y);
    layer.attention.forward({.batch = tokens.shape[0],
                             .positions = tokens.shape[1],
                             .x = y,
                             .out = more,
                             .angles = &angles,
                             .cache = cache,
                             .kept = cache == nullptr ? nullptr : &cache->layers[l],
                             .rooms = &rooms},
                            threads);
    row_ops::add(more, x, rows * hidden);
    norm(layer.norm2, x, rows, y);
    run_block(layer, y, rows, more);
    row_ops::add(more, x, rows * hidden);
  }
  norm(last_norm, x, rows, y);
  return y;
}

bool is_released(const std::filesystem::path& directory) {
  const Json json = config_of(directory);
  require_file(json.is_object(), (directory / kConfigFile).string(), "not a JSON object");
  return !json.contains("switchyard") && json.value("model_type", Json()) != "switchyard";
}

ReleasedSizes read_released_sizes(const std::filesystem::path& directory) {
  const ReleasedConfig config =
      read_released_config(config_of(directory), (directory / kConfigFile).string());
  return {.vocabulary = config.blocks.vocabulary, .positions = config.positions};
}

ReleasedModel::ReleasedModel(const std::filesystem::path& path, const ReleasedOptions& options) {
  require(options.num_threads >= 0, "num_threads={} is negative", options.num_threads);
  state_ = std::make_unique<State>(path, options);
}
ReleasedModel::~ReleasedModel() = default;
ReleasedModel::ReleasedModel(ReleasedModel&&) noexcept = default;
ReleasedModel& ReleasedModel::operator=(ReleasedModel&&) noexcept = default;

std::string_view ReleasedModel::family() const { return state_->config.blocks.family->name; }
std::int64_t ReleasedModel::vocabulary() const { return state_->config.blocks.vocabulary; }
std::int64_t ReleasedModel::positions() const { return state_->config.positions; }

std::string ReleasedModel::description() const {
  const ReleasedConfig& config = state_->config;
  const LayerConfig& layer = config.blocks.layer;
  std::string words =
      fmt::format("{} L{} H{} heads {}/{} E{} K{} I{}", family(), config.blocks.num_layers,
                  config.hidden(), config.heads, config.kv_heads, layer.experts.num_experts,
                  layer.router.top_k(), layer.experts.inner);
  const auto dense = config.blocks.num_layers - std::ssize(config.blocks.moe_layers);
  if (dense > 0) words += fmt::format(", {} dense", dense);
  return words + fmt::format(", vocabulary {}, {} positions", vocabulary(), positions());
}

void ReleasedModel::forward(Matrix<const std::int32_t> tokens, Matrix<float> logits) {
  require_shape("logits", logits, tokens.size(), vocabulary());
  state_->check(tokens, 0);
  if (tokens.size() == 0) return;
  const float* const normed = state_->run(tokens, nullptr);
  state_->head->forward(normed, tokens.size(), logits.data, state_->threads);
}

Cache ReleasedModel::make_cache(std::int64_t batch, std::int64_t positions) const {
  const ReleasedConfig& config = state_->config;
  require(batch >= 1, "a cache of {} sequences, want at least 1", batch);
  require(positions >= 1 && positions <= config.positions,
          "a cache of {} positions, want 1 to the model's {}", positions, config.positions);
  Cache cache;
  Cache::State& state = cache.state();
  state.batch = batch;
  state.capacity = positions;
  const auto size =
      static_cast<std::size_t>(batch * positions * config.kv_heads * config.head_dim());
  for (std::int32_t l = 0; l < config.blocks.num_layers; ++l) {
    state.layers.push_back({std::vector<float>(size), std::vector<float>(size)});
  }
  return cache;
}

void ReleasedModel::decode(Matrix<const std::int32_t> tokens, Cache& cache, Matrix<float> logits) {
  const auto [batch, positions] = tokens.shape;
  Cache::State& behind = cache.state();
  require(batch == behind.batch && behind.layers.size() == state_->layers.size(),
          "tokens are of {} sequences in {} layers, the cache of {} in {}", batch,
          state_->layers.size(), behind.batch, behind.layers.size());
  require(positions >= 1 && behind.length + positions <= behind.capacity,
          "{} more positions behind {}: the cache has room for {}", positions, behind.length,
          behind.capacity);
  const bool last_only = logits.shape[0] == batch;
  require_shape("logits", logits, last_only ? batch : tokens.size(), vocabulary());
  state_->check(tokens, behind.length);
  const float* normed = state_->run(tokens, &behind);
  behind.length += positions;
  const std::int64_t hidden = state_->config.hidden();
  std::vector<float> last;
  if (last_only && positions > 1) {
    for (std::int64_t b = 0; b < batch; ++b) {
      const float* const row = normed + ((b + 1) * positions - 1) * hidden;
      last.insert(last.end(), row, row + hidden);
    }
    normed = last.data();
  }
  state_->head->forward(normed, logits.shape[0], logits.data, state_->threads);
}

}  // namespace switchyard::models
