// The experts stage on a GPU: every value of its rows is one that the reference admits.

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/weights.hpp"
#include "reference/expert.hpp"
#include "switchyard/device.hpp"
#include "switchyard/experts.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/made_experts.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kHidden = 72;
constexpr std::int64_t kInner = 40;
const std::vector<std::int32_t> kRows = {3, 0, 70, 1};
const std::vector<std::int32_t> kBegin = {0, 3, 3, 73, 74};
constexpr std::int64_t kTokens = 20;
constexpr std::int64_t kMaxRows = 80;

class ExpertsOnTheDevice : public testing::Test {
 protected:
  ExpertsOnTheDevice() {
    std::mt19937 random(6);
    made_ = make_experts({.num_experts = 4, .hidden = kHidden, .inner = kInner, .bias = true},
                         DType::kBF16, random);
    source_ = made_.source();
    x_ = random_floats(kTokens * kHidden, random);
    for (std::int64_t row = 0; row < kMaxRows; ++row) {
      token_.push_back(row < 74 ? static_cast<std::int32_t>(random() % kTokens) : -1);
    }
  }
  void SetUp() override {
    if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  }

  /// Row `row` of the result, by the reference.
  [[nodiscard]] std::vector<reference::Bounded> want(std::int32_t expert, std::size_t row) const {
    const reference::Precision precision{.compute = DType::kBF16};
    const std::vector<float> x(x_.begin() + token_[row] * kHidden,
                               x_.begin() + (token_[row] + 1) * kHidden);
    return reference::expert_row(made_.config,
                                 reference::read_expert(made_.config, *source_, expert, precision),
                                 reference::as_computed(x, DType::kBF16), precision);
  }

  [[nodiscard]] std::unique_ptr<ExpertWeights> load() const {
    return load_experts({.config = made_.config,
                         .source = source_.get(),
                         .dtype = DType::kBF16,
                         .num_local = 4,
                         .execution = {.backend = Backend::kCuda}});
  }

  MadeExperts made_;
  std::unique_ptr<ExpertSource> source_;
  std::vector<float> x_;
  std::vector<std::int32_t> token_;
};

/// A call on the fixture's weights in bf16.
struct Call {
  explicit Call(const std::vector<float>& tokens, const std::vector<std::int32_t>& row_token,
                const ExpertWeights& weights)
      : x(stored_as(DType::kBF16, tokens)), token(row_token) {
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
  DeviceArray<std::byte> x, rows{std::size_t{2} * kMaxRows * kHidden};
  DeviceArray<std::int32_t> begin{kBegin}, used{kRows}, token;
  DeviceArray<std::byte> workspace{
      std::vector<std::byte>(static_cast<std::size_t>(bytes), std::byte{0})};
  ExpertsArgs args;
};

TEST_F(ExpertsOnTheDevice, SmallLayerGivesTheRowsThatTheReferenceAdmits) {
  const auto weights = load();
  Call call(x_, token_, *weights);
  experts(call.args);
  const std::vector<float> got = loaded_as_floats(DType::kBF16, call.rows.get());
  for (std::int32_t expert = 0; expert < 4; ++expert) {
    for (std::int32_t i = 0; i < kRows[static_cast<std::size_t>(expert)]; ++i) {
      const auto row = static_cast<std::size_t>(kBegin[static_cast<std::size_t>(expert)] + i);
      const std::vector<reference::Bounded> right = want(expert, row);
      for (std::size_t h = 0; h < kHidden; ++h) {
        ASSERT_TRUE(reference::admits(right[h], DType::kBF16, double{got[row * kHidden + h]}))
            << row << ", " << h << " is " << got[row * kHidden + h] << ", want " << right[h].value
            << " +- " << right[h].error;
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
  const std::vector<std::byte> first = call.rows.get();
  experts(call.args);
  EXPECT_EQ(maps.size(), made);
  EXPECT_EQ(call.rows.get(), first);
}

}  // namespace
}  // namespace switchyard
