// The grouped GEMM on the device against plain loops in double: awkward row counts, sizes that no
// tile divides, every activation and type, every path. Outputs are poisoned first, so a row
// that should not be written shows as well as one that should.

#include "experts/gpu/grouped/gemm.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "core/gpu/cuda_check.hpp"
#include "core/half.hpp"

namespace switchyard {
namespace {

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& host) : size_(host.size()) {
    SWITCHYARD_CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), (size_ + 8) * sizeof(T)));
    SWITCHYARD_CUDA(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  [[nodiscard]] T* get() const { return data_; }
  [[nodiscard]] std::vector<T> host() const {
    std::vector<T> copy(size_);
    SWITCHYARD_CUDA(cudaMemcpy(copy.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return copy;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

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

double activation_of(const Problem& p, double g, double u) {
  constexpr double kAlpha = 1.702F;
  constexpr double kLimit = 1.5;
  switch (p.activation) {
    case Activation::kSilu: return g / (1 + std::exp(-g)) * u;
    case Activation::kGelu: return 0.5 * g * (1 + std::erf(g / std::numbers::sqrt2)) * u;
    case Activation::kGeluTanh:
      return 0.5 * g *
             (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (g + 0.044715 * g * g * g))) * u;
    case Activation::kRelu: return std::max(g, 0.0) * u;
    case Activation::kRelu2: return std::max(g, 0.0) * std::max(g, 0.0) * u;
    case Activation::kClampedSwiglu: {
      const double gate = std::min(g, kLimit);
      return gate / (1 + std::exp(-kAlpha * gate)) * (std::clamp(u, -kLimit, kLimit) + 1);
    }
  }
  return 0;
}

/// Inputs, run on the device, and the comparison.
class Case {
 public:
  explicit Case(const Problem& p) : p_(p), random_(11) {
    const auto num_experts = static_cast<std::int64_t>(p.rows.size());
    begin_.push_back(0);
    for (const std::int32_t rows : p.rows) begin_.push_back(begin_.back() + rows + p.gap);
    const std::int64_t max_rows = begin_.back();
    num_tokens_ = std::max<std::int64_t>(1, p.by_index ? max_rows / 3 + 1 : max_rows);
    x_ = values(num_tokens_ * p.hidden, 1.0);
    const std::int64_t halves = p.gated ? 2 : 1;
    w13_ = values(num_experts * halves * p.inner * p.hidden, 2.0 / std::sqrt(p.hidden));
    w2_ = values(num_experts * p.hidden * p.inner, 2.0 / std::sqrt(p.inner));
    b13_ = biases(num_experts * halves * p.inner);
    b2_ = biases(num_experts * p.hidden);
    row_token_.assign(static_cast<std::size_t>(max_rows), -1);
    for (std::size_t e = 0; e < p.rows.size(); ++e) {
      for (std::int32_t i = 0; i < p.rows[e]; ++i) {
        const std::int32_t row = begin_[e] + i;
        row_token_[static_cast<std::size_t>(row)] =
            p.by_index ? static_cast<std::int32_t>(random_() % static_cast<unsigned>(num_tokens_))
                       : row;
      }
    }
  }

  Outputs run() const {
    const DeviceArray<std::byte> x(x_), w13(w13_), w2(w2_);
    const DeviceArray<float> b13(b13_), b2(b2_);
    const DeviceArray<std::int32_t> begin(begin_), rows(p_.rows), token(row_token_),
        workspace(std::vector<std::int32_t>(grouped_gemm_workspace_bytes() / 4, 0));
    const auto max_rows = static_cast<std::size_t>(begin_.back());
    // Bytes of a NaN in every type.
    const auto poisoned = [&](std::int64_t columns) {
      const std::size_t bytes = max_rows * static_cast<std::size_t>(columns * size_of(p_.dtype));
      return std::vector<std::byte>(bytes, std::byte{0xff});
    };
    const DeviceArray<std::byte> act(poisoned(p_.inner)), y(poisoned(p_.hidden));
    const GroupedGemmParams params{.x = x.get(),
                                   .row_token = p_.by_index ? token.get() : nullptr,
                                   .w13 = w13.get(),
                                   .b13 = p_.bias ? b13.get() : nullptr,
                                   .act = act.get(),
                                   .w2 = w2.get(),
                                   .b2 = p_.bias ? b2.get() : nullptr,
                                   .y = y.get(),
                                   .expert_begin = begin.get(),
                                   .expert_rows = rows.get(),
                                   .workspace = workspace.get(),
                                   .num_experts = static_cast<std::int32_t>(p_.rows.size()),
                                   .max_rows = static_cast<std::int64_t>(max_rows),
                                   .num_tokens = num_tokens_,
                                   .hidden = p_.hidden,
                                   .inner = p_.inner,
                                   .dtype = p_.dtype,
                                   .gated = p_.gated,
                                   .activation = p_.activation,
                                   .limit = 1.5F,
                                   .path = p_.path,
                                   .tile = p_.tile,
                                   .dynamic = p_.dynamic};
    launch_gate_up(params, nullptr);
    launch_down(params, nullptr);
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
    for (const std::int32_t counter : workspace.host()) EXPECT_EQ(counter, 0);
    return {floats(act.host()), floats(y.host())};
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
  std::vector<std::byte> values(std::int64_t n, double scale) {
    std::normal_distribution<float> normal(0.0F, static_cast<float>(scale));
    std::vector<std::byte> v(static_cast<std::size_t>(n * size_of(p_.dtype)));
    for (std::int64_t i = 0; i < n; ++i) store_float(v.data(), p_.dtype, i, normal(random_));
    return v;
  }
  [[nodiscard]] std::vector<float> floats(const std::vector<std::byte>& bytes) const {
    std::vector<float> v(bytes.size() / static_cast<std::size_t>(size_of(p_.dtype)));
    for (std::size_t i = 0; i < v.size(); ++i) {
      v[i] = load_float(bytes.data(), p_.dtype, static_cast<std::int64_t>(i));
    }
    return v;
  }
  [[nodiscard]] float value(const std::vector<float>& v, std::int64_t i) const {
    return v[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] float value(const std::vector<std::byte>& v, std::int64_t i) const {
    return load_float(v.data(), p_.dtype, i);
  }
  std::vector<float> biases(std::int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> v(static_cast<std::size_t>(n));
    for (float& b : v) b = normal(random_);
    return v;
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
    const std::int64_t halves = p_.gated ? 2 : 1;
    const std::int64_t gate_row = e * halves * p_.inner + j;
    double gate = dot(x_, token * p_.hidden, w13_, gate_row * p_.hidden, p_.hidden);
    if (p_.bias) gate += b13_[static_cast<std::size_t>(gate_row)];
    if (!p_.gated) return activation_of(p_, gate, 1);
    double up = dot(x_, token * p_.hidden, w13_, (gate_row + p_.inner) * p_.hidden, p_.hidden);
    if (p_.bias) up += b13_[static_cast<std::size_t>(gate_row + p_.inner)];
    return activation_of(p_, gate, up);
  }
  double want_y(std::int64_t e, std::int64_t row, std::int64_t j, const Outputs& got) const {
    double y = dot(got.act, row * p_.inner, w2_, (e * p_.hidden + j) * p_.inner, p_.inner);
    if (p_.bias) y += b2_[static_cast<std::size_t>(e * p_.hidden + j)];
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
  std::mt19937 random_;
  std::vector<std::int32_t> begin_;
  std::int64_t num_tokens_ = 0;
  std::vector<std::byte> x_, w13_, w2_;
  std::vector<float> b13_, b2_;
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
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
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
  for (const Activation activation : {kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kClampedSwiglu}) {
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
