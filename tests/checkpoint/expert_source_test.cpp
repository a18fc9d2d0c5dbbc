#include "checkpoint/sources/expert_source.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>
#include <utility>

#include "core/fp8.hpp"
#include "core/mxfp4.hpp"
#include "switchyard/checkpoint.hpp"
#include "testkit/checkpoint_support.hpp"
#include "testkit/file_support.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using test::expect_weights;
using test::small_recipe;
using test::TempDir;

// The stored bytes of gpt-oss, read here by the definition of the format.
TEST(GptOss, Mxfp4BlocksAreTwoValuesAByteTimesAPowerOfTwo) {
  const TempDir dir;
  make_checkpoint(small_recipe("gpt-oss", DType::kBF16), dir.path());
  const LayerModel model = Checkpoint(dir.path()).layer(1);
  EXPECT_EQ(model.config.router.as_top_k().score, Score::kTopkSoftmax);
  EXPECT_EQ(model.config.experts.activation, Activation::kClampedSwiglu);
  EXPECT_EQ(model.config.experts.limit, 7.0F);
  EXPECT_EQ(model.router_bias.size(), 8);
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
  EXPECT_EQ(model.selection_bias.size(), 8);
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

/// Some rows of a part as read_stored() gives them.
struct Stored {
  StoredLayout layout;
  std::vector<std::byte> values, scales;

  Stored(const ExpertSource& source, const ExpertConfig& config, std::int32_t expert,
         ExpertPart part, std::int64_t first, std::int64_t count)
      : layout{.format = source.stored_format(),
               .dtype = source.dtype(),
               .rows = count,
               .cols = part_shape(config, part)[1]},
        values(static_cast<std::size_t>(layout.value_bytes())),
        scales(static_cast<std::size_t>(layout.scale_bytes())) {
    source.read_stored(expert, part, first, count, {values.data(), scales.data()});
  }
};

constexpr ExpertPart kParts[] = {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown};

CheckpointRecipe cut_off_blocks() {
  CheckpointRecipe recipe = small_recipe("deepseek-v3", DType::kF8E4M3);
  recipe.layer.experts.hidden = 200;
  recipe.layer.experts.inner = 136;
  return recipe;
}

TEST(StoredRows, OfFp8AreTheFilesBytesAndTheScalesOfTheirBlocks) {
  const TempDir dir;
  make_checkpoint(cut_off_blocks(), dir.path());
  const LayerModel model = Checkpoint(dir.path()).layer(1);
  const SafetensorsFile file(dir / "model.safetensors");
  const char* names[] = {"gate_proj", "up_proj", "down_proj"};
  ASSERT_EQ(model.experts->stored_format(), WeightFormat::kE4M3);
  for (const ExpertPart part : kParts) {
    const auto [rows, cols] = part_shape(model.config.experts, part);
    const std::string name = std::string("model.layers.1.mlp.experts.3.") +
                             names[static_cast<std::size_t>(part)] + ".weight";
    const auto codes = file.find(name)->bytes;
    const auto scales = file.find(name + "_scale_inv")->bytes;
    const auto bytes_of = [](std::span<const std::byte> bytes) {
      return std::vector<std::byte>(bytes.begin(), bytes.end());
    };
    // Whole, a shard that ends within a block, and one of the rest.
    const Stored all(*model.experts, model.config.experts, 3, part, 0, rows);
    EXPECT_EQ(all.values, bytes_of(codes));
    EXPECT_EQ(all.scales, bytes_of(scales));
    const Stored some(*model.experts, model.config.experts, 3, part, 0, 100);
    EXPECT_EQ(some.values, bytes_of(codes.first(static_cast<std::size_t>(100 * cols))));
    EXPECT_EQ(some.scales, bytes_of(scales.first(scales.size() / 2)));
    const Stored rest(*model.experts, model.config.experts, 3, part, 128, rows - 128);
    EXPECT_EQ(rest.values, bytes_of(codes.subspan(static_cast<std::size_t>(128 * cols))));
    EXPECT_EQ(rest.scales, bytes_of(scales.subspan(scales.size() / 2)));
  }
  // Within a block, with its scales.
  const Stored whole(*model.experts, model.config.experts, 3, ExpertPart::kGate, 0, 128);
  const Stored within(*model.experts, model.config.experts, 3, ExpertPart::kGate, 100, 28);
  EXPECT_TRUE(std::equal(within.values.begin(), within.values.end(),
                         whole.values.begin() + 100 * within.layout.cols));
  EXPECT_EQ(within.scales, whole.scales);
  expect_error(
      ErrorCode::kInvalidArgument, "rows from 100, 29 of them: the scales of e4m3 weights",
      [&] { Stored(*model.experts, model.config.experts, 3, ExpertPart::kGate, 100, 29); });
  expect_error(ErrorCode::kInvalidArgument, "rows from 128",
               [&] { Stored(*model.experts, model.config.experts, 3, ExpertPart::kGate, 128, 9); });
}

TEST(StoredRows, OfMxfp4AreTheFilesBytesWithGateAndUpRowsTakenApart) {
  const TempDir dir;
  make_checkpoint(small_recipe("gpt-oss", DType::kBF16), dir.path());
  const LayerModel model = Checkpoint(dir.path()).layer(1);
  const SafetensorsFile file(dir / "model.safetensors");
  ASSERT_EQ(model.experts->stored_format(), WeightFormat::kMxfp4);
  for (const ExpertPart part : kParts) {
    const bool down = part == ExpertPart::kDown;
    const auto [rows, cols] = part_shape(model.config.experts, part);
    const std::string name =
        std::string("model.layers.1.mlp.experts.") + (down ? "down_proj" : "gate_up_proj");
    const std::byte* codes = file.find(name + "_blocks")->bytes.data();
    const std::byte* scales = file.find(name + "_scales")->bytes.data();
    const Stored some(*model.experts, model.config.experts, 5, part, 3, rows - 4);
    for (std::int64_t row = 0; row < some.layout.rows; ++row) {
      const std::int64_t stored =
          down ? 5 * rows + 3 + row : 2 * (5 * rows + 3 + row) + (part == ExpertPart::kUp);
      EXPECT_EQ(std::memcmp(&some.values[static_cast<std::size_t>(row * cols / 2)],
                            codes + stored * cols / 2, static_cast<std::size_t>(cols / 2)),
                0);
      EXPECT_EQ(std::memcmp(&some.scales[static_cast<std::size_t>(row * cols / 32)],
                            scales + stored * cols / 32, static_cast<std::size_t>(cols / 32)),
                0);
    }
  }
}

TEST(StoredRows, DecodedAreWhatIsReadByBits) {
  const CheckpointRecipe recipes[] = {cut_off_blocks(), small_recipe("gpt-oss", DType::kBF16),
                                      small_recipe("gpt-oss", DType::kF16),
                                      small_recipe("mixtral", DType::kBF16)};
  for (const CheckpointRecipe& recipe : recipes) {
    const TempDir dir;
    make_checkpoint(recipe, dir.path());
    const LayerModel model = Checkpoint(dir.path()).layer(1);
    for (const ExpertPart part : kParts) {
      const auto [rows, cols] = part_shape(model.config.experts, part);
      const std::int64_t border = rows > 128 ? 128 : 0;
      for (const auto& [first, count] : {std::pair{std::int64_t{0}, rows},
                                         {0, 1},
                                         {0, rows - 1},
                                         {border, rows - border},
                                         {border, 1},
                                         {0, 0}}) {
        const Stored stored(*model.experts, model.config.experts, 2, part, first, count);
        for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
          const auto bytes = static_cast<std::size_t>(count * cols * size_of(dtype));
          std::vector<std::byte> decoded(bytes, std::byte{1}), read(bytes, std::byte{2});
          decode(stored.layout, {stored.values.data(), stored.scales.data()}, dtype,
                 decoded.data());
          model.experts->read(2, part, first, count, dtype, read.data());
          EXPECT_EQ(decoded, read) << recipe.family << " " << to_string(dtype);
        }
      }
    }
  }
}

TEST(StoredRows, OfAMatrixThatIsQuantisedBesideOnesThatAreNotAreNumbers) {
  const TempDir dir;
  const std::vector<std::uint8_t> codes = {0x38, 0xb8, 0x7e, 0x01};
  const std::vector<float> scale = {2.0F}, plain = {1.0F, 2.0F, 3.0F, 4.0F};
  const std::vector<StoredTensor> tensors = {
      {{"q", StoredType::kF8E4M3, {2, 2}}, std::as_bytes(std::span(codes))},
      {{"q_scale_inv", StoredType::kF32, {1, 1}}, std::as_bytes(std::span(scale))},
      {{"p", StoredType::kF32, {2, 2}}, std::as_bytes(std::span(plain))}};
  write_safetensors(dir / "f.safetensors", tensors);
  const ExpertConfig config = {.num_experts = 1, .hidden = 2, .inner = 2};
  const auto source =
      make_matrix_source(TensorSet::open_file(dir / "f.safetensors"), config, {{"q", "p", "q"}});
  EXPECT_EQ(source->stored_format(), WeightFormat::kExact);
  const Stored stored(*source, config, 0, ExpertPart::kUp, 1, 1);
  EXPECT_EQ(load_float(stored.values.data(), source->dtype(), 0), 3.0F);
}

TEST(WeightFormats, ThatNothingStoresAreNotDecoded) {
  expect_error(ErrorCode::kUnsupported, "stored is not a format", [] {
    (void)StoredLayout{.format = WeightFormat::kStored, .rows = 1, .cols = 32}.value_bytes();
  });
  expect_error(ErrorCode::kUnsupported, "nothing stores it", [] {
    decode({.format = WeightFormat::kQ8, .rows = 1, .cols = 32}, {}, DType::kF32, nullptr);
  });
}

/// One expert whose three matrices are the same tensor `a`.
class MatrixFiles : public ::testing::Test {
 protected:
  std::unique_ptr<ExpertSource> open(const std::vector<StoredTensor>& tensors) {
    write_safetensors(dir / "f.safetensors", tensors);
    return make_matrix_source(TensorSet::open_file(dir / "f.safetensors"), config,
                              {{"a", "a", "a"}});
  }

  ExpertConfig config = {.num_experts = 1, .hidden = 2, .inner = 2};
  std::vector<std::uint8_t> codes = {0x38, 0xb8, 0x7e, 0x01};  // 1, -1, 448, 2^-9
  std::vector<std::uint16_t> scale = {0x3fc0};                 // 1.5 in bf16
  StoredTensor fp8 = {{"a", StoredType::kF8E4M3, {2, 2}}, std::as_bytes(std::span(codes))};
  TempDir dir;
};

TEST_F(MatrixFiles, Fp8FactorsMayBeBf16) {
  const auto source =
      open({fp8, {{"a_scale_inv", StoredType::kBF16, {1, 1}}, std::as_bytes(std::span(scale))}});
  std::vector<float> values(4);
  source->read(0, ExpertPart::kDown, 0, 2, DType::kF32, values.data());
  EXPECT_EQ(values, (std::vector<float>{1.5F, -1.5F, 672.0F, 0x1.8p-9F}));
}

TEST_F(MatrixFiles, WhatIsMissingOrOfAnotherTypeIsNamed) {
  expect_error(ErrorCode::kBadFile, "has no tensor 'a_scale_inv'", [&] { open({fp8}); });
  expect_error(ErrorCode::kBadFile, "tensor 'a_scale_inv' has shape [1], expected [1, 1]", [&] {
    open({fp8, {{"a_scale_inv", StoredType::kBF16, {1}}, std::as_bytes(std::span(scale))}});
  });
  expect_error(ErrorCode::kBadFile, "tensor 'a_scale_inv' is I16, expected F32, BF16 or F16", [&] {
    open({fp8, {{"a_scale_inv", StoredType::kI16, {1, 1}}, std::as_bytes(std::span(scale))}});
  });
  fp8.spec.type = StoredType::kI8;
  expect_error(ErrorCode::kBadFile, "tensor 'a' is I8, expected F32, BF16, F16 or F8_E4M3",
               [&] { open({fp8}); });
}

TEST(GptOss, WhatIsMissingOrOfAnotherTypeIsNamed) {
  const TempDir dir;
  const auto open = [&](const std::vector<StoredTensor>& more) {
    std::vector<StoredTensor> tensors = more;
    const std::vector<std::byte> zeros(1024);
    const auto add = [&](const char* name, StoredType type, std::vector<std::int64_t> shape) {
      TensorSpec spec = {name, type, std::move(shape)};
      const auto num_bytes = static_cast<std::size_t>(spec.num_bytes());
      tensors.push_back({std::move(spec), std::span(zeros).first(num_bytes)});
    };
    for (StoredTensor& tensor : tensors) {
      tensor.bytes = std::span(zeros).first(static_cast<std::size_t>(tensor.spec.num_bytes()));
    }
    add("gate_up_proj_bias", StoredType::kBF16, {1, 4});
    add("down_proj_bias", StoredType::kBF16, {1, 3});
    write_safetensors(dir / "f.safetensors", tensors);
    const auto set = TensorSet::open_file(dir / "f.safetensors");
    const ExpertConfig config = {.num_experts = 1, .hidden = 3, .inner = 2, .bias = true};
    if (set->find("gate_up_proj_blocks") != nullptr) {
      (void)make_mxfp4_source(set, config, "");
    } else {
      (void)make_stacked_source(set, config,
                                {.gate = "gate_up_proj",
                                 .down = "down_proj",
                                 .form = StackedForm::kTransposed,
                                 .down_form = StackedForm::kTransposed,
                                 .interleaved = true,
                                 .gate_up_bias = "gate_up_proj_bias",
                                 .down_bias = "down_proj_bias"});
    }
  };
  expect_error(ErrorCode::kBadFile, "has no tensor 'gate_up_proj'", [&] { open({}); });
  expect_error(ErrorCode::kBadFile, "tensor 'gate_up_proj' has shape [1, 4, 3], expected [1, 3, 4]",
               [&] {
                 open({{{"gate_up_proj", StoredType::kBF16, {1, 4, 3}}, {}},
                       {{"down_proj", StoredType::kBF16, {1, 2, 3}}, {}}});
               });
  expect_error(ErrorCode::kBadFile, "tensor 'down_proj' is I16, expected F32, BF16 or F16", [&] {
    open({{{"gate_up_proj", StoredType::kBF16, {1, 3, 4}}, {}},
          {{"down_proj", StoredType::kI16, {1, 2, 3}}, {}}});
  });
  expect_error(ErrorCode::kBadFile, "'gate_up_proj_blocks': 3 columns are not a multiple of 32",
               [&] {
                 open({{{"gate_up_proj_blocks", StoredType::kU8, {1}}, {}}});
               });
}

TEST(ExpertSource, AdviceBeforeAndAfterReadingChangesNoValue) {
  for (const char* family : {"mixtral", "gpt-oss"}) {
    const TempDir dir;
    make_checkpoint(small_recipe(family, DType::kBF16), dir.path());
    const LayerModel model = Checkpoint(dir.path()).layer(1);
    const ExpertConfig& config = model.config.experts;
    for (const ExpertPart part : {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown}) {
      const auto [rows, cols] = part_shape(config, part);
      const auto read = [&, rows = rows, cols = cols] {
        std::vector<float> values(static_cast<std::size_t>(rows * cols));
        model.experts->read(1, part, 0, rows, DType::kF32, values.data());
        return values;
      };
      const std::vector<float> before = read();
      model.experts->done_with(1, part, 0, rows / 2);
      model.experts->done_with(1, part, rows / 2, rows - rows / 2);
      EXPECT_EQ(read(), before) << family;
      model.experts->will_read(1, part, 0, 1);
      model.experts->will_read(1, part, 3, rows - 3);
      EXPECT_EQ(read(), before) << family;
      expect_error(ErrorCode::kInvalidArgument, "rows from",
                   [&, rows = rows] { model.experts->will_read(1, part, 1, rows); });
    }
  }
}

TEST(Mxfp4, TheSmallestAndLargestScalesAndNanAreExact) {
  for (int bits = 0; bits < 255; ++bits) {
    EXPECT_EQ(e8m0_to_float(static_cast<std::uint8_t>(bits)), std::ldexp(1.0F, bits - 127));
  }
  EXPECT_TRUE(std::isnan(e8m0_to_float(255)));
}

}  // namespace
}  // namespace switchyard
