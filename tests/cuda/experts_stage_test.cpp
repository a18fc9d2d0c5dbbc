// The experts stage on a GPU: the same weights, plan and tokens as on the CPU give the same rows.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "core/gpu/cuda_device.hpp"
#include "core/half.hpp"
#include "experts/gpu/weights.hpp"
#include "switchyard/device.hpp"
#include "switchyard/experts.hpp"
#include "testkit/gpu/device_array.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kHidden = 72;
constexpr std::int64_t kInner = 40;
const std::vector<std::int32_t> kRows = {3, 0, 70, 1};
const std::vector<std::int32_t> kBegin = {0, 3, 3, 73, 74};
constexpr std::int64_t kTokens = 20;
constexpr std::int64_t kMaxRows = 80;

std::vector<float> normal_values(std::int64_t count, double scale, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, static_cast<float>(scale));
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = bf16_to_float(float_to_bf16(normal(random)));
  return values;
}

std::vector<std::uint16_t> to_bf16(const std::vector<float>& values) {
  std::vector<std::uint16_t> bits;
  for (const float value : values) bits.push_back(float_to_bf16(value));
  return bits;
}

class ExpertsOnTheDevice : public testing::Test {
 protected:
  ExpertsOnTheDevice()
      : w13_(normal_values(4 * 2 * kInner * kHidden, 1 / std::sqrt(kHidden), 1)),
        w2_(normal_values(4 * kHidden * kInner, 1 / std::sqrt(kInner), 2)),
        b13_(normal_values(4 * 2 * kInner, 1, 3)),
        b2_(normal_values(4 * kHidden, 1, 4)),
        x_(normal_values(kTokens * kHidden, 1, 5)) {
    std::mt19937 random(6);
    for (std::int64_t row = 0; row < kMaxRows; ++row) {
      token_.push_back(row < 74 ? static_cast<std::int32_t>(random() % kTokens) : -1);
    }
    source_ =
        make_memory_source(config_, DType::kF32, w13_.data(), w2_.data(), b13_.data(), b2_.data());
  }
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  }

  /// Row `row` of the result by plain loops in double, the intermediate rounded as promised.
  [[nodiscard]] std::vector<double> want(std::size_t expert, std::size_t row) const {
    const float* x = x_.data() + token_[row] * kHidden;
    std::vector<double> act(kInner);
    for (std::size_t j = 0; j < kInner; ++j) {
      double gate = b13_[expert * 2 * kInner + j];
      double up = b13_[(expert * 2 + 1) * kInner + j];
      for (std::size_t h = 0; h < kHidden; ++h) {
        gate += double{x[h]} * w13_[(expert * 2 * kInner + j) * kHidden + h];
        up += double{x[h]} * w13_[((expert * 2 + 1) * kInner + j) * kHidden + h];
      }
      act[j] = round_to(DType::kBF16, static_cast<float>(gate / (1 + std::exp(-gate)) * up));
    }
    std::vector<double> y(kHidden);
    for (std::size_t h = 0; h < kHidden; ++h) {
      y[h] = b2_[expert * kHidden + h];
      for (std::size_t j = 0; j < kInner; ++j) {
        y[h] += act[j] * w2_[(expert * kHidden + h) * kInner + j];
      }
    }
    return y;
  }

  [[nodiscard]] std::unique_ptr<ExpertWeights> load() const {
    return load_experts({.config = config_,
                         .source = source_.get(),
                         .dtype = DType::kBF16,
                         .num_local = 4,
                         .execution = {.backend = Backend::kCuda}});
  }

  ExpertConfig config_{.num_experts = 4, .hidden = kHidden, .inner = kInner, .bias = true};
  std::vector<float> w13_, w2_, b13_, b2_, x_;
  std::vector<std::int32_t> token_;
  std::unique_ptr<ExpertSource> source_;
};

/// A call on the fixture's weights in bf16.
struct Call {
  explicit Call(const std::vector<float>& tokens, const std::vector<std::int32_t>& row_token,
                const ExpertWeights& weights)
      : x(to_bf16(tokens)), token(row_token) {
    args = {
        .x = {x.bytes(), DType::kBF16, kTokens, kHidden},
        .weights = &weights,
        .rows = {rows.bytes(), DType::kBF16, kMaxRows, kHidden},
        .execution = {
            .backend = Backend::kCuda, .workspace = workspace.data(), .workspace_bytes = bytes}};
    args.plan.num_experts = 4;
    args.plan.expert_begin = begin.vector();
    args.plan.expert_rows = used.vector();
    args.plan.row_token = token.vector();
  }

  std::int64_t bytes = experts_workspace_bytes(kMaxRows, kInner, DType::kBF16);
  DeviceArray<std::uint16_t> x, rows{std::size_t{kMaxRows} * kHidden};
  DeviceArray<std::int32_t> begin{kBegin}, used{kRows}, token;
  DeviceArray<std::byte> workspace{
      std::vector<std::byte>(static_cast<std::size_t>(bytes), std::byte{0})};
  ExpertsArgs args;
};

TEST_F(ExpertsOnTheDevice, SmallLayerGivesTheRowsOfPlainLoops) {
  const auto weights = load();
  Call call(x_, token_, *weights);
  experts(call.args);
  const std::vector<std::uint16_t> got = call.rows.get();
  for (std::size_t expert = 0; expert < 4; ++expert) {
    for (std::int32_t i = 0; i < kRows[expert]; ++i) {
      const auto row = static_cast<std::size_t>(kBegin[expert] + i);
      const std::vector<double> right = want(expert, row);
      for (std::size_t h = 0; h < kHidden; ++h) {
        // Half an ulp of the result, and one of an intermediate value that rounds the other way.
        EXPECT_NEAR(bf16_to_float(got[row * kHidden + h]), right[h],
                    std::abs(right[h]) / 256 + 0.01)
            << row << ", " << h;
      }
    }
  }
  --call.args.execution.workspace_bytes;
  EXPECT_THROW(experts(call.args), Error);
}

TEST_F(ExpertsOnTheDevice, TensorMapsOfTheWeightsAreMadeByTheFirstCallAndThenFound) {
  const auto weights = load();
  const auto& maps = static_cast<const CudaExpertWeights&>(*weights).maps();
  Call call(x_, token_, *weights);
  EXPECT_EQ(maps.size(), 0U);
  experts(call.args);
  const std::size_t made = maps.size();
  EXPECT_EQ(made > 0, device_attribute(cudaDevAttrComputeCapabilityMajor) == 9);
  const std::vector<std::uint16_t> first = call.rows.get();
  experts(call.args);
  EXPECT_EQ(maps.size(), made);
  EXPECT_EQ(call.rows.get(), first);
}

}  // namespace
}  // namespace switchyard
