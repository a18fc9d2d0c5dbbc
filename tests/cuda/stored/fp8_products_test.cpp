// Grouped products of e4m3 on a GPU against sums in double of what the codes mean: each of the two
// by itself, on the rows that it was given.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/grouped/fp8/product.hpp"
#include "experts/gpu/grouped/gemm.hpp"
#include "experts/gpu/weights.hpp"
#include "layer/gpu/wire_rows.hpp"
#include "reference/expert.hpp"
#include "reference/fp8.hpp"
#include "switchyard/device.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/made_experts.hpp"
#include "testkit/quantised_source.hpp"

namespace switchyard {
namespace {

using reference::Bounded;
using reference::Fp8Row;

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

  /// Every row of x: the codes and scales of the rule, exactly.
  void expect_quantised() const {
    const auto values = loaded_as_floats(DType::kBF16, stored_as(DType::kBF16, x_));
    for (std::int64_t row = 0; row < num_tokens_; ++row) {
      std::vector<Bounded> numbers;
      for (std::int64_t k = 0; k < p_.hidden; ++k) {
        numbers.push_back({values[at(row * p_.hidden + k)], 0});
      }
      ASSERT_EQ(row_of_x(row).value, reference::quantised(numbers).value) << row;
    }
  }

  void expect_act() {
    for (std::int32_t e = 0; e < config_.num_experts; ++e) {
      const reference::Fp8Expert expert = reference::read_fp8_expert(config_, source_, e);
      for (std::int64_t row = begin_[at(e)]; row < begin_[at(e) + 1]; ++row) {
        const Fp8Row x = row_of_x(token_[at(row)]);
        std::vector<Bounded> inner;
        for (std::int64_t i = 0; i < p_.inner; ++i) {
          inner.push_back(reference::inner_value(
              config_, reference::fp8_dot(expert.gate, i, x, expert.gate_bias),
              reference::fp8_dot(expert.up, i, x, expert.up_bias), reference::kFp8FactorError));
        }
        const Fp8Row want = reference::quantised(inner);
        const Fp8Row got = row_of_act(row);
        for (std::size_t i = 0; i < inner.size(); ++i) {
          // Both scales are roundings of one number.
          const double error = want.error[i] + std::abs(want.value[i]) * 1e-6;
          note(std::abs(got.value[i] - want.value[i]), error);
          ASSERT_LE(std::abs(got.value[i] - want.value[i]), error)
              << "row " << row << ", column " << i;
        }
      }
    }
  }

  void expect_y() {
    for (std::int32_t e = 0; e < config_.num_experts; ++e) {
      const reference::Fp8Expert expert = reference::read_fp8_expert(config_, source_, e);
      for (std::int64_t row = begin_[at(e)]; row < begin_[at(e) + 1]; ++row) {
        const Fp8Row act = row_of_act(row);
        for (std::int64_t h = 0; h < p_.hidden; ++h) {
          const Bounded sum = reference::fp8_dot(expert.down, h, act, expert.down_bias);
          const double got = y_[at(row * p_.hidden + h)];
          note(std::abs(got - sum.value) - std::abs(sum.value) * 0x1p-9, sum.error);
          ASSERT_TRUE(reference::admits(sum, DType::kBF16, got))
              << "row " << row << ", column " << h << ": " << got << ", not " << sum.value << " +- "
              << sum.error;
        }
      }
    }
  }

  /// Of what the bounds allow, the most that was off.
  [[nodiscard]] double most() const { return most_; }

 private:
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  void note(double off, double allowed) { most_ = std::max(most_, off / allowed); }

  static Fp8Row row_of(const std::vector<std::uint8_t>& codes, const std::vector<float>& scales,
                       std::int64_t row, std::int64_t cols) {
    return reference::fp8_row(
        std::span(codes).subspan(at(row * cols), at(cols)),
        std::span(scales).subspan(at(row * blocks_of(cols)), at(blocks_of(cols))));
  }
  [[nodiscard]] Fp8Row row_of_x(std::int64_t row) const {
    return row_of(x_codes_, x_scales_, row, p_.hidden);
  }
  [[nodiscard]] Fp8Row row_of_act(std::int64_t row) const {
    return row_of(act_codes_, act_scales_, row, p_.inner);
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
    quantise_rows({.x = {x.data(), DType::kBF16, num_tokens_, p_.hidden}},
                  {codes.data(), DType::kF8E4M3, num_tokens_, p_.hidden},
                  {scales.data(), {num_tokens_, blocks_of(p_.hidden)}}, nullptr);
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
  double most_ = 0;
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
  Products products(problem);
  products.expect_quantised();
  products.expect_act();
  products.expect_y();
  std::printf("%s: at most %.3f of the bound\n", problem.name.c_str(), products.most());
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
