// The stages around the experts behind each other on a GPU, in a graph, and what they refuse.
#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "reference/reference.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/error.hpp"
#include "switchyard/pack.hpp"
#include "switchyard/route.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/captured_graph.hpp"
#include "testkit/gpu/stage_support.hpp"

namespace switchyard {
namespace {

using test::message_of;

/// The weights [T, K] of the chosen experts, each within its bound: the last bits of exp are the
/// device's own.
void expect_weights(const RouterConfig& config, std::span<const float> logits,
                    std::span<const std::int32_t> expert, std::span<const float> weight) {
  const std::size_t top_k = index(config.top_k());
  const std::size_t num_experts = index(config.num_experts);
  for (std::size_t t = 0; t * top_k < expert.size(); ++t) {
    std::vector<reference::Bounded> row;
    for (const float logit : logits.subspan(t * num_experts, num_experts))
      row.push_back({logit, 0});
    const auto want = reference::chosen_weights(config, row, expert.subspan(t * top_k, top_k));
    ASSERT_EQ(reference::check_weights(want, weight.subspan(t * top_k, top_k)), "")
        << "token " << t;
  }
}

TEST(StagesCuda, AGraphOfAllStagesFollowsNewRoutingWhenReplayed) {
  constexpr std::int64_t kTokens = 500, kHidden = 256, kExperts = 16, kTopK = 4;
  const StageContext context(kTokens, kTopK, kExperts, kHidden);
  const DeviceArray<float> logits(kTokens * kExperts), weight(kTokens * kTopK),
      sums(kTokens * kHidden);
  const DeviceArray<std::int32_t> expert(kTokens * kTopK);
  const DeviceArray<std::uint8_t> kept(kTokens * kTopK);
  const DeviceArray<std::int64_t> counts(kExperts), counts_kept(kExperts);
  const PlanOnDevice device(kTokens, kTopK, kExperts, kTokens * kTopK);
  const std::vector<float> x = random_floats(kTokens * kHidden, 1);
  const DeviceArray<float> device_x(x), rows(kTokens * kTopK * kHidden);
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreate(&stream));
  const auto all = [&](const Execution& execution, Matrix<const float> in, const Routing& routing,
                       Matrix<std::uint8_t> keep, Vector<std::int64_t> wanted,
                       Vector<std::int64_t> had, const PlanView& view, const float* tokens,
                       float* packed, float* out) {
    route({.logits = in,
           .config = {.num_experts = kExperts, .kind = TopKRouter{.top_k = kTopK}},
           .routing = routing,
           .execution = execution});
    apply_capacity(
        {.assignments = DenseAssignments{.expert = routing.expert, .weight = routing.weight},
         .num_experts = kExperts,
         .capacity = 100,
         .policy = DropPolicy::kChoice,
         .kept = flat(keep),
         .counts = wanted,
         .counts_kept = had,
         .execution = execution});
    plan({.assignments = DenseAssignments{.expert = routing.expert, .weight = routing.weight},
          .kept = flat(keep),
          .plan = view,
          .execution = execution});
    pack({.x = {reinterpret_cast<const std::byte*>(tokens), DType::kF32, kTokens, kHidden},
          .plan = view,
          .rows = {reinterpret_cast<std::byte*>(packed), DType::kF32, kTokens * kTopK, kHidden},
          .execution = execution});
    combine({.rows = {reinterpret_cast<const std::byte*>(packed), DType::kF32, kTokens * kTopK,
                      kHidden},
             .plan = view,
             .reduced = {.sums = {reinterpret_cast<std::byte*>(out), DType::kF32, kTokens, kHidden},
                         .subtree = {.order = {.num_experts = kExperts}}},
             .execution = execution});
  };
  const CapturedGraph graph(stream, [&] {
    all(context.execution(stream), logits.matrix(kTokens, kExperts),
        {.expert = expert.matrix(kTokens, kTopK), .weight = weight.matrix(kTokens, kTopK)},
        kept.matrix(kTokens, kTopK), counts.vector(), counts_kept.vector(), device.view(),
        device_x.data(), rows.data(), sums.data());
  });
  for (unsigned seed = 0; seed < 20; ++seed) {
    const std::vector<float> values = random_floats(kTokens * kExperts, seed);
    logits.set(values);
    graph.launch();
    std::vector<std::int32_t> host_expert(kTokens * kTopK);
    std::vector<float> own_weight(kTokens * kTopK), packed(kTokens * kTopK * kHidden),
        out(kTokens * kHidden);
    std::vector<std::uint8_t> host_kept(kTokens * kTopK);
    std::vector<std::int64_t> a(kExperts), b(kExperts);
    Plan owner;
    const PlanView view = owner.reserve(kTokens, kTopK, kExperts, kTokens * kTopK);
    all({}, {values.data(), {kTokens, kExperts}},
        {.expert = {host_expert.data(), {kTokens, kTopK}},
         .weight = {own_weight.data(), {kTokens, kTopK}}},
        {host_kept.data(), {kTokens, kTopK}}, {a.data(), {kExperts}}, {b.data(), {kExperts}}, view,
        x.data(), packed.data(), out.data());
    ASSERT_EQ(expert.get(), host_expert);
    ASSERT_EQ(kept.get(), host_kept);
    expect_weights({.num_experts = kExperts, .kind = TopKRouter{.top_k = kTopK}}, values,
                   host_expert, weight.get());
    const std::vector<float> got = sums.get();
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], out[i], 1e-5);
  }
  cudaStreamDestroy(stream);
}

TEST(StagesCuda, WhatNoKernelAcceptsIsAnErrorWithTheReason) {
  const StageContext context(4, 2, 2000, 12);
  const DeviceArray<float> data(10000);
  const DeviceArray<std::int32_t> ids(8);
  EXPECT_NE(message_of([&] {
              route({.logits = data.matrix(4, 2000),
                     .config = {.num_experts = 2000, .kind = TopKRouter{.top_k = 2}},
                     .routing = {.expert = ids.matrix(4, 2), .weight = data.matrix(4, 2)},
                     .execution = context.execution()});
            }).find("num_experts exceeds 1024"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              router_gemm({.tokens = {data.bytes(), DType::kF32, 4, 12},
                           .gate = {data.bytes(), DType::kF32, 8, 12},
                           .logits = data.matrix(4, 8),
                           .execution = context.execution()});
            }).find("not a multiple of 8"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              router_gemm({.tokens = {data.bytes() + 4, DType::kF32, 4, 16},
                           .gate = {data.bytes(), DType::kF32, 8, 16},
                           .logits = data.matrix(4, 8),
                           .execution = context.execution()});
            }).find("not aligned"),
            std::string::npos);
  Execution small = context.execution();
  small.workspace_bytes = 256;
  const PlanOnDevice device(4, 2, 4, 8);
  EXPECT_NE(message_of([&] {
              plan({.assignments =
                        DenseAssignments{.expert = ids.matrix(4, 2), .weight = data.matrix(4, 2)},
                    .plan = device.view(),
                    .execution = small});
            }).find("bytes of workspace"),
            std::string::npos);
}

}  // namespace
}  // namespace switchyard
