#include "checkpoint/made/made_tensor.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "checkpoint/made/replacement.hpp"
#include "core/fp8.hpp"
#include "switchyard/checkpoint.hpp"
#include "testkit/checkpoint_support.hpp"
#include "testkit/file_support.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using test::small_recipe;
using test::TempDir;

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
                           {"qwen3-moe", DType::kF8E4M3, 5911178885303754716U},
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
  const auto gate = Checkpoint(dir.path()).layer(0).gate.widened();
  recipe.shards = 4;
  make_checkpoint(recipe, dir.path());
  EXPECT_FALSE(std::filesystem::exists(dir / "model.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(dir / "model-00004-of-00004.safetensors"));
  EXPECT_EQ(Checkpoint(dir.path()).layer(0).gate.widened(), gate);
  recipe.shards = 1;
  recipe.seed = 99;
  make_checkpoint(recipe, dir.path());
  EXPECT_NE(Checkpoint(dir.path()).layer(0).gate.widened(), gate);
}

TEST(MakeCheckpoint, AnOlderOneLeavesNoFileAndFilesOfOthersStay) {
  const TempDir dir;
  CheckpointRecipe recipe = small_recipe("mixtral", DType::kBF16);
  for (const char* other : {"tokenizer.json", "model-1-of-2.safetensors", ".model.1-2.tmp.x"}) {
    test::write_file(dir / other, "mine");
  }
  test::write_file(dir / ".model-00002-of-00009.safetensors.123-4.tmp", "of one that was killed");
  for (const auto& [shards, files] : {std::pair{7, 9}, {3, 5}, {1, 2}, {1000, 1002}, {2, 4}}) {
    recipe.shards = shards;
    make_checkpoint(recipe, dir.path());
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), files + 3);
    if (shards == 1000) continue;  // most of them are empty, so no tensor is in them
    EXPECT_EQ(Checkpoint(dir.path()).files().size(), static_cast<std::size_t>(files));
  }
  EXPECT_EQ(test::read_file(dir / "model-1-of-2.safetensors"), "mine");
}

TEST(MakeCheckpoint, OneThatFailsLeavesTheOlderOne) {
  const TempDir dir;
  CheckpointRecipe recipe = small_recipe("mixtral", DType::kBF16);
  make_checkpoint(recipe, dir.path());
  const auto gate = Checkpoint(dir.path()).layer(0).gate.widened();
  recipe.seed = 99;
  recipe.shards = 4;
  std::filesystem::create_directory(dir / "model-00003-of-00004.safetensors");
  expect_error(ErrorCode::kInvalidArgument, "not a regular file",
               [&] { make_checkpoint(recipe, dir.path()); });
  EXPECT_EQ(Checkpoint(dir.path()).layer(0).gate.widened(), gate);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 3);
}

TEST(MakeCheckpoint, OneBesideAnotherIsRefused) {
  const TempDir dir;
  const CheckpointRecipe recipe = small_recipe("mixtral", DType::kBF16);
  const CheckpointReplacement other(dir.path());
  expect_error(ErrorCode::kIo, "another process is writing a checkpoint",
               [&] { make_checkpoint(recipe, dir.path()); });
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(MakeCheckpoint, AReplacementThatIsCutShortIsNoCheckpoint) {
  const TempDir dir;
  CheckpointRecipe recipe = small_recipe("mixtral", DType::kBF16);
  recipe.shards = 3;
  make_checkpoint(recipe, dir.path());
  {
    CheckpointReplacement files(dir.path());
    files.add_text("config.json", "{}");
    files.add_text("model.safetensors", "{}");
    // Comes where a directory is by then: the renames end there.
    std::filesystem::create_directory(dir / "late");
    files.add_text("model-00001-of-00001.safetensors", "{}");
    std::filesystem::rename(dir / "late", dir / "model-00001-of-00001.safetensors");
    expect_error(ErrorCode::kIo, "rename", [&] { files.commit(); });
  }
  EXPECT_FALSE(std::filesystem::exists(dir / "config.json"));
  EXPECT_FALSE(std::filesystem::exists(dir / "model.safetensors.index.json"));
  EXPECT_THROW(Checkpoint{dir.path()}, Error);
}

TEST(MakeCheckpoint, MoreThanTheDiskHasRoomForIsRefusedBeforeAnythingIsWritten) {
  const TempDir dir;
  CheckpointRecipe recipe = small_recipe("mixtral", DType::kBF16);
  recipe.layer.experts.hidden = 1 << 26;
  recipe.layer.experts.inner = 1 << 26;
  recipe.num_layers = 10'000;
  expect_error(ErrorCode::kIo, "the checkpoint has 2.16e+03 EB, but",
               [&] { make_checkpoint(recipe, dir / "none/of/it"); });
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(MakeCheckpoint, MoreShardsThanTensorsAreReadBack) {
  const TempDir dir;
  CheckpointRecipe recipe = small_recipe("gpt-oss", DType::kF32);
  recipe.shards = 40;
  make_checkpoint(recipe, dir.path());
  EXPECT_EQ(Checkpoint(dir.path()).layer(1).router_bias.size(), 8);
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
          [](R& r) { r.layer.router.as_top_k().top_k = 9; });
  refused("mixtral", "layers=0", [](R& r) { r.num_layers = 0; });
  refused("mixtral", "shards=0", [](R& r) { r.shards = 0; });
  refused("mixtral", "dtype fp8 of a mixtral checkpoint", [](R& r) { r.dtype = DType::kF8E4M3; });
  refused("mixtral", "dtype i32", [](R& r) { r.dtype = DType::kI32; });
  refused("mixtral", "cannot express this layer: shared_experts=1, but it gives 0",
          [](R& r) { r.shared_experts = 1; });
  refused("mixtral", "cannot express this layer: renormalize=false, but it gives true",
          [](R& r) { r.layer.router.as_top_k().renormalize = false; });
  refused("olmoe", "cannot express this layer: groups=2, but it gives 1",
          [](R& r) { r.layer.router.as_top_k().groups = 2; });
  refused("deepseek-v3", "n_group=3 does not divide n_routed_experts=8",
          [](R& r) { r.layer.router.as_top_k().groups = 3; });
  refused("gpt-oss", "multiples of 32", [](R& r) { r.layer.experts.hidden = 65; });
  test::write_file(dir / "file", "");
  expect_error(ErrorCode::kInvalidArgument, "cannot make the directory",
               [&] { make_checkpoint(small_recipe("olmoe", DType::kBF16), dir / "file"); });
}

}  // namespace
}  // namespace switchyard
