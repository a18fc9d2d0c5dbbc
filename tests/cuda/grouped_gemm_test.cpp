// The grouped GEMM on the device against plain loops in double: awkward row counts, sizes that no
// tile divides, every activation and type, every path. Outputs are poisoned first, so a row
// that should not be written shows as well as one that should.

#include "experts/gpu/grouped/gemm.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include "core/half.hpp"
#include "reference/expert.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/made_experts.hpp"

namespace switchyard {
namespace {

struct Problem {
  std::string name;
  std::vector<std::int32_t> rows;  // of each expert
  std::int64_t hidden = 256;
  std::int64_t inner = 256;
  std::int32_t gap = 0;  // unused rows after each expert
  DType dtype = DType::kBF16;
  bool gated = true;
  Activation activation = Activation::kSilu;
  bool bias = false;
  TileShape tile = TileShape::kAuto;
  bool dynamic = true;
  GroupedPath path = GroupedPath::kBest;
  bool by_index = true;  // rows gathered by row_token
};

struct Outputs {
  std::vector<float> act, y;  // NaN where nothing was written
};

/// Inputs, run on the device, and the comparison.
class Case {
 public:
  explicit Case(const Problem& p) : p_(p) {
    std::mt19937 random(11);
    begin_.push_back(0);
    for (const std::int32_t rows : p.rows) begin_.push_back(begin_.back() + rows + p.gap);
    const std::int64_t max_rows = begin_.back();
    num_tokens_ = std::max<std::int64_t>(1, p.by_index ? max_rows / 3 + 1 : max_rows);
    x_ = stored_as(p.dtype, random_floats(num_tokens_ * p.hidden, random));
    experts_ = make_experts({.num_experts = static_cast<std::int32_t>(p.rows.size()),
                             .hidden = p.hidden,
                             .inner = p.inner,
                             .gated = p.gated,
                             .activation = p.activation,
                             .limit = 1.5F,
                             .bias = true},
                            p.dtype, random, 2.0F);
    row_token_.assign(static_cast<std::size_t>(max_rows), -1);
    for (std::size_t e = 0; e < p.rows.size(); ++e) {
      for (std::int32_t i = 0; i < p.rows[e]; ++i) {
        const std::int32_t row = begin_[e] + i;
        row_token_[static_cast<std::size_t>(row)] =
            p.by_index ? static_cast<std::int32_t>(random() % static_cast<unsigned>(num_tokens_))
                       : row;
      }
    }
  }

  Outputs run() const {
    const DeviceArray<std::byte> x(x_), w13(experts_.w13), w2(experts_.w2);
    const DeviceArray<float> b13(experts_.b13), b2(experts_.b2);
    const DeviceArray<std::int32_t> begin(begin_), rows(p_.rows), token(row_token_),
        workspace(std::vector<std::int32_t>(grouped_gemm_workspace_bytes() / 4, 0));
    const std::int64_t max_rows = begin_.back();
    const auto bytes = [&](std::int64_t columns) {
      return static_cast<std::size_t>(max_rows * columns * size_of(p_.dtype));
    };
    const DeviceArray<std::byte> act(bytes(p_.inner)), y(bytes(p_.hidden));
    const GroupedGemmParams params{.x = x.data(),
                                   .row_token = p_.by_index ? token.data() : nullptr,
                                   .w13 = w13.data(),
                                   .b13 = p_.bias ? b13.data() : nullptr,
                                   .act = act.data(),
                                   .w2 = w2.data(),
                                   .b2 = p_.bias ? b2.data() : nullptr,
                                   .y = y.data(),
                                   .expert_begin = begin.data(),
                                   .expert_rows = rows.data(),
                                   .workspace = workspace.data(),
                                   .num_experts = static_cast<std::int32_t>(p_.rows.size()),
                                   .max_rows = max_rows,
                                   .num_tokens = num_tokens_,
                                   .hidden = p_.hidden,
                                   .inner = p_.inner,
                                   .dtype = p_.dtype,
                                   .gated = p_.gated,
                                   .activation = p_.activation,
                                   .limit = experts_.config.limit,
                                   .path = p_.path,
                                   .tile = p_.tile,
                                   .dynamic = p_.dynamic};
    launch_gate_up(params, nullptr);
    launch_down(params, nullptr);
    for (const std::int32_t counter : workspace.get()) EXPECT_EQ(counter, 0);
    return {loaded_as_floats(p_.dtype, act.get()), loaded_as_floats(p_.dtype, y.get())};
  }

  /// Every used row of act against x, and of y against the act that the device made.
  void expect_right(const Outputs& got) const {
    std::vector<bool> used(row_token_.size(), false);
    std::int64_t wrong = 0;
    for (std::size_t e = 0; e < p_.rows.size(); ++e) {
      for (std::int32_t i = 0; i < p_.rows[e]; ++i) {
        const auto row = static_cast<std::int64_t>(begin_[e]) + i;
        used[static_cast<std::size_t>(row)] = true;
        // Long columns are sampled: the first, the last and some between.
        for (std::int64_t j = 0; j < p_.inner; j += (j + 9 < p_.inner ? 7 : 1)) {
          wrong += check_one("act", row, j, want_act(static_cast<std::int64_t>(e), row, j),
                             got.act[static_cast<std::size_t>(row * p_.inner + j)], wrong);
        }
        for (std::int64_t j = 0; j < p_.hidden; j += (j + 9 < p_.hidden ? 7 : 1)) {
          wrong += check_one("y", row, j, want_y(static_cast<std::int64_t>(e), row, j, got),
                             got.y[static_cast<std::size_t>(row * p_.hidden + j)], wrong);
        }
      }
    }
    EXPECT_EQ(wrong, 0) << p_.name;
    for (std::size_t row = 0; row < used.size(); ++row) {
      if (used[row]) continue;
      ASSERT_TRUE(std::isnan(got.act[row * static_cast<std::size_t>(p_.inner)])) << p_.name << row;
      ASSERT_TRUE(std::isnan(got.y[row * static_cast<std::size_t>(p_.hidden)])) << p_.name << row;
    }
  }

 private:
  [[nodiscard]] float value(const std::vector<float>& v, std::int64_t i) const {
    return v[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] float value(const std::vector<std::byte>& v, std::int64_t i) const {
    return load_float(v.data(), p_.dtype, i);
  }
  template <typename T>
  double dot(const std::vector<T>& a, std::int64_t a_at, const std::vector<std::byte>& b,
             std::int64_t b_at, std::int64_t n) const {
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += double{value(a, a_at + i)} * value(b, b_at + i);
    return sum;
  }
  double want_act(std::int64_t e, std::int64_t row, std::int64_t j) const {
    const std::int64_t token = row_token_[static_cast<std::size_t>(row)];
    const auto product = [&](std::int64_t w13_row) -> reference::Bounded {
      const double sum = dot(x_, token * p_.hidden, experts_.w13, w13_row * p_.hidden, p_.hidden);
      return {p_.bias ? sum + experts_.b13[static_cast<std::size_t>(w13_row)] : sum, 0};
    };
    const std::int64_t gate_row = e * (p_.gated ? 2 : 1) * p_.inner + j;
    const reference::Bounded up = p_.gated ? product(gate_row + p_.inner) : reference::Bounded{};
    return reference::inner_value(experts_.config, product(gate_row), up).value;
  }
  double want_y(std::int64_t e, std::int64_t row, std::int64_t j, const Outputs& got) const {
    double y = dot(got.act, row * p_.inner, experts_.w2, (e * p_.hidden + j) * p_.inner, p_.inner);
    if (p_.bias) y += experts_.b2[static_cast<std::size_t>(e * p_.hidden + j)];
    return y;
  }
  /// Half an ulp of the 16-bit type, and the rounding of fp32 sums of values near 1; of f32 also
  /// what is lost of split products, before a gate's value multiplies it.
  int check_one(const char* what, std::int64_t row, std::int64_t column, double want, float got,
                std::int64_t shown) const {
    const bool f32 = p_.dtype == DType::kF32;
    const double half_ulp = f32 ? 1e-5 : p_.dtype == DType::kBF16 ? 0x1p-8 : 0x1p-11;
    if (std::abs(got - want) <= half_ulp * std::abs(want) + (f32 ? 1e-4 : 4e-5)) return 0;
    if (shown < 3) {
      ADD_FAILURE() << p_.name << ": " << what << "[" << row << ", " << column << "] is " << got
                    << ", want " << want;
    }
    return 1;
  }

  Problem p_;
  MadeExperts experts_;
  std::vector<std::int32_t> begin_;
  std::int64_t num_tokens_ = 0;
  std::vector<std::byte> x_;
  std::vector<std::int32_t> row_token_;
};

void expect_right(const Problem& p) {
  SCOPED_TRACE(p.name);
  const Case c(p);
  c.expect_right(c.run());
}

/// Every kernel there is.
struct Kernel {
  GroupedPath path;
  TileShape tile;
  DType dtype = DType::kBF16;
};
constexpr Kernel kKernels[] = {{GroupedPath::kSm90, TileShape::kCooperative},
                               {GroupedPath::kSm90, TileShape::kPingPong},
                               {GroupedPath::kSm80, TileShape::kAuto},
                               {GroupedPath::kSm80Flat, TileShape::kAuto},
                               {GroupedPath::kSm90, TileShape::kAuto, DType::kF32},
                               {GroupedPath::kSm80, TileShape::kAuto, DType::kF32}};

const std::vector<std::int32_t> kAwkwardRows = {0,   1,   63,  64,  65,  0,   127, 128,
                                                129, 145, 161, 177, 192, 193, 257, 320};

class GroupedGemm : public testing::Test {
 protected:
  void SetUp() override {
    if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  }
};

TEST_F(GroupedGemm, AwkwardRowCountsAreRightInEveryTileShape) {
  for (const auto& [path, tile, dtype] : kKernels) {
    for (const bool dynamic : {true, false}) {
      expect_right({.name = "rows",
                    .rows = kAwkwardRows,
                    .dtype = dtype,
                    .tile = tile,
                    .dynamic = dynamic,
                    .path = path});
    }
  }
}

TEST_F(GroupedGemm, UnusedRowsBetweenExpertsAreLeftAlone) {
  for (const auto& [path, tile, dtype] : kKernels) {
    expect_right({.name = "gaps",
                  .rows = {3, 0, 130, 64},
                  .gap = 5,
                  .dtype = dtype,
                  .tile = tile,
                  .path = path});
  }
}

TEST_F(GroupedGemm, SizesThatNoTileDividesAreRight) {
  for (const auto& [path, tile, dtype] : kKernels) {
    for (const std::int64_t hidden : {8, 72, 328, 776}) {
      for (const std::int64_t inner : {8, 104, 200, 520}) {
        expect_right({.name = "H " + std::to_string(hidden) + " I " + std::to_string(inner),
                      .rows = {70, 0, 131},
                      .hidden = hidden,
                      .inner = inner,
                      .dtype = dtype,
                      .bias = true,
                      .tile = tile,
                      .path = path});
      }
    }
  }
}

void expect_every_activation(GroupedPath path, const std::vector<DType>& dtypes) {
  using enum Activation;
  for (const Activation activation :
       {kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kClampedSwiglu, kIdentity}) {
    for (const bool gated : {true, false}) {
      if (!gated && activation == kClampedSwiglu) continue;
      for (const DType dtype : dtypes) {
        for (const bool bias : {true, false}) {
          expect_right({.name = std::string(to_string(activation)) + " " + to_string(dtype),
                        .rows = {33, 100},
                        .hidden = 128,
                        .inner = 136,
                        .dtype = dtype,
                        .gated = gated,
                        .activation = activation,
                        .bias = bias,
                        .path = path});
        }
      }
    }
  }
}

TEST_F(GroupedGemm, EveryActivationIsRightInEveryTypeWithAndWithoutBias) {
  const std::vector<DType> dtypes = {DType::kBF16, DType::kF16, DType::kF32};
  expect_every_activation(GroupedPath::kSm90, dtypes);
  expect_every_activation(GroupedPath::kSm80, dtypes);
  expect_every_activation(GroupedPath::kSm80Flat, {DType::kBF16, DType::kF16});
}

TEST_F(GroupedGemm, AllRowsMayGoToOneExpert) {
  expect_right({.name = "all to one", .rows = {0, 0, 1500, 0}});
  expect_right({.name = "one expert", .rows = {700}, .hidden = 512, .inner = 384});
}

TEST_F(GroupedGemm, EveryNumberOfStepsFromOneToSixIsRight) {
  for (const auto& [path, tile, dtype] : kKernels) {
    for (std::int64_t steps = 1; steps <= 6; ++steps) {
      expect_right({.name = "steps " + std::to_string(steps),
                    .rows = {300, 0, 65, 1},
                    .hidden = steps * 64,
                    .inner = (7 - steps) * 64,
                    .dtype = dtype,
                    .tile = tile,
                    .path = path});
    }
  }
}

TEST_F(GroupedGemm, MoreUnitsThanTheChipHasClustersAreRight) {
  // 33 column tiles of 256: on 66 clusters 50 units, and 149 of which the last 17 are halved.
  for (const auto& [path, tile, dtype] : kKernels) {
    for (const std::int32_t rows : {200, 1000}) {
      expect_right({.name = "turns " + std::to_string(rows),
                    .rows = {rows, 0, 65},
                    .hidden = 8200,
                    .inner = 16,
                    .dtype = dtype,
                    .tile = tile,
                    .dynamic = rows == 1000,
                    .path = path});
    }
  }
}

TEST_F(GroupedGemm, NoRowsAtAllWriteNothing) {
  expect_right({.name = "none", .rows = {0, 0, 0}, .gap = 2});
}

TEST_F(GroupedGemm, AThousandSmallExpertsAreRight) {
  std::vector<std::int32_t> rows(1024);
  for (std::size_t e = 0; e < rows.size(); ++e) rows[e] = static_cast<std::int32_t>(e * e % 4);
  for (const auto& [path, tile, dtype] : kKernels) {
    expect_right({.name = "1024",
                  .rows = rows,
                  .hidden = 64,
                  .inner = 64,
                  .dtype = dtype,
                  .tile = tile,
                  .path = path});
  }
}

TEST_F(GroupedGemm, SmallProblemsAreRightInEveryKernel) {
  for (const auto& [path, tile, dtype] : kKernels) {
    expect_right({.name = "small",
                  .rows = {65, 0, 3, 130},
                  .hidden = 136,
                  .inner = 72,
                  .dtype = dtype,
                  .bias = true,
                  .tile = tile,
                  .path = path});
  }
}

TEST_F(GroupedGemm, RowsMayBeReadInPlaceWithoutAnIndex) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    expect_right({.name = "packed", .rows = {64, 200, 1}, .dtype = dtype, .by_index = false});
  }
}

TEST_F(GroupedGemm, F32SizesAreMultiplesOfFour) {
  for (const GroupedPath path : {GroupedPath::kSm90, GroupedPath::kSm80}) {
    expect_right({.name = "f32",
                  .rows = {5, 129},
                  .hidden = 12,
                  .inner = 20,
                  .dtype = DType::kF32,
                  .bias = true,
                  .path = path});
  }
}

TEST_F(GroupedGemm, BitsDoNotDependOnTileOrSchedule) {
  for (const Kernel& kernel : kKernels) {
    Problem p{.name = "bits",
              .rows = kAwkwardRows,
              .hidden = 456,
              .inner = 392,
              .dtype = kernel.dtype,
              .path = kernel.path};
    const Outputs want = Case(p).run();
    for (const TileShape tile : {TileShape::kCooperative, TileShape::kPingPong}) {
      for (const bool dynamic : {true, false}) {
        p.tile = tile;
        p.dynamic = dynamic;
        const Outputs got = Case(p).run();
        EXPECT_EQ(got.act, want.act);
        EXPECT_EQ(got.y, want.y);
      }
    }
  }
}

/// The bits of an expert's first rows, alone and beside up to `most` in all.
void expect_same_bits(DType dtype, std::int32_t most, const std::vector<std::int32_t>& fewer) {
  Problem p{.name = "width", .rows = {most}, .hidden = 456, .inner = 392, .dtype = dtype};
  p.by_index = false;
  const Outputs want = Case(p).run();
  for (const std::int32_t rows : fewer) {
    Problem other = p;
    other.rows = {rows};
    other.gap = most - rows;  // the inputs are drawn for all of them
    const Outputs got = Case(other).run();
    for (std::int64_t i = 0; i < rows * p.inner; ++i) {
      ASSERT_EQ(got.act[static_cast<std::size_t>(i)], want.act[static_cast<std::size_t>(i)])
          << rows << " rows, value " << i;
    }
    for (std::int64_t i = 0; i < rows * p.hidden; ++i) {
      ASSERT_EQ(got.y[static_cast<std::size_t>(i)], want.y[static_cast<std::size_t>(i)])
          << rows << " rows, value " << i;
    }
  }
}

TEST_F(GroupedGemm, AnF32RowHasTheSameBitsHoweverManyRowsItsExpertHas) {
  // Strips of 8 to 64 rows are multiplied by instructions of different widths.
  expect_same_bits(DType::kF32, 64, {1, 8, 9, 16, 17, 32, 33, 48, 49});
}

TEST_F(GroupedGemm, A16BitRowHasTheSameBitsHoweverManyRowsItsExpertHas) {
  // From 129 to 192 rows they are the other side of the products.
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    expect_same_bits(dtype, 256, {1, 64, 65, 128, 129, 144, 145, 160, 161, 176, 177, 192, 193});
  }
}

TEST_F(GroupedGemm, RefusesWhatItCannotRun) {
  GroupedGemmParams p{.num_experts = 1, .max_rows = 1, .hidden = 12, .inner = 8};
  EXPECT_THROW(launch_gate_up(p, nullptr), Error);
  p.hidden = 16;
  p.dtype = DType::kI32;
  EXPECT_THROW(launch_down(p, nullptr), Error);
  p.dtype = DType::kBF16;
  EXPECT_THROW(launch_down(p, nullptr), Error) << "null pointers";
  p.num_experts = 1025;
  EXPECT_THROW(launch_down(p, nullptr), Error);
}

}  // namespace
}  // namespace switchyard
