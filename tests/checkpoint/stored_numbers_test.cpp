// Codes and scales of files that are not numbers, where they are asked for as they are stored.
#include <gtest/gtest.h>

#include <limits>
#include <span>
#include <vector>

#include "checkpoint/sources/expert_source.hpp"
#include "switchyard/checkpoint.hpp"
#include "testkit/checkpoint_support.hpp"
#include "testkit/file_support.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using test::TempDir;

/// read_stored() of all rows of a part of an expert.
void read_all(const ExpertSource& source, const ExpertConfig& config, std::int32_t expert,
              ExpertPart part) {
  const auto [rows, cols] = part_shape(config, part);
  const StoredLayout layout{.format = source.stored_format(), .rows = rows, .cols = cols};
  std::vector<std::byte> values(static_cast<std::size_t>(layout.value_bytes()));
  std::vector<std::byte> scales(static_cast<std::size_t>(layout.scale_bytes()));
  source.read_stored(expert, part, 0, rows, {values.data(), scales.data()});
}

TEST(StoredNumbers, OfFp8ThatAreNoneAreNamed) {
  const TempDir dir;
  const ExpertConfig config{.num_experts = 1, .hidden = 2, .inner = 2};
  std::vector<std::uint8_t> codes = {0x38, 0xb8, 0x7e, 0x01};
  float scale = 1.5F;
  const auto read = [&] {
    const std::vector<StoredTensor> tensors = {
        {{"a", StoredType::kF8E4M3, {2, 2}}, std::as_bytes(std::span(codes))},
        {{"a_scale_inv", StoredType::kF32, {1, 1}}, std::as_bytes(std::span(&scale, 1))}};
    write_safetensors(dir / "f.safetensors", tensors);
    const auto source =
        make_matrix_source(TensorSet::open_file(dir / "f.safetensors"), config, {{"a", "a", "a"}});
    read_all(*source, config, 0, ExpertPart::kUp);
  };
  read();
  codes[3] = 0xff;
  expect_error(ErrorCode::kBadFile, "tensor 'a': row 1, column 1 is NaN", read);
  codes[3] = 0xfe;
  for (const float wrong :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    scale = wrong;
    expect_error(ErrorCode::kBadFile, "tensor 'a_scale_inv': row 0, column 0 is ", read);
  }
}

TEST(StoredNumbers, OfMxfp4ThatAreNoneAreNamed) {
  const TempDir dir;
  const ExpertConfig config{.num_experts = 2, .hidden = 64, .inner = 32, .bias = true};
  std::vector<std::uint8_t> bytes(8192, 0x21);
  std::vector<std::uint8_t> up(256, 127), down(128, 127);
  const std::vector<float> biases(128, 0.0F);
  const auto read = [&](ExpertPart part) {
    const auto first = [&](std::size_t count) {
      return std::as_bytes(std::span(bytes).first(count));
    };
    const std::vector<StoredTensor> tensors = {
        {{"e.gate_up_proj_blocks", StoredType::kU8, {2, 64, 2, 16}}, first(4096)},
        {{"e.gate_up_proj_scales", StoredType::kU8, {2, 64, 2}}, std::as_bytes(std::span(up))},
        {{"e.down_proj_blocks", StoredType::kU8, {2, 64, 1, 16}}, first(2048)},
        {{"e.down_proj_scales", StoredType::kU8, {2, 64, 1}}, std::as_bytes(std::span(down))},
        {{"e.gate_up_proj_bias", StoredType::kF32, {2, 64}}, std::as_bytes(std::span(biases))},
        {{"e.down_proj_bias", StoredType::kF32, {2, 64}}, std::as_bytes(std::span(biases))}};
    write_safetensors(dir / "f.safetensors", tensors);
    const auto source =
        make_mxfp4_source(TensorSet::open_file(dir / "f.safetensors"), config, "e.");
    read_all(*source, config, 1, part);
  };
  for (const ExpertPart part : {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown}) read(part);
  up[(64 + 7) * 2 + 1] = 255;  // row 7 of expert 1: up row 3
  read(ExpertPart::kGate);
  expect_error(ErrorCode::kBadFile,
               "tensor 'e.gate_up_proj_scales': block 1 of row 7 of expert 1 is 255",
               [&] { read(ExpertPart::kUp); });
  down[64 + 9] = 255;
  expect_error(ErrorCode::kBadFile,
               "tensor 'e.down_proj_scales': block 0 of row 9 of expert 1 is 255",
               [&] { read(ExpertPart::kDown); });
}

}  // namespace
}  // namespace switchyard
