// config.json of a whole model. A family is a row of what differs; docs/models.md has the list.
#include "models/released/config.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "checkpoint/files/file_error.hpp"

namespace switchyard::models {
namespace {

constexpr std::int64_t kMostHeads = 1 << 12;
constexpr std::int64_t kMostDim = 1 << 14;
constexpr std::int64_t kMostPositions = 1 << 30;

/// Which layers see a window of positions only.
enum class Windows : std::uint8_t {
  kNone,
  kAll,    ///< All, where sliding_window is a number.
  kUsed,   ///< All, where use_sliding_window says so.
  kTyped,  ///< As layer_types says.
  kTurns,  ///< Likewise; without it every second one from the first on.
};

struct Attention {
  std::string_view model_type;
  QkNorm norm = QkNorm::kNone;
  const char* bias = nullptr;  ///< The key; null: there are none.
  bool bias_absent = false;
  bool out_bias = false;  ///< The key is the output projection's too.
  bool clip = false;      ///< clip_qkv.
  bool sinks = false;
  bool latent = false;
  bool kv_heads_absent = false;  ///< num_key_value_heads may be absent: as many as heads.
  Windows windows = Windows::kNone;
  double theta = 1e4;  ///< Where the file has none.
};

constexpr std::array<Attention, 7> kAttentions = {{
    {.model_type = "olmoe",
     .norm = QkNorm::kWhole,
     .bias = "attention_bias",
     .out_bias = true,
     .clip = true,
     .kv_heads_absent = true},
    {.model_type = "qwen3_moe",
     .norm = QkNorm::kHead,
     .bias = "attention_bias",
     .out_bias = true,
     .windows = Windows::kUsed},
    {.model_type = "mixtral", .windows = Windows::kAll, .theta = 1e6},
    {.model_type = "qwen2_moe",
     .bias = "qkv_bias",
     .bias_absent = true,
     .windows = Windows::kTyped},
    {.model_type = "gpt_oss",
     .bias = "attention_bias",
     .bias_absent = true,
     .out_bias = true,
     .sinks = true,
     .windows = Windows::kTurns,
     .theta = 1.5e5},
    {.model_type = "deepseek_v2",
     .bias = "attention_bias",
     .out_bias = true,
     .latent = true,
     .kv_heads_absent = true},
    {.model_type = "deepseek_v3",
     .bias = "attention_bias",
     .out_bias = true,
     .latent = true,
     .kv_heads_absent = true},
}};

const Attention& attention_of(const ConfigReader& json) {
  const std::string type = json.text_or("model_type", "");
  for (const Attention& attention : kAttentions) {
    if (attention.model_type == type) return attention;
  }
  bad_file(json.file(), "model_type='{}': whole models are read of {}; of others only MoE layers",
           type, released_model_types());
}

std::int64_t window_size(const ConfigReader& json, const Attention& use) {
  if (use.windows == Windows::kTurns) return json.whole_or("sliding_window", 1, INT32_MAX, 128);
  return json.whole("sliding_window", 1, INT32_MAX);
}

/// Words of layer_types, one a layer.
std::vector<std::string> layer_words(const ConfigReader& json, const Attention& use,
                                     std::int32_t layers) {
  std::vector<std::string> words = json.words("layer_types");
  const auto fill = [&](const auto& word) {
    for (std::int32_t l = 0; l < layers; ++l) words.emplace_back(word(l));
  };
  const char* const full = "full_attention";
  const char* const sliding = "sliding_attention";
  const bool used = json.flag_or("use_sliding_window", false);
  const bool all = (use.windows == Windows::kAll && json.has("sliding_window")) ||
                   (use.windows == Windows::kUsed && used && json.has("sliding_window"));
  if (words.empty() && use.windows == Windows::kTurns) {
    fill([&](std::int32_t l) { return l % 2 == 0 ? sliding : full; });
  } else if (words.empty()) {
    require_file(use.windows != Windows::kTyped || !used, json.file(),
                 "use_sliding_window=true needs layer_types: which layers slide differs between "
                 "releases of transformers");
    fill([&](std::int32_t) { return all ? sliding : full; });
  }
  require_file(std::ssize(words) == layers, json.file(), "layer_types has {} entries for {} layers",
               words.size(), layers);
  const bool typed = use.windows == Windows::kTyped || use.windows == Windows::kTurns;
  for (const std::string& word : words) {
    require_file(word == full || word == sliding, json.file(),
                 "layer_types: '{}' is not full_attention or sliding_attention", word);
    require_file(typed || (word == sliding) == all, json.file(),
                 "layer_types: '{}' is not what this family's sliding_window says", word);
    require_file(use.windows != Windows::kTyped || word == full || used, json.file(),
                 "layer_types: '{}' without use_sliding_window", word);
  }
  return words;
}

void read_windows(const ConfigReader& json, const Attention& use, ReleasedConfig& config) {
  if (use.windows == Windows::kNone) {
    require_file(!json.has("sliding_window"), json.file(), "sliding_window: {} has no windows here",
                 use.model_type);
  }
  for (const std::string& word : layer_words(json, use, config.blocks.num_layers)) {
    config.windows.push_back(word == "full_attention" ? 0 : window_size(json, use));
  }
}

double real_in(const ConfigReader& json, const char* key, double low, double high, double absent) {
  if (!json.has(key)) return absent;
  const auto value = static_cast<double>(json.real_or(key, 0));
  require_file(value >= low && value <= high, json.file(), "{}={} is not in {} to {}", key, value,
               low, high);
  return value;
}

/// By object: rope_parameters of transformers 5, rope_scaling before.
void read_scaling(const Json& object, const ConfigReader& json, ReleasedConfig& config) {
  RopeConfig& rope = config.rope;
  const std::string kind = json.text_or("rope_type", json.text_or("type", "default").c_str());
  std::set<std::string_view> known{"rope_type", "type", "rope_theta", "partial_rotary_factor"};
  json.require_value("partial_rotary_factor", "1.0");
  rope.theta = real_in(json, "rope_theta", 1.0001, 1e12, rope.theta);
  if (kind == "linear" || kind == "yarn") {
    rope.kind = kind == "linear" ? RopeConfig::Kind::kLinear : RopeConfig::Kind::kYarn;
    require_file(json.has("factor"), json.file(), "rope: '{}' lacks 'factor'", kind);
    rope.factor = real_in(json, "factor", 1, 1e6, 1);
    known.insert("factor");
  } else {
    require_file(kind == "default", json.file(),
                 "rope_type='{}' is not one of default, linear, yarn", kind);
  }
  if (kind == "yarn") {
    known.insert({"original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
                  "mscale_all_dim", "attention_factor", "truncate"});
    rope.original = static_cast<double>(
        json.whole_or("original_max_position_embeddings", 1, kMostPositions, config.positions));
    rope.fast = real_in(json, "beta_fast", 1e-3, 1e6, 32);
    rope.slow = real_in(json, "beta_slow", 1e-3, 1e6, 1);
    rope.truncate = json.flag_or("truncate", true);
    const double mscale = real_in(json, "mscale", 0, 100, 0);
    const double all = real_in(json, "mscale_all_dim", 0, 100, 0);
    const double of_factor = mscale > 0 && all > 0 ? yarn_magnitude(rope.factor, mscale) /
                                                         yarn_magnitude(rope.factor, all)
                                                   : yarn_magnitude(rope.factor, 1);
    rope.magnitude = real_in(json, "attention_factor", 1e-3, 1e3, of_factor);
    if (config.latent.rank > 0 && all > 0) {
      const double magnitude = yarn_magnitude(rope.factor, all);
      config.score_scale *= static_cast<float>(magnitude * magnitude);
    }
  }
  for (const auto& [key, value] : object.items()) {
    require_file(known.count(key) > 0 || value.is_null(), json.file(),
                 "rope: the key '{}' is not known for '{}'", key, kind);
  }
}

void read_rope(const Json& whole, const ConfigReader& json, const Attention& use,
               ReleasedConfig& config) {
  RopeConfig& rope = config.rope;
  rope.dim = config.latent.rank > 0 ? config.latent.rope_dim : config.query_dim;
  rope.interleaved = config.latent.rank > 0 &&
                     (use.model_type != "deepseek_v3" || json.flag_or("rope_interleave", true));
  rope.theta = real_in(json, "rope_theta", 1.0001, 1e12, use.theta);
  json.require_value("partial_rotary_factor", "1.0");
  const bool is_new = json.has("rope_parameters");
  const bool is_old = json.has("rope_scaling");
  require_file(!is_new || !is_old || whole["rope_parameters"] == whole["rope_scaling"], json.file(),
               "rope_parameters and rope_scaling are both given and differ");
  if (is_new || is_old) {
    const char* const key = is_new ? "rope_parameters" : "rope_scaling";
    return read_scaling(whole[key], json.object(key), config);
  }
  // What gpt-oss has where the file says nothing.
  if (use.model_type == "gpt_oss") {
    const Json released = {{"rope_type", "yarn"},
                           {"factor", 32.0},
                           {"truncate", false},
                           {"original_max_position_embeddings", 4096}};
    read_scaling(released, {released, json.file()}, config);
  }
}

void read_latent(const ConfigReader& json, ReleasedConfig& config) {
  LatentConfig& latent = config.latent;
  latent.query_rank = json.whole_or("q_lora_rank", 1, kMaxWidth, 0);
  latent.rank = json.whole("kv_lora_rank", 1, kMaxWidth);
  latent.plain_dim = json.whole("qk_nope_head_dim", 1, kMostDim);
  latent.rope_dim = json.whole("qk_rope_head_dim", 2, kMostDim);
  config.query_dim = latent.plain_dim + latent.rope_dim;
  config.value_dim = json.whole("v_head_dim", 1, kMostDim);
  require_file(config.kv_heads == config.heads, json.file(),
               "num_key_value_heads={} is not num_attention_heads={}", config.kv_heads,
               config.heads);
}

void read_heads(const ConfigReader& json, const Attention& use, ReleasedConfig& config) {
  config.heads = json.whole("num_attention_heads", 1, kMostHeads);
  const char* const key = "num_key_value_heads";
  const bool as_heads = !json.has(key) && (use.kv_heads_absent || json.is_null(key));
  config.kv_heads = as_heads ? config.heads : json.whole(key, 1, config.heads);
  require_file(config.heads % config.kv_heads == 0, json.file(),
               "num_key_value_heads={} does not divide num_attention_heads={}", config.kv_heads,
               config.heads);
  if (use.latent) {
    read_latent(json, config);
  } else {
    const std::int64_t even = config.hidden() / config.heads;
    require_file(json.has("head_dim") || even * config.heads == config.hidden(), json.file(),
                 "num_attention_heads={} does not divide hidden_size={}, and there is no head_dim",
                 config.heads, config.hidden());
    config.query_dim = json.whole_or("head_dim", 1, kMostDim, even);
    config.value_dim = config.query_dim;
  }
  const std::int64_t turned = use.latent ? config.latent.rope_dim : config.query_dim;
  require_file(turned >= 2 && turned % 2 == 0, json.file(),
               "heads of {} numbers: positions turn pairs", turned);
  config.score_scale = 1.0F / std::sqrt(static_cast<float>(config.query_dim));
}

}  // namespace

ReleasedConfig read_released_config(const Json& json, const std::string& file) {
  const ConfigReader reader(json, file);
  require_file(!reader.has("text_config"), file,
               "a model for text and other things (text_config): only its MoE layers are read");
  const Attention& use = attention_of(reader);
  ReleasedConfig config;
  config.blocks = read_config(json, file);
  require_file(
      reader.has("num_attention_heads"), file,
      "has no num_attention_heads: layers of experts alone, as make-checkpoint writes them "
      "for run and bench; want a whole model");
  require_file(config.blocks.vocabulary >= 1, file, "lacks 'vocab_size'");
  config.norm_epsilon = reader.real_or("rms_norm_eps", config.blocks.family->rms_norm_eps);
  config.positions = reader.whole("max_position_embeddings", 1, kMostPositions);
  config.tied = reader.flag_or("tie_word_embeddings", false);
  config.qk_norm = use.norm;
  config.sinks = use.sinks;
  if (use.bias == nullptr) {
    reader.require_value("attention_bias", "false");
  } else {
    config.bias = reader.flag_or(use.bias, use.bias_absent);
    config.out_bias = use.out_bias && config.bias;
  }
  if (use.clip) {
    config.clip = reader.real_or("clip_qkv", 0);
    require_file(config.clip > 0 || !reader.has("clip_qkv"), file, "clip_qkv=0 leaves nothing");
  }
  read_heads(reader, use, config);
  read_windows(reader, use, config);
  read_rope(json, reader, use, config);
  if (std::ssize(config.blocks.moe_layers) < config.blocks.num_layers) {
    config.dense_inner = reader.whole("intermediate_size", 1, kMaxWidth);
  }
  return config;
}

std::string released_model_types() {
  std::string types;
  for (const Attention& attention : kAttentions) {
    types.append(types.empty() ? "" : ", ").append(attention.model_type);
  }
  return types;
}

}  // namespace switchyard::models
