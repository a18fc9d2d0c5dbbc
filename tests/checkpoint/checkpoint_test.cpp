#include "switchyard/checkpoint.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>

#include "checkpoint/files/json.hpp"
#include "testkit/checkpoint_support.hpp"
#include "testkit/file_support.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using test::small_recipe;
using test::TempDir;

TEST(Checkpoint, DenseLayersAndThoseOutOfRangeAreNamed) {
  const TempDir dir;
  CheckpointRecipe recipe = small_recipe("deepseek-v3", DType::kBF16);
  recipe.num_layers = 3;
  make_checkpoint(recipe, dir.path());
  const Checkpoint checkpoint(dir.path());
  EXPECT_EQ(checkpoint.moe_layers(), (std::vector<std::int32_t>{1, 2}));
  expect_error(ErrorCode::kInvalidArgument, "layer 0 is dense; its MoE layers are 1 to 2",
               [&] { (void)checkpoint.layer(0); });
  for (const std::int32_t layer : {-1, 3}) {
    expect_error(ErrorCode::kInvalidArgument, "of 3 layers; its MoE layers are 1 to 2",
                 [&] { (void)checkpoint.layer(layer); });
  }
  expect_error(ErrorCode::kInvalidArgument, "token id 40 of a vocabulary of 40", [&] {
    (void)checkpoint.embed({0, 40});
  });
}

TEST(Checkpoint, TheSourceOutlivesTheCheckpoint) {
  const TempDir dir;
  make_checkpoint(small_recipe("olmoe", DType::kF32), dir.path());
  const auto source = Checkpoint(dir.path()).layer(0).experts;
  std::filesystem::remove_all(dir.path());
  float value = 0.0F;
  std::vector<float> row(64);
  source->read(7, ExpertPart::kUp, 95, 1, DType::kF32, row.data());
  for (const float v : row) value += std::abs(v);
  EXPECT_GT(value, 0.0F);
  expect_error(ErrorCode::kInvalidArgument, "rows from 95, 2 of them",
               [&] { source->read(7, ExpertPart::kUp, 95, 2, DType::kF32, row.data()); });
  expect_error(ErrorCode::kInvalidArgument, "expert 8 of 8 experts",
               [&] { source->read(8, ExpertPart::kUp, 0, 1, DType::kF32, row.data()); });
  expect_error(ErrorCode::kInvalidArgument, "not as i32",
               [&] { source->read(0, ExpertPart::kUp, 0, 1, DType::kI32, row.data()); });
}

TEST(Checkpoint, AnyFileOfTheDirectoryStandsForIt) {
  const TempDir dir;
  CheckpointRecipe recipe = small_recipe("olmoe", DType::kBF16);
  make_checkpoint(recipe, dir.path());
  const auto gate = Checkpoint(dir.path()).layer(1).gate.widened();
  EXPECT_EQ(Checkpoint(dir / "model.safetensors").layer(1).gate.widened(), gate);
  EXPECT_EQ(Checkpoint(dir / "config.json").layer(1).gate.widened(), gate);
  std::filesystem::rename(dir / "model.safetensors", dir / "other.safetensors");
  EXPECT_EQ(Checkpoint(dir / "other.safetensors").layer(1).gate.widened(), gate);
  recipe.shards = 2;
  make_checkpoint(recipe, dir.path());
  EXPECT_EQ(Checkpoint(dir / "model.safetensors.index.json").layer(1).gate.widened(), gate);
}

class BadCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override { make_checkpoint(small_recipe("deepseek-v3", DType::kBF16), dir.path()); }

  void set(const char* key, const Json& value) {
    Json json = Json::parse(test::read_file(dir / "config.json"));
    json[key] = value;
    test::write_file(dir / "config.json", json.dump());
  }
  void expect_bad(const char* words) {
    expect_error(ErrorCode::kBadFile, words, [&] { (void)Checkpoint(dir.path()).layer(1); });
    make_checkpoint(small_recipe("deepseek-v3", DType::kBF16), dir.path());
  }

  TempDir dir;
};

TEST_F(BadCheckpoint, EveryBadConfigurationKeyIsNamed) {
  const auto bad = [&](const char* key, const Json& value, const char* words) {
    SCOPED_TRACE(key);
    set(key, value);
    expect_bad(words);
  };
  bad("model_type", "gpt2", "model_type='gpt2' is not one of: mixtral");
  bad("model_type", nullptr, "lacks 'model_type'");
  bad("model_type", 3, "model_type=3 is not a string");
  bad("model_type", "", "model_type='' is not one of");
  bad("hidden_size", nullptr, "lacks 'hidden_size'");
  bad("hidden_size", 0, "hidden_size=0 is not a whole number from 1");
  bad("hidden_size", 64.5, "hidden_size=64.5 is not a whole number");
  bad("hidden_size", "64", "hidden_size=\"64\" is not a whole number");
  bad("hidden_size", 18446744073709551615U, "hidden_size=18446744073709551615 is not");
  bad("num_hidden_layers", 100001, "num_hidden_layers=100001");
  bad("num_experts_per_tok", 9, "num_experts_per_tok=9 is not a whole number from 1 to 8");
  bad("num_experts_per_tok", nullptr, "lacks 'num_experts_per_tok'");
  bad("n_routed_experts", -4, "n_routed_experts=-4");
  bad("moe_intermediate_size", 1e300, "moe_intermediate_size=1e+300");
  bad("norm_topk_prob", 1, "norm_topk_prob=1 is not true or false");
  bad("routed_scaling_factor", "x", "routed_scaling_factor=\"x\" is not a number");
  bad("routed_scaling_factor", -1, "routed_scaling_factor=-1 is not a number >= 0");
  bad("rms_norm_eps", true, "rms_norm_eps=true is not a number");
  bad("hidden_act", "mish", "hidden_act='mish' is not known");
  bad("scoring_func", "softmax", R"(scoring_func="softmax": only "sigmoid" is supported here)");
  bad("topk_method", "greedy", R"(topk_method="greedy": only "noaux_tc" is supported here)");
  bad("topk_group", 5, "topk_group=5 is not a whole number from 1 to 4");
  bad("topk_group", 1, "num_experts_per_tok=3 exceeds the 2 experts of topk_group=1 groups");
  bad("first_k_dense_replace", 3, "first_k_dense_replace=3");
}

TEST_F(BadCheckpoint, MissingOrMisshapenTensorsAreNamed) {
  set("n_routed_experts", 16);
  expect_bad("tensor 'model.layers.1.mlp.gate.weight' has shape [8, 64], expected [16, 64]");
  set("moe_intermediate_size", 32);
  expect_bad("experts.0.gate_proj.weight' has shape [96, 64], expected [32, 64]");
  set("hidden_size", 32);
  expect_bad("tensor 'model.embed_tokens.weight' is BF16 [40, 64], expected");
  set("n_shared_experts", 1);
  expect_bad("shared_experts.gate_proj.weight' has shape [192, 64], expected [96, 64]");
  set("first_k_dense_replace", 0);
  expect_error(ErrorCode::kBadFile, "has no tensor 'model.layers.0.mlp.gate.weight'",
               [&] { (void)Checkpoint(dir.path()).layer(0); });
}

TEST_F(BadCheckpoint, MissingFilesAndBadIndicesAreNamed) {
  const auto index = dir / "model.safetensors.index.json";
  expect_error(ErrorCode::kBadFile, "no such file or directory", [&] { Checkpoint{dir / "none"}; });
  std::filesystem::remove(dir / "config.json");
  expect_bad("config.json: cannot be read: No such file");
  std::filesystem::remove(dir / "model.safetensors");
  expect_bad("model.safetensors: cannot be read: No such file");
  test::write_file(dir / "config.json", "{\"a\": 1, \"a\": 2}");
  expect_bad("config.json: duplicate key 'a'");
  test::write_file(dir / "config.json", "[]");
  expect_bad("config.json: is not a JSON object");
  const std::pair<const char*, const char*> bad_indices[] = {
      {"{}", "has no object 'weight_map'"},
      {"{\"weight_map\": []}", "has no object 'weight_map'"},
      {"{\"weight_map\": {\"a\": 1}}", "weight_map 'a' is not a file name"},
      {"{\"weight_map\": {\"a\": \"../x\"}}", "'../x' is not a plain file name"},
      {"{\"weight_map\": {\"a\": \"\"}}", "'' is not a plain file name"},
      {"{\"weight_map\": {\"a\": \"x\"}}", "cannot be read: No such file"},
      {"{\"weight_map\": {\"a\": \"model.safetensors\"}}", "has no tensor 'a', which"},
      {"{\"weight_map\": {\"a\": \"x\", \"a\": \"y\"}}", "duplicate key 'a'"}};
  for (const auto& [text, words] : bad_indices) {
    test::write_file(index, text);
    expect_bad(words);
  }
}

}  // namespace
}  // namespace switchyard
