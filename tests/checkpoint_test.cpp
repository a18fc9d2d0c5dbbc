#include "switchyard/checkpoint.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "checkpoint/expert_source.hpp"
#include "checkpoint/families/family.hpp"
#include "checkpoint/models.hpp"
#include "checkpoint/mxfp4.hpp"
#include "core/fp8.hpp"
#include "core/half.hpp"
#include "tests/file_support.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using test::TempDir;

constexpr LayerSizes kSmall = {
    .hidden = 64, .inner = 96, .num_experts = 8, .top_k = 3, .shared_experts = 0};

/// A small recipe of each family that uses what the family has.
CheckpointRecipe small_recipe(const std::string& family, DType dtype) {
  LayerSizes sizes = kSmall;
  if (family.starts_with("deepseek")) {
    sizes.shared_experts = 2;
    sizes.groups = 4;
    sizes.top_groups = 2;
  }
  if (family == "qwen2-moe") sizes.shared_experts = 1;
  CheckpointRecipe recipe = family_recipe(family, sizes);
  if (family.starts_with("deepseek")) recipe.layer.router.scale = 2.5F;
  recipe.num_layers = 2;
  recipe.vocabulary = 40;
  recipe.dtype = dtype;
  recipe.seed = 7;
  return recipe;
}

/// Element i of a tensor as the generator makes it, through the type it is stored in.
float made(const MadeTensor& tensor, std::uint64_t seed, std::int64_t i) {
  float value = 0.0F;
  make_elements(tensor, seed, i, 1, &value);
  return load_float(&value, *dtype_of(tensor.spec.type), 0);
}

/// Every matrix of every expert, whole or from its middle, has the value of
/// `expected(expert, part)(row, col)`.
template <typename Expected>
void expect_weights(const ExpertSource& source, const ExpertConfig& config, DType dtype,
                    const Expected& expected) {
  for (std::int32_t expert = 0; expert < config.num_experts; ++expert) {
    for (const ExpertPart part : {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown}) {
      const auto [rows, cols] = part_shape(config, part);
      const std::int64_t first = expert % 2 == 0 ? 0 : 5;
      const std::int64_t count = expert % 2 == 0 ? rows : rows - 7;
      std::vector<std::byte> out(static_cast<std::size_t>(count * cols * size_of(dtype)));
      source.read(expert, part, first, count, dtype, out.data());
      const auto value = expected(expert, part);
      for (std::int64_t i = 0; i < count * cols; ++i) {
        ASSERT_EQ(load_float(out.data(), dtype, i),
                  round_to(dtype, value(first + i / cols, i % cols)))
            << "expert " << expert << " row " << first + i / cols;
      }
    }
  }
}

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
  EXPECT_EQ(config.router.top_k, 3);
  EXPECT_EQ(config.router.score, recipe.layer.router.score);
  EXPECT_EQ(config.router.renormalize, recipe.layer.router.renormalize);
  EXPECT_EQ(config.router.scale, recipe.layer.router.scale);
  EXPECT_EQ(config.router.groups, recipe.layer.router.groups);
  EXPECT_EQ(config.router.top_groups, recipe.layer.router.top_groups);
  EXPECT_EQ(config.router.group_score, recipe.layer.router.group_score);
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
  ASSERT_EQ(model.gate.size(), 8U * 64U);
  for (std::size_t i = 0; i < model.gate.size(); ++i) {
    ASSERT_EQ(model.gate[i], made(gate, 7, static_cast<std::int64_t>(i)));
  }
  EXPECT_EQ(model.selection_bias.size(), family == "deepseek-v3" ? 8U : 0U);
  EXPECT_EQ(model.router_bias.size(), is_gpt_oss ? 8U : 0U);
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

// The stored bytes of gpt-oss, read here by the definition of the format.
TEST(GptOss, Mxfp4BlocksAreTwoValuesAByteTimesAPowerOfTwo) {
  const TempDir dir;
  make_checkpoint(small_recipe("gpt-oss", DType::kBF16), dir.path());
  const LayerModel model = Checkpoint(dir.path()).layer(1);
  EXPECT_EQ(model.config.router.score, Score::kTopkSoftmax);
  EXPECT_EQ(model.config.experts.activation, Activation::kClampedSwiglu);
  EXPECT_EQ(model.config.experts.limit, 7.0F);
  EXPECT_EQ(model.router_bias.size(), 8U);
  const SafetensorsFile file(dir / "model.safetensors");
  const auto bytes = [&](const char* name) {
    return reinterpret_cast<const std::uint8_t*>(
        file.find(std::string("model.layers.1.mlp.experts.") + name)->bytes.data());
  };
  static constexpr float kValues[] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  const auto expected = [&](std::int32_t expert, ExpertPart part) {
    const bool is_down = part == ExpertPart::kDown;
    const std::uint8_t* blocks = bytes(is_down ? "down_proj_blocks" : "gate_up_proj_blocks");
    const std::uint8_t* scales = bytes(is_down ? "down_proj_scales" : "gate_up_proj_scales");
    return [=](std::int64_t row, std::int64_t col) {
      const std::int64_t rows = is_down ? 64 : 192;
      const std::int64_t cols = is_down ? 96 : 64;
      const std::int64_t stored = is_down ? row : 2 * row + (part == ExpertPart::kUp ? 1 : 0);
      const std::int64_t at = (expert * rows + stored) * cols + col;
      const unsigned code = at % 2 == 0 ? blocks[at / 2] & 15U : blocks[at / 2] >> 4;
      return std::ldexp(kValues[code & 7U], scales[at / 32] - 127) *
             ((code & 8U) != 0 ? -1.0F : 1.0F);
    };
  };
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    expect_weights(*model.experts, model.config.experts, dtype, expected);
  }
}

TEST(GptOss, PlainWeightsAreTransposedAndInterleaved) {
  const TempDir dir;
  for (const DType stored : {DType::kF32, DType::kF16}) {
    make_checkpoint(small_recipe("gpt-oss", stored), dir.path());
    const LayerModel model = Checkpoint(dir.path()).layer(0);
    const SafetensorsFile file(dir / "model.safetensors");
    const auto element = [&](const char* name, std::int64_t i) {
      const std::string whole = std::string("model.layers.0.mlp.experts.") + name;
      return load_float(file.find(whole)->bytes.data(), stored, i);
    };
    const auto expected = [&](std::int32_t expert, ExpertPart part) {
      return [=](std::int64_t row, std::int64_t col) {
        if (part == ExpertPart::kDown) {
          return element("down_proj", (expert * 96 + col) * 64 + row);  // [E, I, H]
        }
        const std::int64_t stored_col = 2 * row + (part == ExpertPart::kUp ? 1 : 0);
        return element("gate_up_proj", (expert * 64 + col) * 192 + stored_col);  // [E, H, 2I]
      };
    };
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      expect_weights(*model.experts, model.config.experts, dtype, expected);
    }
    std::vector<float> gate(96);
    std::vector<float> up(96);
    std::vector<float> down(64);
    model.experts->read_bias(5, ExpertPart::kGate, gate.data());
    model.experts->read_bias(5, ExpertPart::kUp, up.data());
    model.experts->read_bias(5, ExpertPart::kDown, down.data());
    for (std::int64_t i = 0; i < 96; ++i) {
      EXPECT_EQ(gate[static_cast<std::size_t>(i)], element("gate_up_proj_bias", 5 * 192 + 2 * i));
      EXPECT_EQ(up[static_cast<std::size_t>(i)], element("gate_up_proj_bias", 5 * 192 + 2 * i + 1));
    }
    for (std::int64_t i = 0; i < 64; ++i) {
      EXPECT_EQ(down[static_cast<std::size_t>(i)], element("down_proj_bias", 5 * 64 + i));
    }
  }
}

TEST(DeepseekV3, Fp8WeightsAreMultipliedByTheFactorOfTheirBlock) {
  const TempDir dir;
  CheckpointRecipe recipe = small_recipe("deepseek-v3", DType::kF8E4M3);
  recipe.layer.experts.hidden = 200;  // blocks that are cut off on both sides
  recipe.layer.experts.inner = 136;
  make_checkpoint(recipe, dir.path());
  const LayerModel model = Checkpoint(dir.path()).layer(1);
  EXPECT_EQ(model.experts->dtype(), DType::kBF16);
  EXPECT_EQ(model.selection_bias.size(), 8U);
  const SafetensorsFile file(dir / "model.safetensors");
  const auto expected_of = [&](const std::string& block, std::int64_t inner) {
    return [&file, block, inner](std::int32_t expert, ExpertPart part) {
      const char* names[] = {"gate_proj", "up_proj", "down_proj"};
      std::string name = "model.layers.1.mlp." + block;
      if (block == "experts.") name += std::to_string(expert) + ".";
      name += std::string(names[static_cast<std::size_t>(part)]) + ".weight";
      const std::byte* codes = file.find(name)->bytes.data();
      const std::byte* scales = file.find(name + "_scale_inv")->bytes.data();
      const std::int64_t cols = part == ExpertPart::kDown ? inner : 200;
      return [=](std::int64_t row, std::int64_t col) {
        float scale = 0.0F;
        std::memcpy(&scale, scales + 4 * (row / 128 * ((cols + 127) / 128) + col / 128), 4);
        return e4m3_to_float(std::to_integer<std::uint8_t>(codes[row * cols + col])) * scale;
      };
    };
  };
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    expect_weights(*model.experts, model.config.experts, dtype, expected_of("experts.", 136));
    expect_weights(*model.shared, model.config.shared, dtype, expected_of("shared_experts.", 272));
  }
}

TEST(Mxfp4, TheSmallestAndLargestScalesAndNanAreExact) {
  for (int bits = 0; bits < 255; ++bits) {
    EXPECT_EQ(e8m0_to_float(static_cast<std::uint8_t>(bits)), std::ldexp(1.0F, bits - 127));
  }
  EXPECT_TRUE(std::isnan(e8m0_to_float(255)));
}

TEST(MakeCheckpoint, WeightsHaveTheScaleOfTheirFanIn) {
  const std::int64_t count = 1 << 16;
  for (const std::int64_t fan_in : {1, 64, 100, 2048, 14336}) {
    for (const auto& [fill, type] :
         {std::pair{Fill::kWeight, StoredType::kF32}, std::pair{Fill::kF8, StoredType::kF8E4M3}}) {
      const MadeTensor tensor = {{"t", type, {count}}, fill, fan_in};
      std::vector<float> values(static_cast<std::size_t>(count));
      make_elements(tensor, 3, 0, count, values.data());
      double sum = 0.0;
      double squares = 0.0;
      for (std::int64_t i = 0; i < count; ++i) {
        const double value =
            fill == Fill::kF8
                ? e4m3_to_float(reinterpret_cast<const std::uint8_t*>(values.data())[i])
                : values[static_cast<std::size_t>(i)];
        sum += value;
        squares += value * value;
      }
      const double deviation = std::sqrt(squares / static_cast<double>(count));
      const double unit = fill == Fill::kF8 ? 101.0 : 1.0 / std::sqrt(static_cast<double>(fan_in));
      EXPECT_GT(deviation, 0.55 * unit) << fan_in;
      EXPECT_LT(deviation, 1.2 * unit) << fan_in;
      EXPECT_LT(std::abs(sum / static_cast<double>(count)), 0.02 * unit) << fan_in;
    }
  }
}

std::uint64_t fnv1a(const std::string& bytes) {
  std::uint64_t value = 0xcbf29ce484222325U;
  for (const char c : bytes) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return value;
}

// The same bytes on every machine: whoever changes these numbers changes every checkpoint made.
TEST(MakeCheckpoint, TheBytesAreThoseOfTheOptionsAndTheSeed) {
  struct Pinned {
    const char* family;
    DType dtype;
    std::uint64_t hash;
  };
  const Pinned pinned[] = {{"mixtral", DType::kF32, 7009085536483461550U},
                           {"qwen3-moe", DType::kBF16, 4778432952012187993U},
                           {"olmoe", DType::kF16, 1588469408538271610U},
                           {"deepseek-v2", DType::kBF16, 4396706310245207097U},
                           {"deepseek-v3", DType::kF8E4M3, 13650012244379625470U},
                           {"gpt-oss", DType::kBF16, 2884236685115942130U}};
  const TempDir dir;
  for (const Pinned& one : pinned) {
    CheckpointRecipe recipe = small_recipe(one.family, one.dtype);
    make_checkpoint(recipe, dir.path());
    const std::string first = test::read_file(dir / "model.safetensors");
    EXPECT_EQ(fnv1a(first + test::read_file(dir / "config.json")), one.hash) << one.family;
    recipe.seed = 8;
    make_checkpoint(recipe, dir.path());
    EXPECT_NE(test::read_file(dir / "model.safetensors"), first);
  }
}

TEST(MakeCheckpoint, ShardsReplaceASingleFileAndTheOtherWayRound) {
  const TempDir dir;
  CheckpointRecipe recipe = small_recipe("mixtral", DType::kBF16);
  make_checkpoint(recipe, dir.path());
  const auto gate = Checkpoint(dir.path()).layer(0).gate;
  recipe.shards = 4;
  make_checkpoint(recipe, dir.path());
  EXPECT_FALSE(std::filesystem::exists(dir / "model.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(dir / "model-00004-of-00004.safetensors"));
  EXPECT_EQ(Checkpoint(dir.path()).layer(0).gate, gate);
  recipe.shards = 1;
  recipe.seed = 99;
  make_checkpoint(recipe, dir.path());
  EXPECT_NE(Checkpoint(dir.path()).layer(0).gate, gate);
}

TEST(MakeCheckpoint, MoreShardsThanTensorsAreReadBack) {
  const TempDir dir;
  CheckpointRecipe recipe = small_recipe("gpt-oss", DType::kF32);
  recipe.shards = 40;
  make_checkpoint(recipe, dir.path());
  EXPECT_EQ(Checkpoint(dir.path()).layer(1).router_bias.size(), 8U);
}

TEST(MakeCheckpoint, OptionsOutOfRangeOrBeyondTheFamilyAreRefused) {
  const TempDir dir;
  const auto refused = [&](const char* family, const char* words, const auto& change) {
    CheckpointRecipe recipe = small_recipe(family, DType::kBF16);
    change(recipe);
    expect_error(ErrorCode::kInvalidArgument, words,
                 [&] { make_checkpoint(recipe, dir.path() / "none"); });
    EXPECT_FALSE(std::filesystem::exists(dir.path() / "none"));
  };
  using R = CheckpointRecipe;
  refused("mixtral", "family 'gpt' is not one of: mixtral", [](R& r) { r.family = "gpt"; });
  refused("mixtral", "hidden=0", [](R& r) { r.layer.experts.hidden = 0; });
  refused("mixtral", "inner=-1", [](R& r) { r.layer.experts.inner = -1; });
  refused("mixtral", "top_k=9 is not a whole number from 1 to 8",
          [](R& r) { r.layer.router.top_k = 9; });
  refused("mixtral", "layers=0", [](R& r) { r.num_layers = 0; });
  refused("mixtral", "shards=0", [](R& r) { r.shards = 0; });
  refused("mixtral", "dtype fp8 of a mixtral checkpoint", [](R& r) { r.dtype = DType::kF8E4M3; });
  refused("mixtral", "dtype i32", [](R& r) { r.dtype = DType::kI32; });
  refused("mixtral", "cannot express this layer", [](R& r) { r.shared_experts = 1; });
  refused("mixtral", "cannot express this layer", [](R& r) { r.layer.router.renormalize = false; });
  refused("olmoe", "cannot express this layer", [](R& r) { r.layer.router.groups = 2; });
  refused("deepseek-v3", "n_group=3 does not divide n_routed_experts=8",
          [](R& r) { r.layer.router.groups = 3; });
  refused("gpt-oss", "multiples of 32", [](R& r) { r.layer.experts.hidden = 65; });
  test::write_file(dir / "file", "");
  expect_error(ErrorCode::kInvalidArgument, "cannot make the directory",
               [&] { make_checkpoint(small_recipe("olmoe", DType::kBF16), dir / "file"); });
}

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
  const auto gate = Checkpoint(dir.path()).layer(1).gate;
  EXPECT_EQ(Checkpoint(dir / "model.safetensors").layer(1).gate, gate);
  EXPECT_EQ(Checkpoint(dir / "config.json").layer(1).gate, gate);
  std::filesystem::rename(dir / "model.safetensors", dir / "other.safetensors");
  EXPECT_EQ(Checkpoint(dir / "other.safetensors").layer(1).gate, gate);
  recipe.shards = 2;
  make_checkpoint(recipe, dir.path());
  EXPECT_EQ(Checkpoint(dir / "model.safetensors.index.json").layer(1).gate, gate);
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
  bad("scoring_func", "softmax", "scoring_func='softmax' is not 'sigmoid'");
  bad("topk_method", "greedy", "topk_method='greedy' is not 'noaux_tc'");
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
  EXPECT_EQ(glm.layer.router.score, Score::kSigmoid);
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
  EXPECT_EQ(deepseek.layer.router.groups, 8);
  EXPECT_EQ(deepseek.layer.router.top_groups, 3);
  EXPECT_EQ(deepseek.layer.router.group_score, GroupScore::kMax);
  EXPECT_EQ(deepseek.layer.router.scale, 16.0F);
  EXPECT_EQ(deepseek.layer.shared.inner, 3072);
  Json greedy = Json::parse(v2);
  greedy["topk_method"] = "greedy";
  greedy["n_group"] = nullptr;
  greedy["norm_topk_prob"] = true;
  greedy["moe_layer_freq"] = 2;
  const ModelConfig other = read_config(greedy, "config.json");
  EXPECT_EQ(other.layer.router.groups, 1);
  EXPECT_TRUE(other.layer.router.renormalize);
  EXPECT_EQ(other.layer.router.scale, 1.0F);
  EXPECT_EQ(other.moe_layers.front(), 2);
  EXPECT_EQ(other.moe_layers.size(), 29U);
  // Qwen: some layers dense, by list and by step.
  const ModelConfig qwen =
      read_config(Json::parse(R"({"model_type":"qwen3_moe","hidden_size":2048,"num_hidden_layers":6,
        "moe_intermediate_size":768,"num_experts":128,"num_experts_per_tok":8,
        "norm_topk_prob":true,"decoder_sparse_step":2,"mlp_only_layers":[3],"vocab_size":9})"),
                  "config.json");
  EXPECT_EQ(qwen.moe_layers, (std::vector<std::int32_t>{1, 5}));
  EXPECT_TRUE(qwen.layer.router.renormalize);
  EXPECT_EQ(qwen.rms_norm_eps, 1e-6F);
  // gpt-oss in the spelling of its first release.
  const ModelConfig oss =
      read_config(Json::parse(R"({"model_type":"gpt_oss","hidden_size":2880,"num_hidden_layers":24,
        "intermediate_size":2880,"num_local_experts":32,"experts_per_token":4,
        "swiglu_limit":6.5,"hidden_act":"silu","rms_norm_eps":1e-05,"vocab_size":201088})"),
                  "config.json");
  EXPECT_EQ(oss.layer.router.top_k, 4);
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
    EXPECT_EQ(config.layer.router.scale, model.layer.router.scale) << model.name;
    EXPECT_EQ(config.layer.router.groups, model.layer.router.groups) << model.name;
    EXPECT_EQ(config.layer.router.score, model.layer.router.score) << model.name;
    EXPECT_EQ(config.layer.router.renormalize, model.layer.router.renormalize) << model.name;
    EXPECT_EQ(config.layer.shared.inner, model.layer.shared.inner) << model.name;
    const Family& family = find_family(model.family);
    EXPECT_EQ(model.router_bias, &family == &kGptOss);
    EXPECT_EQ(model.selection_bias,
              family.names != nullptr && family.names->selection_bias != nullptr);
  }
  const NamedModel& kimi = find_model("kimi-k2");
  EXPECT_EQ(kimi.layer.experts.num_experts, 384);
  EXPECT_EQ(kimi.layer.router.scale, 2.827F);
  expect_error(ErrorCode::kInvalidArgument, "model 'gpt-2' is not one of: mixtral-8x7b",
               [] { (void)find_model("gpt-2"); });
}

}  // namespace
}  // namespace switchyard
