// A configuration as config.json and back: one table of keys for both ways.
#include <nlohmann/json.hpp>

#include <array>
#include <limits>
#include <set>

#include "checkpoint/config_keys.hpp"
#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/json.hpp"
#include "core/check.hpp"
#include "switchyard/models/config.hpp"
#include "switchyard/names.hpp"

namespace switchyard::models {
namespace {

constexpr const char* kOwn = "switchyard";  ///< The object of what transformers' keys cannot say.

/// Reads or writes members of one object; the same calls do both.
class Keys {
 public:
  Keys(Json& json, const std::string* source) : json_(json), source_(source) {}

  template <class T>
  void member(const char* key, T& value, bool needed = true) {
    seen_.insert(key);
    if (source_ == nullptr) {
      json_[key] = value;
      return;
    }
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) {
      require_file(!needed, *source_, "the key '{}' is missing", key);
      return;
    }
    read(key, *found, value);
  }
  /// Absent for nothing.
  void member(const char* key, std::optional<double>& value) {
    double number = value.value_or(0);
    if (source_ != nullptr || value) member(key, number, false);
    seen_.insert(key);
    if (source_ != nullptr && json_.contains(key)) value = number;
  }
  /// By its word.
  template <class Enum, std::size_t kCount>
  void word(const char* key, Enum& value, const std::array<Enum, kCount>& all) {
    std::string name = to_string(value);
    member(key, name, false);
    if (source_ == nullptr) return;
    for (const Enum candidate : all) {
      if (name == to_string(candidate)) {
        value = candidate;
        return;
      }
    }
    bad_file(*source_, "'{}' is '{}', no word of it", key, name);
  }
  /// An object of its own keys; null: there is none. To write, `is_there` says so.
  Json* object(const char* key, bool is_there) {
    seen_.insert(key);
    if (source_ == nullptr) return is_there ? &(json_[key] = Json::object()) : nullptr;
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return nullptr;
    require_file(found->is_object(), *source_, "'{}' is not an object", key);
    return &*found;
  }
  [[nodiscard]] const std::string* source() const { return source_; }
  /// To write, there are no others.
  void refuse_others() const {
    if (source_ == nullptr) return;
    for (const auto& [key, value] : json_.items()) {
      require_file(seen_.count(key) > 0, *source_, "unknown key '{}'", key);
    }
  }

 private:
  template <class T>
  void read(const char* key, const Json& from, T& value) const {
    constexpr bool kIsNumber = std::is_floating_point_v<T>;
    constexpr bool kIsBool = std::is_same_v<T, bool>;
    constexpr bool kIsWhole = std::is_integral_v<T> && !kIsBool;
    const bool fits = kIsNumber  ? from.is_number()
                      : kIsBool  ? from.is_boolean()
                      : kIsWhole ? from.is_number_integer()
                                 : from.is_string();
    require_file(fits, *source_, "'{}' is not a {}", key,
                 kIsNumber  ? "number"
                 : kIsBool  ? "boolean"
                 : kIsWhole ? "whole number"
                            : "text");
    if constexpr (kIsWhole) {
      const bool in_range = from.is_number_unsigned()
                                ? from.get<std::uint64_t>() <=
                                      static_cast<std::uint64_t>(std::numeric_limits<T>::max())
                                : from.get<std::int64_t>() >= std::numeric_limits<T>::min();
      require_file(in_range, *source_, "'{}' is out of range", key);
    }
    value = from.get<T>();
  }

  Json& json_;
  const std::string* source_;  ///< Null: writes.
  std::set<std::string> seen_;
};

/// Which family of transformers computes the same; null: none.
const char* family_of(const ModelConfig& config) {
  if (config.adapters) return nullptr;
  if (config.first_dense == config.layers || config.shared_inner > 0 || config.bias_rate > 0) {
    return nullptr;
  }
  if (soft_moe_config(config)) return nullptr;
  const LayerConfig layer = layer_config(config);
  const RouterConfig& router = layer.router;
  if (!router.is_top_k() || router.noise.kind != RouterNoise::Kind::kNone) return nullptr;
  if (!router.network.is_linear() || router.is_chain()) return nullptr;
  const TopKRouter& top_k = router.as_top_k();
  if (top_k.score != Score::kSoftmax || top_k.scale != 1 || top_k.top_k != config.top_k) {
    return nullptr;
  }
  if (config.qk_norm == QkNorm::kHead) return "qwen3_moe";
  const bool square = config.heads * config.head_dim == config.hidden;
  return config.qk_norm == QkNorm::kWhole && square && config.first_dense == 0 ? "olmoe" : nullptr;
}

void common_keys(Keys& keys, ModelConfig& config) {
  keys.member("vocab_size", config.vocabulary);
  keys.member("hidden_size", config.hidden);
  keys.member("num_hidden_layers", config.layers);
  keys.member("num_attention_heads", config.heads);
  keys.member("num_key_value_heads", config.kv_heads, false);
  keys.member("max_position_embeddings", config.sequence);
  keys.member("tie_word_embeddings", config.tied, false);
  keys.member("rms_norm_eps", config.norm_epsilon, false);
  keys.member("rope_theta", config.rope_theta, false);
  keys.member("num_experts", config.experts);
  keys.member("num_experts_per_tok", config.top_k);
}

/// Without a number embedded adapters are as many as experts, and a shared one is alone.
void adapter_keys(Keys& keys, ModelConfig& config) {
  Json* const json = keys.object("adapters", config.adapters.has_value());
  if (json == nullptr) return;
  AdapterConfig adapters = config.adapters.value_or(AdapterConfig{});
  Keys own(*json, keys.source());
  own.word(
      "kind", adapters.kind,
      std::array{PerftKind::kRouted, PerftKind::kEmbedded, PerftKind::kDense, PerftKind::kShared});
  if (!config.adapters) adapters.num_adapters = usual_num_adapters(adapters.kind, config.experts);
  own.member("num_adapters", adapters.num_adapters, false);
  if (adapters.kind == PerftKind::kRouted) {
    own.member("top_k", adapters.top_k, false);
    own.member("renormalize", adapters.renormalize, false);
  }
  own.member("rank", adapters.rank, false);
  own.member("alpha", adapters.alpha, false);
  own.word("activation", adapters.activation,
           std::array{Activation::kIdentity, Activation::kSilu, Activation::kGelu,
                      Activation::kGeluTanh, Activation::kRelu, Activation::kRelu2});
  own.refuse_others();
  config.adapters = adapters;
}

void own_keys(Keys& keys, ModelConfig& config) {
  keys.word("qk_norm", config.qk_norm, std::array{QkNorm::kNone, QkNorm::kHead, QkNorm::kWhole});
  keys.member("router", config.router, false);
  keys.member("first_dense", config.first_dense, false);
  keys.member("dense_inner", config.dense_inner, false);
  keys.member("inner", config.inner, false);
  keys.member("shared_inner", config.shared_inner, false);
  keys.member("shared_gated", config.shared_gated, false);
  keys.member("capacity_factor", config.capacity_factor);
  keys.word("drop_policy", config.drop_policy,
            std::array{DropPolicy::kToken, DropPolicy::kChoice, DropPolicy::kProbs,
                       DropPolicy::kBpr, DropPolicy::kReroute});
  keys.member("bias_rate", config.bias_rate, false);
  LossConfig& losses = config.losses;
  keys.member("balance", losses.balance, false);
  keys.member("z", losses.z, false);
  keys.member("importance", losses.importance, false);
  keys.member("device", losses.device, false);
  keys.member("communication", losses.communication, false);
  keys.member("entropy", losses.entropy, false);
  keys.word("loss_scope", losses.scope,
            std::array{LossScope::kBatch, LossScope::kSequence, LossScope::kGlobal});
  keys.word(
      "loss_share", losses.share,
      std::array{BalanceShare::kAssignments, BalanceShare::kTokens, BalanceShare::kFirstChoice});
  keys.member("loss_sequence_length", losses.sequence_length, false);
  keys.member("loss_devices", losses.devices, false);
  keys.member("loss_devices_per_token", losses.devices_per_token, false);
  adapter_keys(keys, config);
}

/// The number of experts under the name that it has here.
void name_experts(Json& json, const std::string& source) {
  for (const std::string_view name : spellings_of("num_experts")) {
    const auto found = json.find(name);
    if (name == "num_experts" || found == json.end() || found->is_null()) continue;
    const Json value = *found;
    const auto [own, is_new] = json.emplace("num_experts", value);
    require_file(is_new || *own == value, source, "'num_experts' and '{}' disagree", name);
  }
}

/// What released configurations may say and models here do not compute.
void refuse_other_models(const Json& json, const std::string& source) {
  const auto only = [&](const char* key, const Json& here) {
    const auto found = json.find(key);
    if (found == json.end() || found->is_null()) return;
    require_file(*found == here, source, "'{}' is {}, models here have {}", key, found->dump(),
                 here.is_null() ? "none" : here.dump());
  };
  only("hidden_act", "silu");
  only("attention_bias", false);
  only("use_sliding_window", false);
  only("decoder_sparse_step", 1);
  only("partial_rotary_factor", 1);
  only("clip_qkv", nullptr);
  only("rope_scaling", nullptr);
  if (json.contains("rope_parameters") && json["rope_parameters"].is_object()) {
    const Json& rope = json["rope_parameters"];
    for (const char* const key : {"rope_type", "type"}) {
      if (!rope.contains(key)) continue;
      require_file(rope[key] == "default", source,
                   "'{}' of 'rope_parameters' is {}, want \"default\"", key, rope[key].dump());
    }
  }
}

/// As transformers 5 writes it.
void read_rope_parameters(const Json& json, const std::string& source, float& theta) {
  const auto found = json.find("rope_parameters");
  if (found == json.end() || found->is_null()) return;
  require_file(found->is_object(), source, "'rope_parameters' is not an object");
  if (!found->contains("rope_theta")) return;
  const Json& value = (*found)["rope_theta"];
  require_file(value.is_number(), source, "'rope_theta' of 'rope_parameters' is not a number");
  require_file(!json.contains("rope_theta") || json["rope_theta"] == value, source,
               "'rope_theta' and that of 'rope_parameters' disagree");
  theta = value.get<float>();
}

}  // namespace

std::string to_json(const ModelConfig& asked) {
  check(asked);
  ModelConfig config = asked;
  const char* const family = family_of(config);
  const std::string type = family == nullptr ? kOwn : family;
  Json json;
  json["model_type"] = type;
  if (family != nullptr) {
    json["architectures"] = {type == "olmoe" ? "OlmoeForCausalLM" : "Qwen3MoeForCausalLM"};
  }
  Keys keys(json, nullptr);
  common_keys(keys, config);
  keys.member("head_dim", config.head_dim);
  json["hidden_act"] = "silu";
  json["attention_bias"] = false;
  json["attention_dropout"] = 0.0;
  json["torch_dtype"] = "float32";
  const bool olmoe = type == "olmoe";
  json["intermediate_size"] = olmoe ? config.inner : std::max<std::int64_t>(config.dense_inner, 1);
  json["moe_intermediate_size"] = config.inner;
  json["decoder_sparse_step"] = 1;
  json["mlp_only_layers"] = Json::array();
  for (std::int32_t l = 0; l < config.first_dense; ++l) json["mlp_only_layers"].push_back(l);
  if (config.experts > 0 && !soft_moe_config(config)) {
    const RouterConfig router = layer_config(config).router;
    json["norm_topk_prob"] = !router.is_top_k() || router.as_top_k().renormalize;
  }
  json[kOwn] = Json::object();
  Keys own(json[kOwn], nullptr);
  own_keys(own, config);
  return json.dump(2) + "\n";
}

ModelConfig parse_model_config(std::string_view text, const std::string& source) {
  Json json = parse_json(text, source);
  require_file(json.is_object(), source, "not a JSON object");
  ModelConfig config;
  std::string type;
  Keys keys(json, &source);
  keys.member("model_type", type);
  const bool olmoe = type == "olmoe";
  require_file(olmoe || type == "qwen3_moe" || type == kOwn, source,
               "model_type '{}' is none of switchyard, qwen3_moe, olmoe", type);
  refuse_other_models(json, source);
  name_experts(json, source);
  config.qk_norm = olmoe ? QkNorm::kWhole : QkNorm::kHead;
  common_keys(keys, config);
  read_rope_parameters(json, source, config.rope_theta);
  if (!json.contains("num_key_value_heads")) config.kv_heads = config.heads;
  if (config.heads > 0) config.head_dim = config.hidden / config.heads;
  keys.member("head_dim", config.head_dim, false);
  keys.member(olmoe ? "intermediate_size" : "moe_intermediate_size", config.inner);
  if (!json.contains(kOwn)) {
    bool renormalize = false;
    keys.member("norm_topk_prob", renormalize, false);
    config.router = renormalize ? "top-k" : "top-k:renormalize=no";
    std::vector<std::int32_t> dense;
    if (json.contains("mlp_only_layers")) {
      for (const Json& layer : json["mlp_only_layers"]) {
        require_file(layer.is_number_integer() && layer.get<std::int64_t>() == std::ssize(dense),
                     source, "mlp_only_layers: dense layers are the first ones here");
        dense.push_back(config.first_dense++);
      }
    }
    if (!dense.empty()) keys.member("intermediate_size", config.dense_inner);
  } else {
    require_file(json[kOwn].is_object(), source, "'{}' is not an object", kOwn);
    Keys own(json[kOwn], &source);
    own_keys(own, config);
    own.refuse_others();
  }
  check(config);
  return config;
}

}  // namespace switchyard::models
