// Grouped products of e4m3 on a GPU against sums in double of what the codes mean: each of the two
// by itself, on the rows that it was given.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/fp8.hpp"
#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/grouped/fp8/product.hpp"
#include "experts/gpu/grouped/gemm.hpp"
#include "experts/gpu/weights.hpp"
#include "reference/expert.hpp"
#include "switchyard/device.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/made_experts.hpp"
#include "testkit/quantised_source.hpp"

namespace switchyard {
namespace {

struct Problem {
  std::string name;
  std::int64_t hidden = 256, inner = 128;
  std::vector<std::int32_t> rows;
  bool gathers = true;
  bool bias = false;
  Activation activation = Activation::kSilu;
};

std::int64_t blocks_of(std::int64_t cols) { return (cols + 127) / 128; }

class Products {
 public:
  explicit Products(const Problem& p)
      : p_(p),
        config_{.num_experts = static_cast<std::int32_t>(p.rows.size()),
                .hidden = p.hidden,
                .inner = p.inner,
                .activation = p.activation,
                .bias = p.bias},
        source_(config_, WeightFormat::kE4M3, 21) {
    weights_ = load_experts({.config = config_,
                             .source = &source_,
                             .dtype = DType::kBF16,
                             .num_local = config_.num_experts,
                             .format = WeightFormat::kE4M3,
                             .execution = {.backend = Backend::kCuda}});
    begin_.push_back(0);
    for (const std::int32_t rows : p.rows) begin_.push_back(begin_.back() + rows);
    std::mt19937 random(3);
    num_tokens_ = p.gathers ? 37 : num_rows();
    for (std::int64_t row = 0; row < num_rows(); ++row) {
      token_.push_back(static_cast<std::int32_t>(p.gathers ? random() % 37 : row));
    }
    x_ = random_floats(num_tokens_ * p.hidden, random);
    run();
  }

  [[nodiscard]] std::int64_t num_rows() const { return begin_.back(); }

  /// Every row of x: the scale of its largest value, codes nearest to it.
  void expect_quantised() const {
    const auto values = loaded_as_floats(DType::kBF16, stored_as(DType::kBF16, x_));
    for (std::int64_t row = 0; row < num_tokens_; ++row) {
      for (std::int64_t block = 0; block < blocks_of(p_.hidden); ++block) {
        double largest = 1e-4;
        for (std::int64_t k = block * 128; k < std::min(p_.hidden, block * 128 + 128); ++k) {
          largest = std::max(largest, std::abs(double{values[at(row * p_.hidden + k)]}));
        }
        const double scale = x_scales_[at(row * blocks_of(p_.hidden) + block)];
        ASSERT_NEAR(scale, largest / 448, largest / 448 * 1e-6);
        for (std::int64_t k = block * 128; k < std::min(p_.hidden, block * 128 + 128); ++k) {
          const double value = values[at(row * p_.hidden + k)];
          ASSERT_LE(std::abs(x_at(row, k) - value), rounding(value, scale)) << row << ", " << k;
        }
      }
    }
  }

  void expect_act() const {
    for (std::int32_t e = 0; e < config_.num_experts; ++e) {
      const std::vector<float> gate = matrix(e, ExpertPart::kGate, p_.inner, p_.hidden);
      const std::vector<float> up = matrix(e, ExpertPart::kUp, p_.inner, p_.hidden);
      const std::vector<float> gate_bias = bias(e, ExpertPart::kGate, p_.inner);
      const std::vector<float> up_bias = bias(e, ExpertPart::kUp, p_.inner);
      for (std::int64_t row = begin_[at(e)]; row < begin_[at(e) + 1]; ++row) {
        for (std::int64_t block = 0; block < blocks_of(p_.inner); ++block) {
          const std::int64_t end = std::min(p_.inner, block * 128 + 128);
          const double scale = act_scales_[at(row * blocks_of(p_.inner) + block)];
          double largest = 1e-4;
          double most_error = 0;
          for (std::int64_t i = block * 128; i < end; ++i) {
            const auto x = [&](std::int64_t k) { return x_at(token_[at(row)], k); };
            const Sum g = dot(gate, i, p_.hidden, x, gate_bias[at(i)]);
            const Sum u = dot(up, i, p_.hidden, x, up_bias[at(i)]);
            const reference::Bounded value =
                reference::inner_value(config_, {g.value, g.error}, {u.value, u.error});
            largest = std::max(largest, std::abs(value.value));
            most_error = std::max(most_error, value.error);
            ASSERT_LE(std::abs(act_at(row, i) - value.value),
                      value.error + rounding(value.value, scale))
                << "row " << row << ", column " << i;
          }
          ASSERT_NEAR(scale, largest / 448, (largest * 1e-5 + most_error) / 448);
        }
      }
    }
  }

  void expect_y() const {
    for (std::int32_t e = 0; e < config_.num_experts; ++e) {
      const std::vector<float> down = matrix(e, ExpertPart::kDown, p_.hidden, p_.inner);
      const std::vector<float> down_bias = bias(e, ExpertPart::kDown, p_.hidden);
      for (std::int64_t row = begin_[at(e)]; row < begin_[at(e) + 1]; ++row) {
        for (std::int64_t h = 0; h < p_.hidden; ++h) {
          const Sum sum = dot(
              down, h, p_.inner, [&](std::int64_t k) { return act_at(row, k); }, down_bias[at(h)]);
          const double got = y_[at(row * p_.hidden + h)];
          ASSERT_LE(std::abs(got - sum.value), sum.error + std::abs(sum.value) * 0x1p-8)
              << "row " << row << ", column " << h;
        }
      }
    }
  }

 private:
  struct Sum {
    double value, error;
  };
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  /// Half a step of e4m3 around a value, and what the scale's own rounding adds.
  static double rounding(double value, double scale) {
    return std::max(std::abs(value) * 0x1p-4, scale * 0x1p-10) * 1.001;
  }
  [[nodiscard]] double x_at(std::int64_t row, std::int64_t k) const {
    return double{e4m3_to_float(x_codes_[at(row * p_.hidden + k)])} *
           x_scales_[at(row * blocks_of(p_.hidden) + k / 128)];
  }
  [[nodiscard]] double act_at(std::int64_t row, std::int64_t k) const {
    return double{e4m3_to_float(act_codes_[at(row * p_.inner + k)])} *
           act_scales_[at(row * blocks_of(p_.inner) + k / 128)];
  }
  [[nodiscard]] std::vector<float> matrix(std::int32_t e, ExpertPart part, std::int64_t rows,
                                          std::int64_t cols) const {
    std::vector<float> values(at(rows * cols));
    source_.read(e, part, 0, rows, DType::kF32, values.data());
    return values;
  }
  [[nodiscard]] std::vector<float> bias(std::int32_t e, ExpertPart part, std::int64_t size) const {
    std::vector<float> values(at(size));
    if (p_.bias) source_.read_bias(e, part, values.data());
    return values;
  }
  /// The tensor core's sums of 128 lose 2^-13 of their magnitudes, those in fp32 little beside it.
  template <typename X>
  static Sum dot(const std::vector<float>& matrix, std::int64_t row, std::int64_t cols, X&& x,
                 double bias) {
    Sum sum{bias, 0};
    double magnitude = std::abs(bias);
    for (std::int64_t k = 0; k < cols; ++k) {
      const double product = double{matrix[at(row * cols + k)]} * x(k);
      sum.value += product;
      magnitude += std::abs(product);
    }
    sum.error = magnitude * 0x1p-13 + 1e-30;
    return sum;
  }

  void run() {
    const auto& weights = static_cast<const CudaExpertWeights&>(*weights_);
    const std::int64_t rows = num_rows();
    const DeviceArray<std::byte> x(stored_as(DType::kBF16, x_));
    DeviceArray<std::byte> codes(at(num_tokens_ * p_.hidden));
    DeviceArray<float> scales(at(num_tokens_ * blocks_of(p_.hidden)));
    DeviceArray<std::byte> act(at(rows * p_.inner));
    DeviceArray<float> act_scales(at(rows * blocks_of(p_.inner)));
    DeviceArray<std::byte> y(at(rows * p_.hidden * 2));
    const DeviceArray<std::int32_t> begin(begin_);
    const DeviceArray<std::int32_t> used(p_.rows);
    const DeviceArray<std::int32_t> token(token_);
    DeviceArray<std::byte> counters(
        std::vector<std::byte>(grouped_gemm_workspace_bytes(), std::byte{0}));
    launch_fp8_quantise(x.data(), num_tokens_, p_.hidden, codes.data(), scales.data(), nullptr);
    const Fp8GroupedParams params{.x = {codes.data(), scales.data()},
                                  .row_token = p_.gathers ? token.data() : nullptr,
                                  .w13 = weights.w13(),
                                  .scales13 = weights.scales13(),
                                  .b13 = weights.b13(),
                                  .act = act.data(),
                                  .act_scales = act_scales.data(),
                                  .w2 = weights.w2(),
                                  .scales2 = weights.scales2(),
                                  .b2 = weights.b2(),
                                  .y = y.data(),
                                  .weight_maps = &weights.maps(),
                                  .expert_begin = begin.data(),
                                  .expert_rows = used.data(),
                                  .counters = reinterpret_cast<std::int32_t*>(counters.data()),
                                  .num_experts = config_.num_experts,
                                  .max_rows = rows,
                                  .num_tokens = num_tokens_,
                                  .hidden = p_.hidden,
                                  .inner = p_.inner,
                                  .activation = config_.activation,
                                  .alpha = config_.alpha,
                                  .limit = config_.limit};
    for (int again = 0; again < 2; ++again) {  // counters are left as they were found
      launch_fp8_gate_up(params, nullptr);
      launch_fp8_down(params, nullptr);
    }
    const auto bytes = [](const std::vector<std::byte>& from) {
      std::vector<std::uint8_t> out(from.size());
      std::memcpy(out.data(), from.data(), from.size());
      return out;
    };
    x_codes_ = bytes(codes.get());
    x_scales_ = scales.get();
    act_codes_ = bytes(act.get());
    act_scales_ = act_scales.get();
    y_ = loaded_as_floats(DType::kBF16, y.get());
  }

  Problem p_;
  ExpertConfig config_;
  QuantisedSource source_;
  std::unique_ptr<ExpertWeights> weights_;
  std::int64_t num_tokens_ = 0;
  std::vector<std::int32_t> begin_, token_;
  std::vector<float> x_, x_scales_, act_scales_, y_;
  std::vector<std::uint8_t> x_codes_, act_codes_;
};

class Fp8Products : public testing::Test {
 protected:
  void SetUp() override {
    if (num_devices() == 0) GTEST_SKIP() << "no GPU";
    if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) GTEST_SKIP() << "not Hopper";
  }
};

void expect_right(const Problem& problem) {
  SCOPED_TRACE(problem.name);
  const Products products(problem);
  products.expect_quantised();
  products.expect_act();
  products.expect_y();
}

TEST_F(Fp8Products, SmallRowsAreThoseOfSumsInDouble) {
  expect_right({.name = "one row", .rows = {0, 1, 0}});
  expect_right({.name = "odd counts", .hidden = 144, .inner = 80, .rows = {3, 70, 0, 9}});
}

TEST_F(Fp8Products, RowsAreThoseOfSumsInDouble) {
  expect_right(
      {.name = "halves of blocks", .hidden = 320, .inner = 192, .rows = {64, 65, 128, 129}});
  expect_right({.name = "stacks", .hidden = 256, .inner = 384, .rows = {300, 1, 517}});
  expect_right(
      {.name = "columns that are no whole tile", .hidden = 528, .inner = 272, .rows = {200, 40}});
  expect_right({.name = "many steps", .hidden = 2064, .inner = 1040, .rows = {30, 130}});
  expect_right(
      {.name = "not gathered", .hidden = 256, .inner = 128, .rows = {140, 7}, .gathers = false});
  expect_right({.name = "biases",
                .hidden = 384,
                .inner = 256,
                .rows = {33, 150},
                .bias = true,
                .activation = Activation::kClampedSwiglu});
  expect_right({.name = "many experts",
                .hidden = 128,
                .inner = 128,
                .rows = std::vector<std::int32_t>(300, 2)});
}

}  // namespace
}  // namespace switchyard
