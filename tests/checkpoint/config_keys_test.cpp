#include "checkpoint/config_keys.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <set>

#include "checkpoint/files/json.hpp"
#include "testkit/checkpoint_support.hpp"
#include "testkit/file_support.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using test::small_recipe;

Json config_of(const char* family) { return write_config(small_recipe(family, DType::kF32)); }

ModelConfig read(const Json& json) { return read_config(json, "config.json"); }

void expect_refused(const Json& json, const std::string& words) {
  expect_error(ErrorCode::kBadFile, words.c_str(), [&] { (void)read(json); });
}

TEST(ConfigKeys, EveryNameOfAKeyIsReadInEveryFamily) {
  for (const Family* family : families()) {
    const Json written = write_config(small_recipe(std::string(family->name), DType::kF32));
    const LayerConfig expected = read(written).layer;
    for (const auto& [key, value] : written.items()) {
      for (const std::string_view name : spellings_of(key)) {
        SCOPED_TRACE(std::string(family->name) + " " + std::string(name));
        Json json = written;
        json.erase(key);
        json[std::string(name)] = value;
        const ModelConfig config = read(json);
        EXPECT_EQ(config.layer.experts.num_experts, expected.experts.num_experts);
        EXPECT_EQ(config.layer.experts.inner, expected.experts.inner);
        EXPECT_EQ(config.layer.experts.hidden, expected.experts.hidden);
        EXPECT_EQ(config.layer.shared.inner, expected.shared.inner);
        EXPECT_EQ(config.layer.router.top_k(), expected.router.top_k());
        EXPECT_EQ(config.layer.router.as_top_k().renormalize,
                  expected.router.as_top_k().renormalize);
        EXPECT_EQ(config.layer.router.as_top_k().scale, expected.router.as_top_k().scale);
        EXPECT_EQ(config.rms_norm_eps, family->rms_norm_eps);
      }
    }
  }
}

TEST(ConfigKeys, ATypeThatIsNoneIsRefusedWithAllThatAreRead) {
  Json json = config_of("mixtral");
  json["model_type"] = "unheard-of";
  for (const Family* family : families()) {
    for (const std::string_view type : family->model_types) {
      if (!type.empty()) expect_refused(json, std::string(" ").append(type));
    }
  }
}

TEST(ConfigKeys, NoNameStandsForTwoKeys) {
  std::set<std::string_view> names;
  for (const char* key :
       {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
        "shared_expert_intermediate_size", "norm_topk_prob", "routed_scaling_factor",
        "scoring_func", "first_k_dense_replace", "hidden_act", "rms_norm_eps", "hidden_size"}) {
    EXPECT_GT(spellings_of(key).size(), 1U) << key;
    for (const std::string_view name : spellings_of(key)) EXPECT_TRUE(names.insert(name).second);
  }
  EXPECT_TRUE(spellings_of("intermediate_size").empty());
}

TEST(ConfigKeys, TwoNamesThatDisagreeAreRefused) {
  Json json = config_of("qwen3-moe");
  json["num_local_experts"] = 8;
  EXPECT_EQ(read(json).layer.experts.num_experts, 8);
  json["num_local_experts"] = 16;
  expect_refused(json, "num_experts=8 and num_local_experts=16 mean the same and differ");
  json["num_experts"] = nullptr;
  EXPECT_EQ(read(json).layer.experts.num_experts, 16);
  json.erase("num_local_experts");
  expect_refused(json, "lacks 'num_experts' (also: num_local_experts, n_routed_experts");
}

TEST(ConfigKeys, WhatABlockWouldComputeOtherwiseIsRefusedByItsName) {
  for (const Family* family : families()) {
    const Json written = write_config(small_recipe(std::string(family->name), DType::kF32));
    for (const FixedKey& fixed : family->config.fixed) {
      SCOPED_TRACE(std::string(family->name) + " " + std::string(fixed.key));
      Json json = written;
      json[std::string(fixed.key)] = Json::parse(fixed.value);
      EXPECT_NO_THROW((void)read(json));
      json[std::string(fixed.key)] = "another";
      expect_refused(json, std::string(fixed.key) + "=\"another\": only " +
                               std::string(fixed.value) + " is supported here");
    }
  }
}

TEST(ConfigKeys, GptOssTakesAlphaAndLimitOfItsActivation) {
  Json json = config_of("gpt-oss");
  EXPECT_EQ(read(json).layer.experts.alpha, 1.702F);
  json["swiglu_alpha"] = 1.25;
  json["swiglu_limit"] = 3.5;
  EXPECT_EQ(read(json).layer.experts.alpha, 1.25F);
  EXPECT_EQ(read(json).layer.experts.limit, 3.5F);
  CheckpointRecipe recipe = small_recipe("gpt-oss", DType::kF32);
  recipe.layer.experts.alpha = 1.25F;
  EXPECT_EQ(read(write_config(recipe)).layer.experts.alpha, 1.25F);
}

TEST(ConfigKeys, LayersAreDenseByTypeByListAndByRange) {
  using Layers = std::vector<std::int32_t>;
  Json json = config_of("mimo-v2-flash");
  json["num_hidden_layers"] = 4;
  json["mlp_layer_types"] = {"dense", "sparse", "dense", "sparse"};
  EXPECT_EQ(read(json).moe_layers, (Layers{1, 3}));
  json["mlp_layer_types"] = {"dense", "sparse", "moe", "sparse"};
  expect_refused(json, "mlp_layer_types: 'moe' is not dense or sparse");
  json["mlp_layer_types"] = {"dense", "sparse"};
  expect_refused(json, "mlp_layer_types has 2 entries for 4 layers");
  json.erase("mlp_layer_types");
  json["moe_layer_freq"] = {0, 0, 1, 1};
  EXPECT_EQ(read(json).moe_layers, (Layers{2, 3}));
  json.erase("moe_layer_freq");
  EXPECT_EQ(read(json).moe_layers, (Layers{1, 2, 3}));

  Json ernie = config_of("ernie4.5-moe");
  ernie["num_hidden_layers"] = 6;
  ernie["moe_layer_start_index"] = 2;
  ernie["moe_layer_end_index"] = -1;
  EXPECT_EQ(read(ernie).moe_layers, (Layers{2, 3, 4, 5}));
  ernie["moe_layer_end_index"] = 4;
  ernie["moe_layer_interval"] = 2;
  EXPECT_EQ(read(ernie).moe_layers, (Layers{3}));
}

TEST(ConfigKeys, ANumberForEachLayerIsReadWhereLayersAreAlike) {
  Json json = config_of("hunyuan-v1-moe");
  json["moe_topk"] = {3, 3};
  json["num_shared_expert"] = {1, 1};
  json["moe_intermediate_size"] = {96, 96};
  EXPECT_EQ(read(json).layer.router.top_k(), 3);
  json["moe_topk"] = {3, 2};
  expect_refused(json, "moe_topk=[3,2] differs from layer to layer");
  json["moe_topk"] = 3;
  json["num_shared_expert"] = {2, 2};
  expect_refused(json, "num_shared_expert=2: only 1 is supported here");
  json["num_shared_expert"] = 1;
  json["moe_intermediate_size"] = 48;
  expect_refused(json, "moe_intermediate_size=48: only that of intermediate_size=96");
}

TEST(ConfigKeys, AFloorUnderTheSumOfWeightsIsReadWhereItIsNeverReached) {
  Json json = config_of("ernie4.5-moe");
  json["moe_norm_min"] = 0.25;
  EXPECT_NO_THROW((void)read(json));
  json["moe_norm_min"] = 0.5;  // above 3 of 8
  expect_refused(json, "moe_norm_min=0.5: only floors that are never reached");
}

TEST(ConfigKeys, PhimoeMixesTwoExpertsWithTheMarginOfItsRelease) {
  Json json = config_of("phimoe");
  EXPECT_EQ(read(json).layer.router.as_top_k().score, Score::kSparseMixer);
  json["router_jitter_noise"] = 0.1;
  expect_refused(json, "router_jitter_noise=0.1: only 0.01 is supported here");
  json["router_jitter_noise"] = 0.01;
  json["num_experts_per_tok"] = 3;
  expect_refused(json, "num_experts_per_tok=3: only 2 is supported here");
}

TEST(ConfigKeys, Llama4HasOneExpertATokenInLayersThatAreListedOrInterleaved) {
  using Layers = std::vector<std::int32_t>;
  Json json = config_of("llama4");
  EXPECT_TRUE(read(json).layer.weight_on_input);
  EXPECT_EQ(read(json).layer.shared.inner, 96);
  EXPECT_EQ(read(json).moe_layers, Layers{1});
  json["num_hidden_layers"] = 5;
  json["moe_layers"] = {3, 0};
  EXPECT_EQ(read(json).moe_layers, (Layers{0, 3}));
  json["moe_layers"] = {1, 5};
  expect_refused(json, "moe_layers has 5, which is no layer of 5");
  json["moe_layers"] = nullptr;
  json["interleave_moe_layer_step"] = 2;
  EXPECT_EQ(read(json).moe_layers, (Layers{1, 3}));
  json.erase("moe_layers");
  json.erase("interleave_moe_layer_step");
  EXPECT_EQ(read(json).moe_layers.size(), 5U);
  const Json outer = {{"model_type", "llama4"}, {"text_config", json}};
  EXPECT_EQ(read(outer).family->name, "llama4");
  json["num_experts_per_tok"] = 2;
  expect_refused(json, "num_experts_per_tok=2: only 1 is supported here");
}

TEST(ConfigKeys, LongcatFlashHasExpertsThatReturnTheirInput) {
  Json json = config_of("longcat-flash");
  EXPECT_EQ(read(json).layer.router.zero_computation.copy, 4);
  EXPECT_EQ(read(json).layer.router.num_experts, 12);
  json["moe_topk"] = 12;
  EXPECT_EQ(read(json).layer.router.top_k(), 12);
  json["num_hidden_layers"] = 2 * read(json).num_layers;  // it counts attentions
  EXPECT_EQ(read(json).num_layers, 2);
  json["zero_expert_num"] = nullptr;  // means 0 to its code, which has 256 where there is no key
  json["moe_topk"] = 3;
  EXPECT_EQ(read(json).layer.router.zero_computation.copy, 0);
  EXPECT_EQ(read(json).layer.router.num_experts, 8);
  json.erase("zero_expert_num");
  EXPECT_EQ(read(json).layer.router.zero_computation.copy, 256);
}

TEST(ConfigKeys, DbrxIsReadFromItsSectionAndSaysWhetherItRenormalizes) {
  Json json = config_of("dbrx");
  EXPECT_EQ(read(json).layer.experts.inner, 96);
  EXPECT_TRUE(read(json).layer.router.as_top_k().renormalize);
  json["ffn_config"].erase("moe_normalize_expert_weights");
  EXPECT_TRUE(read(json).layer.router.as_top_k().renormalize);
  json["ffn_config"]["moe_normalize_expert_weights"] = nullptr;
  EXPECT_FALSE(read(json).layer.router.as_top_k().renormalize);
  json["ffn_config"]["moe_normalize_expert_weights"] = 2.0;
  expect_refused(json, "moe_normalize_expert_weights=2.0: only 1 is supported here");
  json["ffn_config"] = 3;
  expect_refused(json, "ffn_config=3 is not an object");
}

TEST(ConfigKeys, ATextModelWithinAnotherIsRead) {
  const Json outer = {{"model_type", "qwen3_vl_moe"}, {"text_config", config_of("qwen3-vl-moe")}};
  EXPECT_EQ(read(outer).family->name, "qwen3-vl-moe");
  EXPECT_TRUE(read(outer).nested);
  expect_refused({{"model_type", "qwen3_vl_moe"}, {"text_config", 1}},
                 "text_config=1 is not an object");
}

TEST(StackedExperts, AreReadWhereAFamilyUsuallyHasATensorEach) {
  const test::TempDir dir;
  const ExpertConfig experts = {.num_experts = 2, .hidden = 4, .inner = 3};
  const auto value = [](std::int32_t expert, ExpertPart part, std::int64_t row, std::int64_t col) {
    return static_cast<float>(1000 * expert + 100 * static_cast<int>(part) + 10 * row + col);
  };
  for (const bool transposed : {false, true}) {
    const auto stack = [&](std::vector<std::pair<ExpertPart, std::int64_t>> parts,
                           std::int64_t cols) {
      std::int64_t rows = 0;
      for (const auto& [part, count] : parts) rows += count;
      std::vector<float> values(static_cast<std::size_t>(2 * rows * cols));
      for (std::int32_t expert = 0; expert < 2; ++expert) {
        std::int64_t before = 0;
        for (const auto& [part, count] : parts) {
          for (std::int64_t i = 0; i < count * cols; ++i) {
            const std::int64_t row = before + i / cols;
            const std::int64_t at = transposed ? i % cols * rows + row : row * cols + i % cols;
            values[static_cast<std::size_t>(expert * rows * cols + at)] =
                value(expert, part, i / cols, i % cols);
          }
          before += count;
        }
      }
      return values;
    };
    const auto gate_up = stack({{ExpertPart::kGate, 3}, {ExpertPart::kUp, 3}}, 4);
    const auto down = stack({{ExpertPart::kDown, 4}}, 3);
    std::vector<StoredTensor> tensors;
    const auto add = [&](const char* name, std::vector<std::int64_t> shape,
                         const std::vector<float>& values) {
      tensors.push_back(
          {{name, StoredType::kF32, std::move(shape)}, std::as_bytes(std::span(values))});
    };
    const std::vector<std::int64_t> wide = {2, 4, 6};
    const std::vector<std::int64_t> tall = {2, 6, 4};
    add("gate_up", transposed ? wide : tall, gate_up);
    add("down",
        transposed ? std::vector<std::int64_t>{2, 3, 4} : std::vector<std::int64_t>{2, 4, 3}, down);
    const std::vector<float> down_of_one(down.begin(), down.begin() + 12);
    add("down_of_one",
        transposed ? std::vector<std::int64_t>{1, 3, 4} : std::vector<std::int64_t>{1, 4, 3},
        down_of_one);
    write_safetensors(dir / "f.safetensors", tensors);
    // A third expert without weights, of which the first stack has rows, is not looked at.
    const ExpertConfig one = {.num_experts = 1, .hidden = 4, .inner = 3};
    const StackedNames stacks = {.gate = "gate_up", .down = "down_of_one", .weightless = 1};
    EXPECT_NE(make_stacked_source(TensorSet::open_file(dir / "f.safetensors"), one, stacks),
              nullptr);
    test::expect_error(ErrorCode::kBadFile, "tensor 'gate_up' has shape [2,", [&] {
      StackedNames none = stacks;
      none.weightless = 0;
      (void)make_stacked_source(TensorSet::open_file(dir / "f.safetensors"), one, none);
    });
    const auto source = make_stacked_source(TensorSet::open_file(dir / "f.safetensors"), experts,
                                            {.gate = "gate_up", .down = "down"});
    for (const ExpertPart part : {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown}) {
      const auto [rows, cols] = part_shape(experts, part);
      for (std::int64_t first = 0; first < rows; ++first) {
        std::vector<float> out(static_cast<std::size_t>((rows - first) * cols));
        source->will_read(1, part, first, rows - first);
        source->read(1, part, first, rows - first, DType::kF32, out.data());
        source->done_with(1, part, first, rows - first);
        for (std::int64_t i = 0; i < (rows - first) * cols; ++i) {
          ASSERT_EQ(out[static_cast<std::size_t>(i)], value(1, part, first + i / cols, i % cols));
        }
      }
    }
  }
}

}  // namespace
}  // namespace switchyard
