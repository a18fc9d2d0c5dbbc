// A block of every family against what transformers makes of the same tokens: checkpoints saved by
// save_pretrained, and outputs, as tools/peers/transformers_check.py --golden has written them. The
// versions stand in each file's metadata.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/files/safetensors.hpp"
#include "switchyard/checkpoint.hpp"
#include "switchyard/layer.hpp"
#include "testkit/file_support.hpp"

namespace switchyard {
namespace {

const std::filesystem::path kFolder = std::filesystem::path(SWITCHYARD_TEST_DATA) / "transformers";

class Golden : public ::testing::TestWithParam<std::string> {};

TEST_P(Golden, TheBlockIsThatOfTransformersToWithinRounding) {
  const std::filesystem::path directory = kFolder / GetParam();
  const Checkpoint checkpoint(directory);
  const SafetensorsFile file(directory / "model.safetensors");
  const StoredTensor& tokens = *file.find("golden.tokens");
  const std::int64_t num_tokens = tokens.spec.shape[0];
  const std::int64_t hidden = tokens.spec.shape[1];
  int layers = 0;
  for (const std::int32_t index : checkpoint.moe_layers()) {
    const StoredTensor* golden = file.find("golden.layer." + std::to_string(index));
    if (golden == nullptr) continue;
    ++layers;
    MoeLayer layer(checkpoint.layer(index), {});
    std::vector<float> out(static_cast<std::size_t>(num_tokens * hidden));
    layer.forward(
        {.tokens = {tokens.bytes.data(), DType::kF32, num_tokens, hidden},
         .out = {reinterpret_cast<std::byte*>(out.data()), DType::kF32, num_tokens, hidden}});
    const auto* expected = reinterpret_cast<const float*>(golden->bytes.data());
    float largest = 0.0F;
    for (std::size_t i = 0; i < out.size(); ++i) largest = std::max(largest, std::abs(expected[i]));
    ASSERT_GT(largest, 0.0F);
    for (std::size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], expected[i], 1e-5F * largest) << "layer " << index << " element " << i;
    }
  }
  EXPECT_EQ(layers, 1);
}

INSTANTIATE_TEST_SUITE_P(Transformers, Golden, ::testing::ValuesIn(test::sorted_names_in(kFolder)),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace switchyard
