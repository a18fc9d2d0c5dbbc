// Configurations: as files and back, their rules, presets and counts.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "switchyard/models/model.hpp"
#include "testkit/expect_error.hpp"
#include "tests/models/small_model.hpp"

namespace switchyard::test {
namespace {

using models::ModelConfig;
using models::parse_model_config;
using models::QkNorm;

ModelConfig full_config() {
  ModelConfig config = small_config();
  config.tied = true, config.qk_norm = QkNorm::kWhole, config.norm_epsilon = 1e-5F;
  config.first_dense = 1, config.dense_inner = 12, config.shared_inner = 7;
  config.shared_gated = true, config.router = "gshard:second=all", config.capacity_factor = 1.25;
  config.drop_policy = DropPolicy::kBpr, config.rope_theta = 500000;
  config.losses = {.balance = 0.01,
                   .z = 0.001,
                   .entropy = 0.5,
                   .scope = LossScope::kSequence,
                   .share = BalanceShare::kFirstChoice,
                   .sequence_length = 48};
  return config;
}

TEST(ModelConfigs, ReadBackAsTheyWereWritten) {
  ModelConfig soft = small_config();
  soft.router = "soft-moe:slots=3,group=8,causal=yes";
  for (const ModelConfig& config :
       {small_config(), full_config(), soft, models::find_preset("m").model}) {
    const std::string text = models::to_json(config);
    const ModelConfig back = parse_model_config(text, "config.json");
    EXPECT_EQ(models::to_json(back), text);
    EXPECT_EQ(back.router, config.router);
    EXPECT_EQ(back.capacity_factor, config.capacity_factor);
    EXPECT_EQ(back.norm_epsilon, config.norm_epsilon);
    EXPECT_EQ(back.losses.entropy, config.losses.entropy);
  }
}

TEST(ModelConfigs, SayWhichFamilyOfTransformersComputesTheSame) {
  const auto type = [](const ModelConfig& config) {
    const std::string text = models::to_json(config);
    const auto at = text.find("\"model_type\": \"") + 15;
    return text.substr(at, text.find('"', at) - at);
  };
  ModelConfig config = small_config();
  EXPECT_EQ(type(config), "qwen3_moe");
  config.qk_norm = QkNorm::kWhole, config.head_dim = 5;
  config.hidden = 20;
  config.head_dim = 5, config.heads = 4;
  EXPECT_THROW((void)type(config), Error);  // an odd head cannot be turned
  config.hidden = 24, config.head_dim = 6;
  EXPECT_EQ(type(config), "olmoe");
  config.router = "switch";
  EXPECT_EQ(type(config), "switchyard");
  EXPECT_EQ(type(full_config()), "switchyard");
}

TEST(ModelConfigs, OfTransformersAreReadWithoutOurKeys) {
  const ModelConfig config = parse_model_config(
      R"({"model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
          "max_position_embeddings": 128, "num_experts": 8, "num_experts_per_tok": 2,
          "moe_intermediate_size": 24, "intermediate_size": 40, "mlp_only_layers": [0],
          "norm_topk_prob": false, "rope_theta": 1e6})",
      "config.json");
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.first_dense, 1);
  EXPECT_EQ(config.dense_inner, 40);
  EXPECT_EQ(config.router, "top-k:renormalize=no");
  EXPECT_EQ(config.qk_norm, QkNorm::kHead);
}

/// A configuration of transformers with one more member.
std::string transformers_config(const char* more) {
  return fmt::format(
      R"({{"model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 4, "max_position_embeddings": 128, "num_experts_per_tok": 2,
          "moe_intermediate_size": 24, "norm_topk_prob": true, {}}})",
      more);
}

TEST(ModelConfigs, OfTransformers5AreRead) {
  const ModelConfig config = parse_model_config(
      transformers_config(R"("num_local_experts": 8, "hidden_act": "silu", "rope_scaling": null,
                             "rope_parameters": {"rope_type": "default", "rope_theta": 5e5})"),
      "config.json");
  EXPECT_EQ(config.experts, 8);
  EXPECT_EQ(config.rope_theta, 5e5F);
}

TEST(ModelConfigs, OfModelsThatAreOthersAreRefusedByName) {
  for (const auto& [words, more] : {
           std::pair{"'hidden_act' is \"gelu\"", R"("hidden_act": "gelu")"},
           {"'attention_bias' is true", R"("attention_bias": true)"},
           {"'use_sliding_window' is true", R"("use_sliding_window": true)"},
           {"'decoder_sparse_step' is 2", R"("decoder_sparse_step": 2)"},
           {"'partial_rotary_factor' is 0.5", R"("partial_rotary_factor": 0.5)"},
           {"'clip_qkv' is 8.0", R"("clip_qkv": 8.0)"},
           {"'rope_scaling' is {", R"("rope_scaling": {"type": "yarn"})"},
           {"'rope_type' of 'rope_parameters'", R"("rope_parameters": {"rope_type": "yarn"})"},
           {"'rope_parameters' is not an object", R"("rope_parameters": 1)"},
           {"that of 'rope_parameters' disagree",
            R"("rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4})"},
           {"'num_experts' and 'num_local_experts' disagree", R"("num_local_experts": 4)"},
       }) {
    const std::string json =
        transformers_config((R"("num_experts": 8, )" + std::string(more)).c_str());
    expect_error(ErrorCode::kBadFile, words, [&] { (void)parse_model_config(json, "c.json"); });
  }
}

TEST(ModelConfigs, ThatAreWrongAreRefusedByName) {
  const auto bad = [](const char* words, const auto& change) {
    ModelConfig config = small_config();
    change(config);
    expect_error(ErrorCode::kInvalidArgument, words, [&] { models::check(config); });
  };
  bad("kv_heads=3", [](ModelConfig& c) { c.kv_heads = 3; });
  bad("head_dim=7", [](ModelConfig& c) { c.head_dim = 7; });
  bad("layers=0", [](ModelConfig& c) { c.layers = 0; });
  bad("first_dense=3", [](ModelConfig& c) { c.first_dense = 3; });
  bad("dense_inner=0", [](ModelConfig& c) { c.first_dense = 1; });
  bad("shared_gated", [](ModelConfig& c) { c.shared_gated = true; });
  bad("top_k", [](ModelConfig& c) { c.top_k = 6; });
  bad("'routerless'", [](ModelConfig& c) { c.router = "routerless"; });
  bad("takes no selection bias", [](ModelConfig& c) { c.router = "hash", c.bias_rate = 1; });
  bad("router's logits", [](ModelConfig& c) { c.router = "hash", c.losses.z = 1; });
  bad("router's logits", [](ModelConfig& c) { c.router = "adamoe", c.losses.z = 1; });
  bad("'routerless'",
      [](ModelConfig& c) { c.first_dense = c.layers, c.dense_inner = 8, c.router = "routerless"; });
  bad("bias_rate=1: nobody moves the biases of the 2 gates of the router chain",
      [](ModelConfig& c) { c.router = "chain", c.bias_rate = 1; });
  bad("adapters of kind embedded have the routing of their layer", [](ModelConfig& c) {
    c.router = "chain";
    c.adapters = models::AdapterConfig{.kind = PerftKind::kEmbedded, .num_adapters = c.experts};
  });
  const auto soft = [&](const char* words, const char* router, const auto& change) {
    bad(words, [&](ModelConfig& c) { c.router = router, change(c); });
  };
  const auto as_it_is = [](ModelConfig&) {};
  soft("router soft-moe: slots='0', want a whole number from 1", "soft-moe:slots=0", as_it_is);
  soft("router soft-moe has no option 'top-k'", "soft-moe:top-k=2", as_it_is);
  soft("want a group below the sequence of 48", "soft-moe:causal=yes", as_it_is);
  soft("want a group below the sequence of 48", "soft-moe:causal=yes,group=48", as_it_is);
  soft("of a model the group is a sequence", "soft-moe:group=12", as_it_is);
  soft("capacity_factor=1.5: the router soft-moe", "soft-moe",
       [](ModelConfig& c) { c.capacity_factor = 1.5; });
  soft("bias_rate=0.1: the router soft-moe", "soft-moe", [](ModelConfig& c) { c.bias_rate = 0.1; });
  soft("shared_inner=4: the router soft-moe", "soft-moe",
       [](ModelConfig& c) { c.shared_inner = 4; });
  soft("has them over slots: want balance=0.5", "soft-moe",
       [](ModelConfig& c) { c.losses.balance = 0.5; });
  soft("adapters of kind shared: the router soft-moe", "soft-moe",
       [](ModelConfig& c) { c.adapters = models::AdapterConfig{.kind = PerftKind::kShared}; });
  bad("any number of experts", [](ModelConfig& c) { c.router = "top-p", c.capacity_factor = 1; });
  bad("drop_policy=reroute", [](ModelConfig& c) {
    c.router = "gshard", c.capacity_factor = 1, c.drop_policy = DropPolicy::kReroute;
  });
  const auto bad_file = [](const char* words, const char* text) {
    expect_error(ErrorCode::kBadFile, words, [&] { (void)parse_model_config(text, "c.json"); });
  };
  bad_file("not valid JSON", "{");
  bad_file("not a JSON object", "[]");
  bad_file("model_type 'gpt2'", R"({"model_type": "gpt2"})");
  bad_file("'vocab_size' is missing", R"({"model_type": "olmoe"})");
  bad_file("'vocab_size' is not a whole number", R"({"model_type": "olmoe", "vocab_size": 1.5})");
  std::string text = models::to_json(small_config());
  text.replace(text.find("\"bias_rate\""), 11, "\"bias_rite\"");
  bad_file("unknown key 'bias_rite'", text.c_str());
}

TEST(ModelConfigs, CountWhatAModelHas) {
  for (const ModelConfig& config : {small_config(), full_config()}) {
    EXPECT_EQ(models::count(config).parameters, models::Model(config).num_parameters());
  }
  // The table of docs/models.md.
  const models::ModelCounts s = models::count(models::find_preset("s").model);
  EXPECT_NEAR(static_cast<double>(s.parameters) / 1e6, 82, 0.5);
  EXPECT_NEAR(static_cast<double>(s.active) / 1e6, 25.3, 0.1);
  // What a token keeps of a network of its router: in each layer, and one layer's gradient.
  ModelConfig linear = models::find_preset("smoke").model;
  ModelConfig network = linear;
  network.router = "top-k:network=mlp,width=1000";
  // Two iterations of one expert are the products of one pass of two, and have a gate more.
  ModelConfig chain = linear;
  chain.router = "chain:iterations=2";
  EXPECT_EQ(models::taken_top_k(chain), linear.top_k);
  EXPECT_EQ(models::layer_config(chain).router.top_k(), linear.top_k / 2);
  const std::int64_t gate = linear.layers * linear.experts * linear.hidden;
  EXPECT_EQ(models::count(chain).parameters, models::count(linear).parameters + gate);
  EXPECT_EQ(models::count(chain).active, models::count(linear).active + gate);
  EXPECT_EQ(models::Model(chain).num_parameters(), models::count(chain).parameters);
  // As many slots as tokens are one expert a token.
  ModelConfig soft = linear;
  soft.losses = {};
  soft.router = "soft-moe:slots=" + std::to_string(soft.sequence / soft.experts);
  ASSERT_EQ(soft.sequence % soft.experts, 0);
  EXPECT_EQ(models::experts_of_token(soft), 1);
  EXPECT_EQ(models::experts_of_token(linear), linear.top_k);
  EXPECT_EQ(models::taken_top_k(soft), std::nullopt);
  EXPECT_EQ(models::count(soft).parameters, models::Model(soft).num_parameters());
  const std::int64_t each = 3 * soft.hidden * soft.inner;
  EXPECT_EQ(models::count(soft).active - models::count(linear).active,
            soft.layers * (3 * soft.sequence * soft.hidden + each - linear.top_k * each) - gate);
  EXPECT_EQ(models::count(network).token_bytes - models::count(linear).token_bytes,
            4 * 1000 * (linear.layers + 1));
}

}  // namespace
}  // namespace switchyard::test
