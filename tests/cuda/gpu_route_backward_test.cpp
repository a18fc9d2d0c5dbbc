// The router's way back on a GPU, each stage by itself, against the reference in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <type_traits>

#include "core/gpu/cuda_device.hpp"
#include "switchyard/device.hpp"
#include "testkit/chosen.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/router_backward_checks.hpp"

namespace switchyard {
namespace {

using test::Chosen;
using test::expect_error;
using test::Products;
using test::Routed;

constexpr Score kScores[] = {Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid};
constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

/// Memory on the GPU with what the host's has, and the way back.
class Copied {
 public:
  Copied(void* host, std::int64_t bytes)
      : host_(static_cast<std::byte*>(host)), memory_(static_cast<std::size_t>(bytes)) {
    memory_.set(std::vector<std::byte>(host_, host_ + bytes));
  }
  [[nodiscard]] std::byte* data() const { return memory_.as<std::byte>(); }
  void back() const {
    const auto values =
        copy_out<std::byte>(data(), static_cast<std::int64_t>(memory_.bytes()), nullptr);
    std::copy(values.begin(), values.end(), host_);
  }

 private:
  std::byte* host_;
  DeviceBytes memory_;
};

template <typename Tensor>
Copied copied(const Tensor& tensor) {
  using Value = std::remove_const_t<std::remove_pointer_t<decltype(tensor.data)>>;
  return {const_cast<Value*>(tensor.data), tensor.size() * std::int64_t{sizeof(Value)}};
}
Copied copied(const ConstRawMatrix& m) { return {const_cast<std::byte*>(m.data), m.bytes()}; }

void route_on_gpu(RouteBackwardArgs args) {
  const Copied logits = copied(args.logits);
  const Copied expert = copied(args.expert);
  const Copied dweight = copied(args.dweight);
  const Copied dlogits = copied(args.dlogits);
  args.logits.data = reinterpret_cast<const float*>(logits.data());
  args.expert.data = reinterpret_cast<const std::int32_t*>(expert.data());
  args.dweight.data = reinterpret_cast<const float*>(dweight.data());
  args.dlogits.data = reinterpret_cast<float*>(dlogits.data());
  args.execution.backend = Backend::kCuda;
  route_backward(args);
  dlogits.back();
}

std::string last_products;  // products_on_gpu()'s implementation

void products_on_gpu(RouterGemmBackwardArgs args) {
  Chosen chosen;
  const Copied tokens = copied(args.tokens);
  const Copied gate = copied(args.gate);
  const Copied dlogits = copied(args.dlogits);
  const Copied dtokens = copied(args.dtokens);
  const Copied dgate = copied(ConstRawMatrix(args.dgate));
  const Copied dbias = copied(args.dbias);
  const DeviceBytes workspace(static_cast<std::size_t>(
      router_gemm_backward_workspace_bytes(args.tokens.rows, args.gate.rows, args.gate.cols)));
  args.tokens.data = tokens.data();
  args.gate.data = gate.data();
  args.dlogits.data = reinterpret_cast<const float*>(dlogits.data());
  if (args.dtokens.data != nullptr) args.dtokens.data = reinterpret_cast<float*>(dtokens.data());
  if (args.dgate.data != nullptr) args.dgate.data = dgate.data();
  if (args.dbias.data != nullptr) args.dbias.data = reinterpret_cast<float*>(dbias.data());
  args.execution = {.backend = Backend::kCuda,
                    .workspace = workspace.data(),
                    .workspace_bytes = static_cast<std::int64_t>(workspace.bytes()),
                    .recorder = &chosen};
  router_gemm_backward(args);
  last_products = chosen.name;
  dtokens.back(), dgate.back(), dbias.back();
}

void expect_every_rule(std::int64_t tokens, std::int32_t num_experts, std::int32_t top_k,
                       float size) {
  for (const Score score : kScores) {
    for (const bool renormalize : {true, false}) {
      SCOPED_TRACE(testing::Message()
                   << static_cast<int>(score) << " renormalised " << renormalize << " E "
                   << num_experts << " K " << top_k << " T " << tokens << " size " << size);
      const TopKRouter kind{
          .top_k = top_k, .score = score, .renormalize = renormalize, .scale = 2.5F};
      const Routed routed(tokens, num_experts, kind, size, 3);
      routed.expect_reference(false, route_on_gpu);
      routed.expect_reference(true, route_on_gpu);
    }
  }
}

TEST(RouteBackwardOnGpu, SmallRoutersOfEveryRuleAgreeWithTheReferenceInDouble) {
  for (const std::int32_t top_k : {1, 2, 9}) {
    for (const std::int64_t tokens : {0, 1, 5, 50}) expect_every_rule(tokens, 9, top_k, 1.0F);
  }
}

TEST(RouteBackwardOnGpu, ManyExpertsAndAllOfThemAgreeWithTheReferenceInDouble) {
  expect_every_rule(300, 256, 8, 1.0F);
  expect_every_rule(70, 32, 32, 1.0F);
  expect_every_rule(40, 100, 31, 1.0F);
  expect_every_rule(20, 1024, 32, 2.0F);
}

TEST(RouteBackwardOnGpu, LogitsThatSaturateEveryScoreAgreeWithTheReference) {
  for (const float size : {20.0F, 60.0F, 300.0F, 1e10F}) expect_every_rule(40, 6, 3, size);
}

TEST(RouteBackwardOnGpu, SmallRoutingsWithUnusedPlacesAgreeWithTheReference) {
  for (const Score score : kScores) {
    Routed routed(8, 5, {.top_k = 3, .score = score}, 1.0F, 9);
    for (std::size_t t = 0; t < 8; ++t) routed.expert[3 * t + 1] = -1;
    routed.expert[0] = routed.expert[2] = -1;
    routed.expect_reference(false, route_on_gpu);
    routed.expect_reference(true, route_on_gpu);
  }
}

TEST(RouteBackwardOnGpu, TheScoreSparseMixerIsRefusedByName) {
  const Routed routed(8, 5, {.top_k = 2, .score = Score::kSparseMixer}, 1.0F, 9);
  expect_error(ErrorCode::kUnsupported, "sparse-mixer",
               [&] { (void)routed.back(false, route_on_gpu); });
}

TEST(RouterGemmBackwardOnGpu, SmallProductsOfEveryTypeAgreeWithTheReferenceInDouble) {
  for (const DType of_tokens : kTypes) {
    for (const DType of_gate : kTypes) {
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(testing::Message() << to_string(of_tokens) << " " << to_string(of_gate)
                                        << (accumulate ? " added" : " written"));
        const auto expect = [&](std::int64_t t, std::int64_t h, std::int64_t e) {
          SCOPED_TRACE(testing::Message() << "T " << t << " H " << h << " E " << e);
          Products(t, h, e, of_tokens, of_gate).expect_reference(accumulate, products_on_gpu);
        };
        expect(0, 8, 3);
        expect(1, 8, 1);
        expect(1, 24, 70);
        expect(19, 72, 5);
        expect(33, 136, 17);
      }
    }
  }
}

TEST(RouterGemmBackwardOnGpu, EveryTileAndPartsOfTokensAgreeWithTheReferenceInDouble) {
  for (const DType dtype : kTypes) {
    SCOPED_TRACE(to_string(dtype));
    Products(700, 264, 8, dtype, dtype).expect_reference(true, products_on_gpu);
    Products(600, 200, 60, dtype, dtype).expect_reference(false, products_on_gpu);
    Products(515, 136, 130, dtype, dtype).expect_reference(false, products_on_gpu);
    Products(40, 128, 1024, dtype, dtype).expect_reference(false, products_on_gpu);
  }
}

TEST(RouterGemmBackwardOnGpu, WhatAFewTokensNeedIsNeverMoreThanWhatManyDo) {
  for (const auto& [h, e] : {std::array<std::int64_t, 2>{2048, 128}, {520, 9}, {4096, 384}}) {
    std::int64_t before = 0;
    for (std::int64_t t = 1; t < 20000; t += t < 5000 ? 1 : 97) {
      const std::int64_t bytes = router_gemm_backward_workspace_bytes(t, e, h);
      ASSERT_GE(bytes, before) << "T " << t << " H " << h << " E " << e;
      before = bytes;
    }
  }
}

TEST(RouterGemmBackwardOnGpu, HoppersTilesOfBf16TokensAgreeWithTheReferenceInDouble) {
  for (const DType of_gate : {DType::kBF16, DType::kF32}) {
    for (const auto& [t, h, e] : {std::array<std::int64_t, 3>{300, 520, 128},
                                  {700, 776, 40},
                                  {129, 264, 129},
                                  {70, 72, 384},
                                  {65, 1032, 65},
                                  // Several tiles of a block, of one set of columns and of more.
                                  {20000, 264, 3},
                                  {1, 102408, 3},
                                  {200, 25608, 3}}) {
      SCOPED_TRACE(testing::Message()
                   << to_string(of_gate) << " T " << t << " H " << h << " E " << e);
      Products(t, h, e, DType::kBF16, of_gate).expect_reference(e % 2 != 0, products_on_gpu);
      const bool hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
      EXPECT_EQ(last_products == "cuda.sm90", hopper && (of_gate == DType::kBF16 || e <= 128));
    }
  }
}

TEST(RouterGemmBackwardOnGpu, HopperSumsOverTokensForMoreExpertsThanItsOtherProductHasRoomFor) {
  const Products products(700, 264, 1500, DType::kBF16, DType::kF32);
  const Products::Result all = products.back(false, products_on_gpu);
  EXPECT_EQ(last_products, "cuda.tensor_cores");
  const Products::Result sums = products.back(false, [](RouterGemmBackwardArgs args) {
    args.dtokens = {};
    products_on_gpu(args);
  });
  const bool hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
  EXPECT_EQ(last_products == "cuda.sm90", hopper);
  const std::vector<float> have = loaded_as_floats(DType::kF32, sums.dgate);
  const std::vector<float> want = loaded_as_floats(DType::kF32, all.dgate);
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(have[i], want[i], 1e-4F) << i;
  for (std::size_t e = 0; e < all.dbias.size(); ++e) {
    ASSERT_NEAR(sums.dbias[e], all.dbias[e], 1e-4F) << e;
  }
}

TEST(RouterGemmBackwardOnGpu, ATokensGradientHasTheSameBitsInAnyBatch) {
  for (const DType of_gate : {DType::kBF16, DType::kF32}) {
    // Blocks have several tiles of the many, one of the few.
    constexpr std::ptrdiff_t kHidden = 776, kExperts = 128, kFirst = 4001, kFew = 70;
    const Products many(9000, kHidden, kExperts, DType::kBF16, of_gate);
    Products few = many;
    few.num_tokens = kFew;
    few.tokens.assign(many.tokens.begin() + kFirst * kHidden * 2,
                      many.tokens.begin() + (kFirst + kFew) * kHidden * 2);
    few.dlogits.assign(many.dlogits.begin() + kFirst * kExperts,
                       many.dlogits.begin() + (kFirst + kFew) * kExperts);
    const std::vector<float> of_many = many.back(false, products_on_gpu).dtokens;
    const std::vector<float> of_few = few.back(false, products_on_gpu).dtokens;
    EXPECT_TRUE(std::equal(of_few.begin(), of_few.end(), of_many.begin() + kFirst * kHidden))
        << to_string(of_gate);
  }
}

TEST(RouterGemmBackwardOnGpu, RunsGiveTheSameBits) {
  const auto expect = [](const Products& products) {
    const Products::Result once = products.back(true, products_on_gpu);
    for (int run = 0; run < 3; ++run) {
      EXPECT_TRUE(products.back(true, products_on_gpu) == once)
          << to_string(products.token_type) << " E " << products.num_experts;
    }
  };
  for (const DType dtype : kTypes) expect(Products(3000, 520, 72, dtype, DType::kF32));
  for (const std::int64_t experts : {64, 128, 256, 384}) {
    expect(Products(3000, 520, experts, DType::kBF16, DType::kBF16));
  }
}

TEST(RouterGemmBackwardOnGpu, WhatIsNotAskedForNeedsNoMemoryAndOddWidthsAreRefusedByName) {
  const Products products(40, 64, 5, DType::kBF16, DType::kF32);
  const Products::Result all = products.back(false, products_on_gpu);
  const Products::Result tokens = products.back(false, [](RouterGemmBackwardArgs args) {
    args.dgate = {};
    args.dbias = {};
    products_on_gpu(args);
  });
  EXPECT_EQ(tokens.dtokens, all.dtokens);
  const Products odd(4, 12, 5, DType::kBF16, DType::kF32);
  expect_error(ErrorCode::kUnsupported, "multiple of 8",
               [&] { (void)odd.back(false, products_on_gpu); });
}

}  // namespace
}  // namespace switchyard
