#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/half.hpp"
#include "switchyard/layer.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kTokens = 9;
constexpr std::int64_t kExperts = 6;
constexpr std::int64_t kHidden = 40;
constexpr std::int64_t kInner = 8;

std::vector<std::byte> stored(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * static_cast<std::size_t>(size_of(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_float(bytes.data(), dtype, static_cast<std::int64_t>(i), values[i]);
  }
  return bytes;
}

/// A layer but for its router.
class Parameters : public testing::Test {
 protected:
  Parameters() {
    model.config.router = {.num_experts = kExperts, .kind = TopKRouter{.top_k = 2}};
    model.config.experts = {.num_experts = kExperts, .hidden = kHidden, .inner = kInner};
    model.experts = make_memory_source(model.config.experts, DType::kF32, w13.data(), w2.data());
  }

  [[nodiscard]] static Parameter view(const std::vector<std::byte>& bytes, DType dtype) {
    return {bytes.data(), dtype, std::ssize(bytes) / size_of(dtype), Backend::kCpu};
  }
  [[nodiscard]] std::vector<float> forward(MoeLayer& layer) const {
    std::vector<float> out(x.size());
    layer.forward(
        {.tokens = {reinterpret_cast<const std::byte*>(x.data()), DType::kF32, kTokens, kHidden},
         .out = {reinterpret_cast<std::byte*>(out.data()), DType::kF32, kTokens, kHidden}});
    return out;
  }
  [[nodiscard]] std::vector<float> forward() const {
    MoeLayer layer(model, {});
    return forward(layer);
  }

  std::vector<float> x = random_floats(kTokens * kHidden, 1);
  std::vector<float> w13 = random_floats(kExperts * 2 * kInner * kHidden, 2);
  std::vector<float> w2 = random_floats(kExperts * kHidden * kInner, 3);
  LayerModel model;
};

TEST_F(Parameters, AGateOf16BitsRoutesAsItsValuesInF32) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<float> values = random_floats(kExperts * kHidden, 4);
    for (float& value : values) value = round_to(dtype, value);
    const std::vector<std::byte> bytes = stored(values, dtype);
    model.gate = view(bytes, dtype);
    const std::vector<float> narrow = forward();
    model.gate = values;
    EXPECT_EQ(narrow, forward());
  }
}

TEST_F(Parameters, WhatTheCallerWritesCountsFromTheNextCallOn) {
  const std::vector<float> first = random_floats(kExperts * kHidden, 5);
  const std::vector<float> second = random_floats(kExperts * kHidden, 6);
  std::vector<float> bias(kExperts, 0.0F);
  std::vector<std::byte> gate = stored(first, DType::kF32);
  model.gate = view(gate, DType::kF32);
  model.router_bias = Parameter(bias.data(), DType::kF32, kExperts, Backend::kCpu);
  MoeLayer layer(model, {});
  const std::vector<float> before = forward(layer);
  std::ranges::copy(stored(second, DType::kF32), gate.begin());  // where it lies
  bias[1] = 2.0F;
  const std::vector<float> after = forward(layer);
  EXPECT_NE(after, before);
  model.router_bias = std::vector<float>(kExperts, 0.0F);
  model.gate = first;
  EXPECT_EQ(before, forward());
  model.router_bias = bias;
  model.gate = second;
  EXPECT_EQ(after, forward());
}

TEST_F(Parameters, ValuesOfItsOwnStayAsTheyWereAndAreSharedByCopies) {
  std::vector<float> values = random_floats(kExperts * kHidden, 7);
  model.gate = values;
  MoeLayer layer(model, {});
  const std::vector<float> before = forward(layer);
  const Parameter copy = model.gate;
  EXPECT_EQ(copy.floats().data(), model.gate.floats().data());
  values.assign(values.size(), 0.0F);
  model.gate = {};
  EXPECT_EQ(forward(layer), before);
}

TEST_F(Parameters, OfAnotherSizeTypeOrPlaceAreRefusedByName) {
  const std::vector<float> values = random_floats(kExperts * kHidden, 8);
  const auto refuse = [&](ErrorCode code, const char* words) {
    test::expect_error(code, words, [&] { (void)forward(); });
  };
  refuse(ErrorCode::kInvalidArgument, "gate has 0 values, want 240");
  model.gate = Parameter(values.data(), DType::kF32, 240, Backend::kCuda);
  refuse(ErrorCode::kInvalidArgument, "gate lies on cuda, the layer on cpu");
  model.gate = values;
  model.selection_bias = std::vector<float>(kExperts - 1);
  refuse(ErrorCode::kInvalidArgument, "selection_bias has 5 values, want 6");
  model.selection_bias = Parameter(values.data(), DType::kBF16, kExperts, Backend::kCpu);
  refuse(ErrorCode::kInvalidArgument, "selection_bias is bf16, want f32");
  test::expect_error(ErrorCode::kInvalidArgument, "a parameter is fp8, want f32, bf16 or f16",
                     [&] { Parameter(values.data(), DType::kF8E4M3, 1, Backend::kCpu); });
  test::expect_error(ErrorCode::kInvalidArgument, "a parameter lies on a GPU", [&] {
    (void)Parameter(values.data(), DType::kF32, 1, Backend::kCuda).floats();
  });
}

}  // namespace
}  // namespace switchyard
