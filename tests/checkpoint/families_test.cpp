#include "checkpoint/families/family.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <span>

#include "testkit/checkpoint_support.hpp"
#include "testkit/file_support.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using test::expect_weights;
using test::made;
using test::small_recipe;
using test::TempDir;

/// A checkpoint of a family on disk, and what its last layer was made from.
class EveryFamily : public ::testing::TestWithParam<std::tuple<const char*, DType, std::int32_t>> {
 protected:
  void SetUp() override {
    recipe = small_recipe(family, dtype);
    recipe.shards = std::get<2>(GetParam());
    make_checkpoint(recipe, dir.path());
    checkpoint.emplace(dir.path());
    layer = checkpoint->moe_layers().back();
    for (MadeTensor& tensor : find_family(family).list(recipe, layer_prefix(layer))) {
      tensors[tensor.spec.name.substr(layer_prefix(layer).size())] = tensor;
    }
  }

  [[nodiscard]] std::string block() const {
    return family == "mixtral" ? "block_sparse_moe." : "mlp.";
  }

  /// Matrices in tensors of their own, whose names begin as `prefix_of(expert)` says.
  template <typename Prefix>
  void expect_parts(const ExpertSource& source, const ExpertConfig& config,
                    const Prefix& prefix_of) {
    const char* others[] = {"gate_proj", "up_proj", "down_proj"};
    const char* mixtral[] = {"w1", "w3", "w2"};
    const auto& names = family == "mixtral" ? mixtral : others;
    expect_weights(source, config, DType::kF32, [&](std::int32_t expert, ExpertPart part) {
      const MadeTensor& tensor =
          tensors.at(prefix_of(expert) + names[static_cast<std::size_t>(part)] + ".weight");
      return [&tensor, cols = part_shape(config, part)[1]](std::int64_t row, std::int64_t col) {
        return made(tensor, 7, row * cols + col);
      };
    });
  }

  std::string family = std::get<0>(GetParam());
  DType dtype = std::get<1>(GetParam());
  CheckpointRecipe recipe;
  TempDir dir;
  std::optional<Checkpoint> checkpoint;
  std::int32_t layer = 0;
  std::map<std::string, MadeTensor> tensors;  ///< Of the layer, by the name after its prefix.
};

TEST_P(EveryFamily, TheConfigurationThatWasWrittenIsReadBack) {
  EXPECT_EQ(checkpoint->family(), family);
  EXPECT_EQ(checkpoint->num_layers(), 2);
  EXPECT_EQ(checkpoint->vocabulary(), 40);
  EXPECT_EQ(checkpoint->rms_norm_eps(), find_family(family).rms_norm_eps);
  const LayerConfig config = checkpoint->layer(layer).config;
  EXPECT_EQ(config.router.num_experts, 8);
  EXPECT_EQ(config.router.top_k(), 3);
  EXPECT_EQ(config.router.as_top_k().score, recipe.layer.router.as_top_k().score);
  EXPECT_EQ(config.router.as_top_k().renormalize, recipe.layer.router.as_top_k().renormalize);
  EXPECT_EQ(config.router.as_top_k().scale, recipe.layer.router.as_top_k().scale);
  EXPECT_EQ(config.router.as_top_k().groups, recipe.layer.router.as_top_k().groups);
  EXPECT_EQ(config.router.as_top_k().top_groups, recipe.layer.router.as_top_k().top_groups);
  EXPECT_EQ(config.router.as_top_k().group_score, recipe.layer.router.as_top_k().group_score);
  EXPECT_EQ(config.experts.activation, recipe.layer.experts.activation);
  EXPECT_EQ(config.experts.bias, recipe.layer.experts.bias);
  EXPECT_EQ(config.shared.inner, recipe.layer.shared.inner);
  EXPECT_EQ(config.shared_gated, recipe.layer.shared_gated);
  EXPECT_NO_THROW(check(config));
}

TEST_P(EveryFamily, TheWeightsAreTheGenerators) {
  const LayerModel model = checkpoint->layer(layer);
  EXPECT_EQ(model.experts->dtype(), dtype);
  const bool is_gpt_oss = family == "gpt-oss";
  const MadeTensor& gate = tensors.at(block() + (is_gpt_oss ? "router.weight" : "gate.weight"));
  const std::span<const float> values = model.gate.floats();
  ASSERT_EQ(values.size(), 8U * 64U);
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(values[i], made(gate, 7, static_cast<std::int64_t>(i)));
  }
  EXPECT_EQ(model.selection_bias.size(), family == "deepseek-v3" ? 8 : 0);
  EXPECT_EQ(model.router_bias.size(), is_gpt_oss ? 8 : 0);
  EXPECT_EQ(model.shared_gate.size(), family == "qwen2-moe" ? 64U : 0U);
  ASSERT_EQ(model.shared != nullptr, recipe.shared_experts > 0);
  if (is_gpt_oss) return;  // its storage has tests of its own
  expect_parts(*model.experts, model.config.experts, [&](std::int32_t expert) {
    return block() + "experts." + std::to_string(expert) + ".";
  });
  if (model.shared != nullptr) {
    expect_parts(*model.shared, model.config.shared, [&](std::int32_t) {
      return block() + (family == "qwen2-moe" ? "shared_expert." : "shared_experts.");
    });
  }
}

TEST_P(EveryFamily, TheEmbeddingAndTheNormAreTheGenerators) {
  const auto norm = checkpoint->post_attention_norm(layer);
  ASSERT_EQ(norm.size(), 64U);
  const MadeTensor norm_tensor = {
      {layer_prefix(layer) + "post_attention_layernorm.weight", stored_type(dtype), {64}},
      Fill::kNorm};
  for (std::size_t i = 0; i < norm.size(); ++i) {
    EXPECT_EQ(norm[i], made(norm_tensor, 7, static_cast<std::int64_t>(i)));
    EXPECT_NEAR(norm[i], 1.0F, 0.13F);
  }
  const auto rows = checkpoint->embed({39, 0, 39});
  ASSERT_EQ(rows.size(), 3U * 64U);
  const MadeTensor embedding = {
      {"model.embed_tokens.weight", stored_type(dtype), {40, 64}}, Fill::kWeight, 1};
  for (std::int64_t i = 0; i < 64; ++i) {
    EXPECT_EQ(rows[static_cast<std::size_t>(i)], made(embedding, 7, 39 * 64 + i));
    EXPECT_EQ(rows[static_cast<std::size_t>(64 + i)], made(embedding, 7, i));
    EXPECT_EQ(rows[static_cast<std::size_t>(128 + i)], rows[static_cast<std::size_t>(i)]);
  }
  EXPECT_TRUE(checkpoint->embed({}).empty());
}

INSTANTIATE_TEST_SUITE_P(
    Checkpoint, EveryFamily,
    ::testing::Combine(::testing::Values("mixtral", "qwen3-moe", "qwen2-moe", "olmoe",
                                         "deepseek-v2", "deepseek-v3", "gpt-oss"),
                       ::testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                       ::testing::Values(1, 3)),
    [](const auto& param) {
      std::string name = std::get<0>(param.param);
      std::replace(name.begin(), name.end(), '-', '_');
      return name + "_" + to_string(std::get<1>(param.param)) +
             (std::get<2>(param.param) == 1 ? "_single" : "_sharded");
    });

TEST(Families, TheKeysOfThePublicConfigurationsAreRead) {
  // GLM-4.5: another model_type, no scoring_func.
  const ModelConfig glm =
      read_config(Json::parse(R"({"model_type":"glm4_moe","hidden_size":4096,"num_hidden_layers":46,
        "moe_intermediate_size":1408,"n_routed_experts":128,"n_shared_experts":1,
        "num_experts_per_tok":8,"n_group":1,"topk_group":1,"norm_topk_prob":true,
        "routed_scaling_factor":1.0,"first_k_dense_replace":1,"hidden_act":"silu",
        "rms_norm_eps":1e-05,"vocab_size":151552})"),
                  "config.json");
  EXPECT_EQ(glm.family->name, "deepseek-v3");
  EXPECT_EQ(glm.layer.router.as_top_k().score, Score::kSigmoid);
  EXPECT_EQ(glm.moe_layers.size(), 45U);
  EXPECT_EQ(glm.layer.shared.inner, 1408);
  EXPECT_EQ(glm.rms_norm_eps, 1e-5F);
  // DeepSeek-V2: every limit on the groups, and a scale where nothing is renormalised.
  const char* v2 = R"({"model_type":"deepseek_v2","hidden_size":5120,"num_hidden_layers":60,
        "moe_intermediate_size":1536,"n_routed_experts":160,"n_shared_experts":2,
        "num_experts_per_tok":6,"n_group":8,"topk_group":3,"topk_method":"group_limited_greedy",
        "norm_topk_prob":false,"routed_scaling_factor":16.0,"first_k_dense_replace":1,
        "moe_layer_freq":1,"scoring_func":"softmax","rms_norm_eps":1e-06,"vocab_size":102400})";
  const ModelConfig deepseek = read_config(Json::parse(v2), "config.json");
  EXPECT_EQ(deepseek.layer.router.as_top_k().groups, 8);
  EXPECT_EQ(deepseek.layer.router.as_top_k().top_groups, 3);
  EXPECT_EQ(deepseek.layer.router.as_top_k().group_score, GroupScore::kMax);
  EXPECT_EQ(deepseek.layer.router.as_top_k().scale, 16.0F);
  EXPECT_EQ(deepseek.layer.shared.inner, 3072);
  Json greedy = Json::parse(v2);
  greedy["topk_method"] = "greedy";
  greedy["n_group"] = nullptr;
  greedy["norm_topk_prob"] = true;
  greedy["moe_layer_freq"] = 2;
  const ModelConfig other = read_config(greedy, "config.json");
  EXPECT_EQ(other.layer.router.as_top_k().groups, 1);
  EXPECT_TRUE(other.layer.router.as_top_k().renormalize);
  EXPECT_EQ(other.layer.router.as_top_k().scale, 1.0F);
  EXPECT_EQ(other.moe_layers.front(), 2);
  EXPECT_EQ(other.moe_layers.size(), 29U);
  // Qwen: some layers dense, by list and by step.
  const ModelConfig qwen =
      read_config(Json::parse(R"({"model_type":"qwen3_moe","hidden_size":2048,"num_hidden_layers":6,
        "moe_intermediate_size":768,"num_experts":128,"num_experts_per_tok":8,
        "norm_topk_prob":true,"decoder_sparse_step":2,"mlp_only_layers":[3],"vocab_size":9})"),
                  "config.json");
  EXPECT_EQ(qwen.moe_layers, (std::vector<std::int32_t>{1, 5}));
  EXPECT_TRUE(qwen.layer.router.as_top_k().renormalize);
  EXPECT_EQ(qwen.rms_norm_eps, 1e-6F);
  // gpt-oss in the spelling of its first release.
  const ModelConfig oss =
      read_config(Json::parse(R"({"model_type":"gpt_oss","hidden_size":2880,"num_hidden_layers":24,
        "intermediate_size":2880,"num_local_experts":32,"experts_per_token":4,
        "swiglu_limit":6.5,"hidden_act":"silu","rms_norm_eps":1e-05,"vocab_size":201088})"),
                  "config.json");
  EXPECT_EQ(oss.layer.router.top_k(), 4);
  EXPECT_EQ(oss.layer.experts.limit, 6.5F);
  EXPECT_EQ(oss.layer.experts.alpha, 1.702F);
  EXPECT_TRUE(oss.layer.experts.bias);
}

TEST(Models, EveryNamedModelCanBeExpressedByItsFamily) {
  EXPECT_EQ(named_models().size(), 11U);
  for (const NamedModel& model : named_models()) {
    CheckpointRecipe recipe = model_recipe(model);
    const ModelConfig config = read_config(write_config(recipe), "config.json");
    EXPECT_EQ(config.layer.router.num_experts, model.layer.router.num_experts) << model.name;
    EXPECT_EQ(config.layer.router.as_top_k().scale, model.layer.router.as_top_k().scale)
        << model.name;
    EXPECT_EQ(config.layer.router.as_top_k().groups, model.layer.router.as_top_k().groups)
        << model.name;
    EXPECT_EQ(config.layer.router.as_top_k().score, model.layer.router.as_top_k().score)
        << model.name;
    EXPECT_EQ(config.layer.router.as_top_k().renormalize, model.layer.router.as_top_k().renormalize)
        << model.name;
    EXPECT_EQ(config.layer.shared.inner, model.layer.shared.inner) << model.name;
    const Family& family = find_family(model.family);
    EXPECT_EQ(model.router_bias, &family == &kGptOss);
    EXPECT_EQ(model.selection_bias,
              family.names != nullptr && family.names->selection_bias != nullptr);
  }
  const NamedModel& kimi = find_model("kimi-k2");
  EXPECT_EQ(kimi.layer.experts.num_experts, 384);
  EXPECT_EQ(kimi.layer.router.as_top_k().scale, 2.827F);
  expect_error(ErrorCode::kInvalidArgument, "model 'gpt-2' is not one of: mixtral-8x7b",
               [] { (void)find_model("gpt-2"); });
}

}  // namespace
}  // namespace switchyard
