#include "checkpoint/families/family.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <tuple>

#include "testkit/checkpoint_support.hpp"
#include "testkit/file_support.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using test::expect_weights;
using test::made;
using test::small_recipe;
using test::TempDir;

std::vector<std::string> every_name() {
  std::vector<std::string> names;
  for (const Family* family : families()) names.emplace_back(family->name);
  return names;
}

/// A checkpoint of a family on disk, and what its last layer was made from.
class EveryFamily : public ::testing::TestWithParam<std::tuple<std::string, DType, std::int32_t>> {
 protected:
  void SetUp() override {
    recipe = small_recipe(family, dtype);
    recipe.shards = std::get<2>(GetParam());
    make_checkpoint(recipe, dir.path());
    checkpoint.emplace(dir.path());
    layer = checkpoint->moe_layers().back();
    config = read_config(write_config(recipe), "config.json");
    for (MadeTensor& tensor : list_layer(recipe, config, layer)) {
      tensors[tensor.spec.name.substr(layer_prefix(config, layer).size())] = tensor;
    }
  }

  [[nodiscard]] const BlockNames& names() const { return config.family->names; }

  /// Matrices in tensors of their own, whose names begin as `prefix_of(expert)` says.
  template <typename Prefix>
  void expect_parts(const ExpertSource& source, const ExpertConfig& experts,
                    const Prefix& prefix_of) {
    expect_weights(source, experts, DType::kF32, [&](std::int32_t expert, ExpertPart part) {
      const MadeTensor& tensor =
          tensors.at(prefix_of(expert) + names().parts[static_cast<std::size_t>(part)] + ".weight");
      return [&tensor, cols = part_shape(experts, part)[1]](std::int64_t row, std::int64_t col) {
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
  ModelConfig config;
  std::map<std::string, MadeTensor> tensors;  ///< Of the layer, by the name after its prefix.
};

TEST_P(EveryFamily, TheConfigurationThatWasWrittenIsReadBack) {
  EXPECT_EQ(checkpoint->family(), family);
  EXPECT_EQ(checkpoint->num_layers(), 2);
  EXPECT_EQ(checkpoint->vocabulary(), 40);
  EXPECT_EQ(checkpoint->rms_norm_eps(), find_family(family).rms_norm_eps);
  const LayerConfig read = checkpoint->layer(layer).config;
  EXPECT_EQ(read.experts.num_experts, 8);
  EXPECT_EQ(read.router.zero_computation.copy, recipe.layer.router.zero_computation.copy);
  EXPECT_EQ(read.weight_on_input, recipe.layer.weight_on_input);
  EXPECT_EQ(read.router.num_experts, 8 + read.router.zero_computation.copy);
  EXPECT_EQ(read.router.top_k(), recipe.layer.router.top_k());
  EXPECT_EQ(read.router.as_top_k().score, recipe.layer.router.as_top_k().score);
  EXPECT_EQ(read.router.as_top_k().renormalize, recipe.layer.router.as_top_k().renormalize);
  EXPECT_EQ(read.router.as_top_k().scale, recipe.layer.router.as_top_k().scale);
  EXPECT_EQ(read.router.as_top_k().groups, recipe.layer.router.as_top_k().groups);
  EXPECT_EQ(read.router.as_top_k().top_groups, recipe.layer.router.as_top_k().top_groups);
  EXPECT_EQ(read.router.as_top_k().group_score, recipe.layer.router.as_top_k().group_score);
  EXPECT_EQ(read.experts.activation, recipe.layer.experts.activation);
  EXPECT_EQ(read.experts.bias, recipe.layer.experts.bias);
  EXPECT_EQ(read.shared.inner, recipe.layer.shared.inner);
  EXPECT_EQ(read.shared_gated, recipe.layer.shared_gated);
  EXPECT_NO_THROW(check(read));
}

TEST_P(EveryFamily, TheWeightsAreTheGenerators) {
  const LayerModel model = checkpoint->layer(layer);
  EXPECT_EQ(model.experts->dtype(), dtype);
  const MadeTensor& gate = tensors.at(names().router);
  const std::span<const float> values = model.gate.floats();
  const auto chosen_among = static_cast<std::size_t>(recipe.layer.router.num_experts);
  ASSERT_EQ(values.size(), chosen_among * 64U);
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(values[i], made(gate, 7, static_cast<std::int64_t>(i)));
  }
  EXPECT_EQ(model.selection_bias.size(), names().selection_bias != nullptr ? chosen_among : 0U);
  EXPECT_EQ(model.router_bias.size(), names().router_bias != nullptr ? chosen_among : 0U);
  EXPECT_EQ(model.shared_gate.size(), names().shared_gate != nullptr ? 64U : 0U);
  ASSERT_EQ(model.shared != nullptr, recipe.shared_experts > 0);
  if (names().stack == nullptr) {  // stacks have tests of their own
    expect_parts(*model.experts, model.config.experts, [&](std::int32_t expert) {
      return names().experts + std::to_string(expert) + ".";
    });
  }
  if (model.shared != nullptr && names().shared_stack == nullptr) {
    expect_parts(*model.shared, model.config.shared,
                 [&](std::int32_t) { return std::string(names().shared); });
  }
}

TEST_P(EveryFamily, TheEmbeddingAndTheNormAreTheGenerators) {
  const ModelNames& model = config.family->model;
  const auto norm = checkpoint->post_attention_norm(layer);
  ASSERT_EQ(norm.size(), model.norm != nullptr ? 64U : 0U);
  for (std::size_t i = 0; i < norm.size(); ++i) {
    const MadeTensor tensor = {{layer_prefix(config, layer) + model.norm, stored_type(dtype), {64}},
                               model.norm_offset == 0.0F ? Fill::kNorm : Fill::kBias};
    EXPECT_EQ(norm[i], model.norm_offset + made(tensor, 7, static_cast<std::int64_t>(i)));
    EXPECT_NEAR(norm[i], 1.0F, 0.26F);
  }
  const auto rows = checkpoint->embed({39, 0, 39});
  ASSERT_EQ(rows.size(), 3U * 64U);
  const MadeTensor embedding = {
      {config.stem + config.family->model.embedding, stored_type(dtype), {40, 64}},
      Fill::kWeight,
      1};
  for (std::int64_t i = 0; i < 64; ++i) {
    EXPECT_EQ(rows[static_cast<std::size_t>(i)], made(embedding, 7, 39 * 64 + i));
    EXPECT_EQ(rows[static_cast<std::size_t>(64 + i)], made(embedding, 7, i));
    EXPECT_EQ(rows[static_cast<std::size_t>(128 + i)], rows[static_cast<std::size_t>(i)]);
  }
  EXPECT_TRUE(checkpoint->embed({}).empty());
}

INSTANTIATE_TEST_SUITE_P(Checkpoint, EveryFamily,
                         ::testing::Combine(::testing::ValuesIn(every_name()),
                                            ::testing::Values(DType::kF32, DType::kBF16,
                                                              DType::kF16),
                                            ::testing::Values(1, 3)),
                         [](const auto& param) {
                           std::string name = std::get<0>(param.param);
                           std::replace_if(
                               name.begin(), name.end(),
                               [](char c) { return c == '-' || c == '.'; }, '_');
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
    const BlockNames& names = find_family(model.family).names;
    EXPECT_EQ(model.router_bias, names.router_bias != nullptr);
    EXPECT_EQ(model.selection_bias, names.selection_bias != nullptr);
  }
  const NamedModel& kimi = find_model("kimi-k2");
  EXPECT_EQ(kimi.layer.experts.num_experts, 384);
  EXPECT_EQ(kimi.layer.router.as_top_k().scale, 2.827F);
  expect_error(ErrorCode::kInvalidArgument, "model 'gpt-2' is not one of: mixtral-8x7b",
               [] { (void)find_model("gpt-2"); });
}

}  // namespace
}  // namespace switchyard
