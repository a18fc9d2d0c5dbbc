// Stored matrices as rows of bf16, by the kernels that write them: each number by decode(), each
// code and scale that there is, and nothing beside the rows that are asked for.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/half.hpp"
#include "experts/gpu/coded/expand.hpp"
#include "experts/gpu/coded/pack.hpp"
#include "testkit/gpu/device_array.hpp"

namespace switchyard {
namespace {

/// Matrices of one layout, with codes and scales of any bits but those that are no numbers.
class StoredMatrices {
 public:
  StoredMatrices(const StoredLayout& layout, int count, unsigned seed) : layout_(layout) {
    std::mt19937 random(seed);
    const auto fill = [&](std::int64_t bytes) {
      std::vector<std::byte> made(static_cast<std::size_t>(bytes));
      for (std::byte& one : made) one = static_cast<std::byte>(random() & 255U);
      return made;
    };
    for (int i = 0; i < count; ++i) {
      values_.push_back(fill(layout.value_bytes()));
      scales_.push_back(fill(layout.scale_bytes()));
      factors_.push_back(i % 2 == 0 ? 0.71F : -3.3e-5F);
      make_numbers(values_.back(), scales_.back(), random);
    }
  }

  /// What decode() makes of them, in bits.
  [[nodiscard]] std::vector<std::uint16_t> numbers() const {
    const auto of_matrix = static_cast<std::size_t>(layout_.rows * layout_.cols);
    std::vector<std::uint16_t> all(of_matrix * values_.size());
    for (std::size_t i = 0; i < values_.size(); ++i) {
      decode(layout_, stored(i), DType::kBF16, all.data() + i * of_matrix);
    }
    return all;
  }

  /// As pack() leaves them, each behind the other, and the f32 apart.
  void pack(std::vector<std::byte>& codes, std::vector<float>& floats) const {
    for (std::size_t i = 0; i < values_.size(); ++i) {
      std::vector<std::byte> one(static_cast<std::size_t>(coded::bytes_of(layout_)), std::byte{0});
      const float factor = coded::pack(layout_, stored(i), one.data()).factor;
      codes.insert(codes.end(), one.begin(), one.end());
      if (layout_.format == WeightFormat::kE4M3) {
        const std::size_t before = floats.size();
        floats.resize(before + scales_[i].size() / sizeof(float));
        std::memcpy(floats.data() + before, scales_[i].data(), scales_[i].size());
      } else if (coded::floats_of(layout_) != 0) {
        floats.push_back(factor);
      }
    }
  }

 private:
  [[nodiscard]] ConstStoredRows stored(std::size_t i) const {
    return {values_[i].data(), scales_[i].data(), factors_[i]};
  }
  void make_numbers(std::vector<std::byte>& values, std::vector<std::byte>& scales,
                    std::mt19937& random) const {
    const auto keep_off = [](std::vector<std::byte>& bytes, int mask) {
      for (std::byte& one : bytes) {
        if ((one & std::byte(mask)) == std::byte(mask)) one &= std::byte{0xbf};
      }
    };
    switch (layout_.format) {
      case WeightFormat::kE4M3: {
        keep_off(values, 0x7f);
        std::uniform_real_distribution<float> of_block(-2.0F, 2.0F);
        for (std::size_t i = 0; i < scales.size(); i += sizeof(float)) {
          const float scale = of_block(random);
          std::memcpy(scales.data() + i, &scale, sizeof scale);
        }
        return;
      }
      case WeightFormat::kMxfp4:  // within what pack() takes
        for (std::byte& one : scales) one = static_cast<std::byte>(100 + random() % 40);
        return;
      case WeightFormat::kNvfp4: keep_off(scales, 0x7f); return;
      default: keep_off(scales, layout_.int4.scale == DType::kF16 ? 0x7c : 0x7f);
    }
  }

  StoredLayout layout_;
  std::vector<std::vector<std::byte>> values_, scales_;
  std::vector<float> factors_;
};

class ExpandOnTheDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  }
};

/// @param rows  Of each expert; empty: nobody says.
void expect_numbers(const StoredLayout& layout, int of_expert, int matrices,
                    const std::vector<std::int32_t>& rows) {
  SCOPED_TRACE(std::string(to_string(layout.format)) + " " + std::to_string(layout.rows) + " x " +
               std::to_string(layout.cols) + " group " + std::to_string(layout.int4.group));
  const StoredMatrices made(layout, matrices, static_cast<unsigned>(layout.rows + layout.cols));
  std::vector<std::byte> packed;
  std::vector<float> floats;
  made.pack(packed, floats);
  std::vector<std::uint16_t> want = made.numbers();
  const std::size_t of_matrix = want.size() / static_cast<std::size_t>(matrices);
  constexpr std::size_t kBehind = 64;
  constexpr std::uint16_t kPoison = 0xffff;  // as DeviceArray has it
  for (std::size_t i = 0; i < want.size(); ++i) {
    const std::size_t expert = i / of_matrix / static_cast<std::size_t>(of_expert);
    if (!rows.empty() && rows[expert] == 0) want[i] = kPoison;
  }
  want.insert(want.end(), kBehind, kPoison);

  const DeviceArray<std::byte> codes(packed);
  const DeviceArray<float> scales(floats);
  const DeviceArray<std::int32_t> expert_rows(rows);
  DeviceArray<std::uint16_t> out(want.size());
  coded::launch_expand({.format = layout.format,
                        .int4 = layout.int4,
                        .codes = codes.data(),
                        .scales = scales.data(),
                        .rows = out.data(),
                        .expert_rows = rows.empty() ? nullptr : expert_rows.data(),
                        .of_expert = of_expert,
                        .matrices = matrices,
                        .num_rows = layout.rows,
                        .cols = layout.cols},
                       nullptr);
  const std::vector<std::uint16_t> got = out.get();
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(got[i], want[i]) << "number " << i << " of " << of_matrix << " a matrix";
  }
}

std::vector<StoredLayout> layouts() {
  std::vector<StoredLayout> all;
  // 256 columns are a warp's: fewer, as many, more and no multiple of them.
  for (const auto& [rows, cols] :
       {std::pair{8, 128}, {16, 256}, {24, 384}, {8, 1152}, {136, 640}}) {
    for (const WeightFormat format : {WeightFormat::kE4M3, WeightFormat::kMxfp4}) {
      all.push_back({.format = format, .rows = rows, .cols = cols});
    }
    for (const std::int32_t group : {32, 64, 128}) {
      for (const DType scale : {DType::kF16, DType::kBF16}) {
        for (const bool zero_points : {false, true}) {
          all.push_back({.format = WeightFormat::kInt4,
                         .rows = rows,
                         .cols = cols,
                         .int4 = {.group = group, .scale = scale, .zero_points = zero_points}});
        }
      }
    }
    all.push_back({.format = WeightFormat::kNvfp4, .rows = rows, .cols = cols});
  }
  all.push_back({.format = WeightFormat::kNvfp4, .rows = 16, .cols = 16});
  all.push_back({.format = WeightFormat::kNvfp4, .rows = 48, .cols = 272});
  all.push_back({.format = WeightFormat::kInt4,
                 .rows = 32,
                 .cols = 96,
                 .int4 = {.group = 32, .zero_points = true}});  // rows of scales of 8 bytes
  all.push_back({.format = WeightFormat::kInt4,
                 .rows = 32,
                 .cols = 32,
                 .int4 = {.group = 32, .zero_points = true}});  // and of 3
  return all;
}

TEST_F(ExpandOnTheDevice, SmallMatricesAreWhatDecodeMakesOfThem) {
  for (const StoredLayout& layout : layouts()) expect_numbers(layout, 1, 3, {});
}

TEST_F(ExpandOnTheDevice, SmallMatricesOfExpertsWithoutRowsAreLeftOut) {
  for (const StoredLayout& layout : layouts()) {
    if (layout.rows <= 24) expect_numbers(layout, 2, 8, {0, 5, 0, 1});
  }
}

// More items than the blocks of one wave have warps.
TEST_F(ExpandOnTheDevice, LargeMatricesToo) {
  for (const WeightFormat format :
       {WeightFormat::kE4M3, WeightFormat::kMxfp4, WeightFormat::kInt4, WeightFormat::kNvfp4}) {
    expect_numbers({.format = format, .rows = 4800, .cols = 1152, .int4 = {.group = 64}}, 1, 2,
                   {3, 0});
  }
}

}  // namespace
}  // namespace switchyard
