// What a call on a layer refuses before it works.
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "switchyard/layer.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kTokens = 5;
constexpr std::int64_t kExperts = 4;
constexpr std::int64_t kTopK = 2;
constexpr std::int64_t kHidden = 24;
constexpr std::int64_t kInner = 8;

class Contract : public testing::Test {
 protected:
  Contract() {
    model_.config.router = {.num_experts = kExperts, .kind = TopKRouter{.top_k = kTopK}};
    model_.config.experts = {.num_experts = kExperts, .hidden = kHidden, .inner = kInner};
    model_.experts =
        make_memory_source(model_.config.experts, DType::kF32, w13_.data(), w2_.data());
    model_.gate = random_floats(kExperts * kHidden, 3U);
    layer_.emplace(model_, LayerOptions{});
    args_ = {.tokens = matrix(memory_.data()), .out = matrix(memory_.data() + kTokens * kHidden)};
  }
  static RawMatrix matrix(float* data) {
    return {reinterpret_cast<std::byte*>(data), DType::kF32, kTokens, kHidden};
  }
  void refuse(const char* words) {
    test::expect_error(ErrorCode::kInvalidArgument, words, [&] { layer_->forward(args_); });
  }

  std::vector<float> w13_ = random_floats(kExperts * 2 * kInner * kHidden, 1U);
  std::vector<float> w2_ = random_floats(kExperts * kHidden * kInner, 2U);
  std::vector<float> memory_ = random_floats(2 * kTokens * kHidden, 4U);
  std::vector<std::int32_t> ids_ = std::vector<std::int32_t>(kTokens * kTopK, 1);
  std::vector<float> weights_ = std::vector<float>(kTokens * kTopK, 0.5F);
  LayerModel model_;
  std::optional<MoeLayer> layer_;
  ForwardArgs args_;
};

TEST_F(Contract, AnIdOfAGivenRoutingThatIsNoExpertIsNamed) {
  args_.expert = {ids_.data(), {kTokens, kTopK}};
  args_.weight = {weights_.data(), {kTokens, kTopK}};
  layer_->forward(args_);
  for (const std::int32_t wrong : {4, -2}) {
    ids_[7] = wrong;
    refuse(
        ("expert[3, 1] is " + std::to_string(wrong) + ", want -1 (unused) or less than 4").c_str());
  }
  ids_[7] = -1;
  layer_->forward(args_);
}

TEST_F(Contract, AnOutputThatOverlapsTheTokensIsRefused) {
  for (const std::int64_t at : {std::int64_t{0}, kHidden, kTokens * kHidden - 1}) {
    args_.out = matrix(memory_.data() + at);
    refuse("out overlaps tokens: it needs memory of its own");
  }
  args_.out = matrix(memory_.data() + kTokens * kHidden);
  layer_->forward(args_);
}

#ifndef NDEBUG
/// Calls the layer again while it works.
class CallsAgain final : public StageRecorder {
 public:
  explicit CallsAgain(const std::function<void()>& call) : call_(call) {}
  void begin(std::string_view /*stage*/, void* /*stream*/) override { call_(); }
  void end(std::string_view /*stage*/, const StageWork& /*work*/, void* /*stream*/) override {}

 private:
  std::function<void()> call_;
};

TEST_F(Contract, InADebugBuildACallDuringAnotherIsRefusedAndBothAreNamed) {
  int refused = 0;
  CallsAgain recorder([&] {
    ForwardArgs again = args_;
    again.recorder = nullptr;
    test::expect_error(
        ErrorCode::kInvalidArgument,
        "MoeLayer::forward is called while MoeLayer::forward is under way on the same object",
        [&] { layer_->forward(again); });
    test::expect_error(ErrorCode::kInvalidArgument,
                       "MoeLayer::check is called while MoeLayer::forward is under way",
                       [&] { layer_->check(); });
    ++refused;
  });
  args_.recorder = &recorder;
  layer_->forward(args_);
  EXPECT_GT(refused, 0);
}
#endif

}  // namespace
}  // namespace switchyard
