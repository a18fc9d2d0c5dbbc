#include "checkpoint/sources/expert_source.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <span>
#include <utility>

#include "checkpoint/sources/mxfp4.hpp"
#include "core/fp8.hpp"
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
    (void)make_interleaved_source(TensorSet::open_file(dir / "f.safetensors"),
                                  {.num_experts = 1, .hidden = 3, .inner = 2, .bias = true}, "");
  };
  expect_error(ErrorCode::kBadFile, "has no tensor 'gate_up_proj'", [&] { open({}); });
  expect_error(ErrorCode::kBadFile, "tensor 'gate_up_proj' has shape [1, 4, 3], expected [1, 3, 4]",
               [&] {
                 open({{{"gate_up_proj", StoredType::kBF16, {1, 4, 3}}, {}}});
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
