// config.json of whole models: what is read, what is refused, and the angles of positions.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "checkpoint/files/mapped_file.hpp"
#include "models/released/config.hpp"
#include "testkit/expect_error.hpp"

namespace switchyard::test {
namespace {

using models::read_released_config;
using models::ReleasedConfig;
using models::RopeConfig;

const std::filesystem::path kFolder = std::filesystem::path(SWITCHYARD_TEST_DATA) / "whole_models";

Json config_of(const char* name) {
  return parse_json(read_text(kFolder / name / "config.json"), "config.json");
}

/// With these members; null takes one away.
ReleasedConfig changed(const char* name, const Json& members) {
  Json json = config_of(name);
  for (const auto& [key, value] : members.items()) {
    if (value.is_null()) json.erase(key);
    json[key] = value;
  }
  return read_released_config(json, "config.json");
}

TEST(ReleasedConfigs, SayWhatTheFamiliesMean) {
  const ReleasedConfig olmoe = changed("olmoe", {});
  EXPECT_EQ(olmoe.qk_norm, models::QkNorm::kWhole);
  EXPECT_TRUE(olmoe.bias && olmoe.out_bias);
  EXPECT_EQ(olmoe.clip, 1.5F);
  EXPECT_EQ(olmoe.windows, (std::vector<std::int64_t>{0, 0}));
  const ReleasedConfig qwen2 = changed("qwen2_moe", {});
  EXPECT_TRUE(qwen2.bias && !qwen2.out_bias);
  EXPECT_EQ(qwen2.windows, (std::vector<std::int64_t>{0, 6}));
  EXPECT_EQ(qwen2.dense_inner, 40);
  EXPECT_TRUE(changed("qwen3_moe", {}).tied);
  EXPECT_EQ(changed("qwen3_moe", {}).query_dim, 12);
  const ReleasedConfig gpt_oss = changed("gpt_oss", {});
  EXPECT_TRUE(gpt_oss.sinks);
  EXPECT_EQ(gpt_oss.windows, (std::vector<std::int64_t>{6, 0}));
  EXPECT_FALSE(gpt_oss.rope.truncate);
  const ReleasedConfig v3 = changed("deepseek_v3", {});
  EXPECT_EQ(v3.latent.query_rank, 16);
  EXPECT_TRUE(v3.rope.interleaved);
  EXPECT_EQ(v3.rope.dim, 8);
  EXPECT_EQ(changed("deepseek_v2_lite", {}).latent.query_rank, 0);
}

TEST(ReleasedConfigs, OfOlderReleasesAreReadToo) {
  // rope_theta and rope_scaling at the top; null where nothing is meant.
  const ReleasedConfig plain = changed(
      "mixtral", {{"rope_parameters", nullptr}, {"rope_theta", 5e5}, {"rope_scaling", nullptr}});
  EXPECT_EQ(plain.rope.theta, 5e5);
  EXPECT_EQ(plain.rope.kind, RopeConfig::Kind::kDefault);
  EXPECT_EQ(changed("mixtral", {{"rope_parameters", nullptr}}).rope.theta, 1e6);
  const ReleasedConfig stretched =
      changed("deepseek_v2", {{"rope_parameters", nullptr},
                              {"rope_theta", 1e4},
                              {"rope_scaling",
                               {{"type", "yarn"},
                                {"factor", 40},
                                {"mscale", 0.707},
                                {"mscale_all_dim", 0.707},
                                {"original_max_position_embeddings", 16}}}});
  EXPECT_EQ(stretched.rope.kind, RopeConfig::Kind::kYarn);
  EXPECT_EQ(stretched.rope.magnitude, 1);
  const double magnitude = 0.1 * 0.707 * std::log(40) + 1;
  EXPECT_NEAR(stretched.score_scale, magnitude * magnitude / 4, 1e-6);  // heads of 16
  // What gpt-oss has where its file says nothing.
  const RopeConfig released = changed("gpt_oss", {{"rope_parameters", nullptr}}).rope;
  EXPECT_EQ(released.factor, 32);
  EXPECT_EQ(released.original, 4096);
  EXPECT_EQ(released.theta, 1.5e5);
  EXPECT_EQ(changed("olmoe", {{"num_key_value_heads", nullptr}}).kv_heads, 4);
}

TEST(ReleasedConfigs, AreReadAsPublicModelsSpellThem) {
  const auto read = [](const char* text) {
    return read_released_config(parse_json(text, "config.json"), "config.json");
  };
  const ReleasedConfig qwen2 = read(R"({"model_type": "qwen2_moe", "hidden_act": "silu",
      "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "vocab_size": 151936,
      "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192,
      "max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": false,
      "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": false,
      "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "norm_topk_prob": false,
      "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4})");
  EXPECT_TRUE(qwen2.bias);
  EXPECT_EQ(qwen2.windows, std::vector<std::int64_t>(24));
  EXPECT_EQ(qwen2.rope.theta, 1e6);
  EXPECT_EQ(qwen2.query_dim, 128);
  const ReleasedConfig gpt_oss = read(R"({"model_type": "gpt_oss", "attention_bias": true,
      "experts_per_token": 4, "num_experts_per_tok": 4, "head_dim": 64, "hidden_act": "silu",
      "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
      "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 131072,
      "num_attention_heads": 64, "num_hidden_layers": 2, "num_key_value_heads": 8,
      "num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"},
      "rms_norm_eps": 1e-5, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
      "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
      "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
      "tie_word_embeddings": false, "vocab_size": 201088})");
  EXPECT_EQ(gpt_oss.windows, (std::vector<std::int64_t>{128, 0}));
  EXPECT_EQ(gpt_oss.rope.factor, 32);
  EXPECT_NEAR(gpt_oss.rope.magnitude, 0.1 * std::log(32) + 1, 1e-9);
  EXPECT_EQ(gpt_oss.query_dim, 64);
  const ReleasedConfig lite = read(R"({"model_type": "deepseek_v2", "attention_bias": false,
      "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "n_group": 1,
      "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
      "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 64,
      "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16,
      "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
      "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
      "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
      "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"},
      "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
      "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400})");
  EXPECT_EQ(lite.latent.query_rank, 0);
  EXPECT_EQ(lite.query_dim, 192);
  EXPECT_EQ(lite.value_dim, 128);
  EXPECT_EQ(lite.blocks.moe_layers.size(), 26U);
  EXPECT_EQ(lite.dense_inner, 10944);
}

TEST(ReleasedConfigs, WhatIsNotComputedIsRefusedByName) {
  const struct {
    const char* model;
    Json members;
    const char* word;
  } cases[] = {
      {"mixtral", {{"model_type", "phimoe"}}, "phimoe"},
      {"mixtral", {{"text_config", Json::object()}}, "text_config"},
      {"mixtral", {{"attention_bias", true}}, "attention_bias"},
      {"mixtral", {{"vocab_size", nullptr}}, "vocab_size"},
      {"mixtral", {{"max_position_embeddings", 0}}, "max_position_embeddings"},
      {"mixtral", {{"num_key_value_heads", 3}}, "num_key_value_heads"},
      {"mixtral", {{"num_attention_heads", 1 << 20}}, "num_attention_heads"},
      {"mixtral", {{"head_dim", 7}}, "turn pairs"},
      {"mixtral", {{"partial_rotary_factor", 0.5}}, "partial_rotary_factor"},
      {"mixtral", {{"layer_types", {"full_attention", "sliding_attention"}}}, "layer_types"},
      {"mixtral", {{"rope_scaling", {{"type", "linear"}, {"factor", 2}}}}, "differ"},
      {"olmoe", {{"sliding_window", 8}}, "sliding_window"},
      {"olmoe", {{"clip_qkv", 0}}, "clip_qkv"},
      {"olmoe", {{"rope_parameters", {{"rope_type", "llama3"}}}}, "llama3"},
      {"olmoe", {{"rope_parameters", {{"rope_type", "dynamic"}, {"factor", 2}}}}, "dynamic"},
      {"olmoe", {{"rope_parameters", {{"rope_type", "linear"}}}}, "factor"},
      {"olmoe", {{"rope_parameters", {{"mrope_section", {1, 2}}}}}, "mrope_section"},
      {"olmoe", {{"rope_parameters", {{"rope_theta", 0.5}}}}, "rope_theta"},
      {"olmoe", {{"rope_parameters", 3}}, "rope_parameters"},
      {"qwen2_moe", {{"layer_types", {"full_attention"}}}, "2 layers"},
      {"qwen2_moe", {{"layer_types", nullptr}}, "layer_types"},
      {"qwen2_moe", {{"layer_types", {"full_attention", "chunked_attention"}}}, "chunked"},
      {"qwen2_moe", {{"use_sliding_window", false}}, "use_sliding_window"},
      {"qwen2_moe", {{"intermediate_size", nullptr}}, "intermediate_size"},
      {"deepseek_v3", {{"num_key_value_heads", 2}}, "num_key_value_heads"},
      {"deepseek_v3", {{"kv_lora_rank", nullptr}}, "kv_lora_rank"},
      {"deepseek_v3", {{"qk_rope_head_dim", 3}}, "turn pairs"},
      {"deepseek_v3", {{"sliding_window", 4}}, "sliding_window"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.members.dump());
    expect_error(ErrorCode::kBadFile, {c.word}, [&] { (void)changed(c.model, c.members); });
  }
}

TEST(ReleasedRope, FrequenciesAreThoseOfTheFormulas) {
  RopeConfig config{.dim = 16, .theta = 1e4};
  const std::vector<float> plain = rope_frequencies(config);
  ASSERT_EQ(plain.size(), 8U);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_NEAR(plain[i], std::pow(1e4, -double(i) / 8), 1e-7);
  }
  config.kind = RopeConfig::Kind::kLinear;
  config.factor = 4;
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(rope_frequencies(config)[i], plain[i] / 4);
  // YaRN: pairs that turn `fast` times are left alone, those that turn less than `slow` stretched.
  config.kind = RopeConfig::Kind::kYarn;
  config.original = 64;
  config.fast = 4;
  config.slow = 1;
  config.truncate = false;
  const std::vector<float> yarn = rope_frequencies(config);
  for (std::size_t i = 0; i < 8; ++i) {
    const auto pair_of = [](double turns) {
      return 16 * std::log(64 / (turns * 2 * M_PI)) / (2 * std::log(1e4));
    };
    const double low = pair_of(4), high = pair_of(1);
    const double share = std::clamp((double(i) - low) / (high - low), 0.0, 1.0);
    const double frequency = std::pow(1e4, -double(i) / 8);
    EXPECT_NEAR(yarn[i], frequency * (1 - share) + frequency / 4 * share, 1e-7) << i;
  }
  EXPECT_EQ(yarn[0], plain[0]);
  EXPECT_NEAR(yarn[7], plain[7] / 4, 1e-9);
}

TEST(ReleasedRope, TurnsPairsInHalvesOrNeighbours) {
  RopeConfig config{.dim = 4, .theta = 100};
  const std::vector<float> frequencies = rope_frequencies(config);
  const models::RopeAngles angles = rope_angles(config, frequencies, 5, 3);
  const double a = 7, b = 7 * 0.1;  // position 5 + 2
  float halves[] = {1, 2, 3, 4};
  turn(config, angles, 2, halves);
  EXPECT_NEAR(halves[0], std::cos(a) - 3 * std::sin(a), 1e-5);
  EXPECT_NEAR(halves[2], 3 * std::cos(a) + std::sin(a), 1e-5);
  EXPECT_NEAR(halves[1], 2 * std::cos(b) - 4 * std::sin(b), 1e-5);
  config.interleaved = true;
  float neighbours[] = {1, 2, 3, 4};
  turn(config, angles, 2, neighbours);
  EXPECT_NEAR(neighbours[0], std::cos(a) - 2 * std::sin(a), 1e-5);
  EXPECT_NEAR(neighbours[3], 4 * std::cos(b) + 3 * std::sin(b), 1e-5);
}

}  // namespace
}  // namespace switchyard::test
