// Soft-MoE on a GPU beside the CPU's, which tests/stages/soft_moe_test.cpp holds against its
// definition in double and its differences.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "layer/gpu/stage_calls.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/captured_graph.hpp"
#include "tests/cuda/mixing/gpu_soft_moe_case.hpp"

namespace switchyard::test {
namespace {

constexpr std::ptrdiff_t kSmall = 6;  // of the cases, the first

/// One token, one slot, one expert; columns that four divides and such that it does not; rows of a
/// warp and of a block; chunks of tokens, groups, sequences.
std::vector<SoftMoeCase> some_cases() {
  const ExpertConfig small{.num_experts = 3, .hidden = 16, .inner = 8};
  const ExpertConfig one{.num_experts = 1, .hidden = 8, .inner = 8};
  std::vector<SoftMoeCase> cases{
      {.config = {.slots = 2, .scale = 1.5F}, .num_tokens = 9, .experts = small},
      {.config = {.slots = 1, .group = 5, .normalize = false}, .num_tokens = 15, .experts = small},
      {.config = {.slots = 3, .group = 4, .sequence = 12, .causal = true, .scale = 3.0F},
       .num_tokens = 24,
       .experts = small},
      {.config = {.slots = 2, .group = 1}, .num_tokens = 3, .experts = small},
      {.config = {.slots = 1}, .num_tokens = 1, .experts = one},
      {.config = {.slots = 4}, .num_tokens = 33, .experts = one},
      {.config = {.slots = 40, .scale = 0.5F},
       .num_tokens = 70,
       .experts = {.num_experts = 2, .hidden = 40, .inner = 24, .gated = false}},
      {.config = {.slots = 1, .group = 350, .scale = 4.0F},
       .num_tokens = 700,
       .experts = {.num_experts = 5, .hidden = 264, .inner = 40}},
      {.config = {.slots = 300, .group = 150, .causal = true, .scale = 2.0F},
       .num_tokens = 300,
       .experts = {.num_experts = 4, .hidden = 72, .inner = 16}},
      {.config = {.slots = 415, .normalize = false, .scale = 0.2F},
       .num_tokens = 130,
       .experts = {.num_experts = 3, .hidden = 24, .inner = 16}},
      {.config = {.slots = 8, .scale = 5.0F},
       .num_tokens = 5000,
       .experts = {.num_experts = 4, .hidden = 64, .inner = 32}},
  };
  std::uint64_t seed = 1;
  for (SoftMoeCase& c : cases) c.fill(seed++);
  return cases;
}

double length_of(const Floats& values) {
  return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
}

/// @param size  Beside which differences are judged; 0: the largest of `want`.
void expect_near(const Floats& have, const Floats& want, double bound, const char* name,
                 double size = 0) {
  ASSERT_EQ(have.size(), want.size()) << name;
  if (size == 0) {
    size = 1e-3;
    for (const float value : want) size = std::max(size, std::abs(double{value}));
  }
  for (std::size_t i = 0; i < have.size(); ++i) {
    ASSERT_NEAR(have[i], want[i], bound * size) << name << " " << i;
  }
}

void expect_all_near(const SoftMoeResults& have, const SoftMoeResults& want, double bound,
                     double of_weights) {
  expect_near(have.y, want.y, bound, "y");
  expect_near(have.dispatch, want.dispatch, of_weights, "dispatch");
  expect_near(have.combine, want.combine, of_weights, "combine");
  expect_near(have.dx, want.dx, bound, "dx");
  expect_near(have.dphi, want.dphi, bound, "dphi");
  expect_near(have.dw13, want.dw13, bound, "dw13");
  expect_near(have.dw2, want.dw2, bound, "dw2");
  // A sum of many signs: its terms are as large as the outputs, dy being normal.
  expect_near(have.dscale, want.dscale, bound, "dscale",
              std::abs(double{want.dscale[0]}) + length_of(want.y));
}

void expect_numbers_of_a_cpu(const std::vector<SoftMoeCase>& cases) {
  const DType f32 = DType::kF32, bf16 = DType::kBF16, f16 = DType::kF16;
  int number = 0;
  for (const SoftMoeCase& made : cases) {
    for (const Types& types :
         {Types{}, Types{bf16, f32, f32, f32}, Types{bf16, bf16, bf16, bf16},
          Types{f16, f16, f16, f32}, Types{f16, bf16, bf16, f16}, Types{f32, bf16, f16, f32}}) {
      SCOPED_TRACE(testing::Message()
                   << "case " << number << " in " << to_string(types.compute) << ", phi "
                   << to_string(types.phi) << ", out " << to_string(types.out));
      const SoftMoeCase c = rounded(made, types);
      const auto bound_of = [&](DType dtype) {
        return dtype == f32 ? 3e-5 : dtype == f16 ? 1e-2 : 6e-2;
      };
      expect_all_near(run_on_gpu(c, types), run_soft_moe(c),
                      std::max(bound_of(types.compute), bound_of(types.out)), 2e-5);
    }
    ++number;
  }
}

TEST(GpuSoftMoe, SmallOutputsWeightsAndGradientsAreThoseOfACpu) {
  std::vector<SoftMoeCase> cases = some_cases();
  cases.resize(kSmall);
  expect_numbers_of_a_cpu(cases);
}

TEST(GpuSoftMoe, OutputsWeightsAndGradientsAreThoseOfACpu) {
  std::vector<SoftMoeCase> cases = some_cases();
  cases.erase(cases.begin(), cases.begin() + kSmall);
  expect_numbers_of_a_cpu(cases);
}

TEST(GpuSoftMoe, BitsAreThoseOfTheCallBefore) {
  for (const SoftMoeCase& c : some_cases()) {
    for (const Types& types : {Types{}, Types{.compute = DType::kBF16}}) {
      const SoftMoeResults first = run_on_gpu(c, types);
      EXPECT_TRUE(run_on_gpu(c, types) == first);
    }
  }
}

/// What keeps pre-activations is another kernel.
TEST(GpuSoftMoe, WhatIsMadeAgainIsNearWhatIsKeptAndInferenceHasItsBits) {
  for (SoftMoeCase c : some_cases()) {
    const SoftMoeResults kept = run_on_gpu(c);
    c.recompute = Recompute::kActivationInput;
    const SoftMoeResults made_again = run_on_gpu(c);
    expect_all_near(made_again, kept, 1e-5, 1e-6);
    const OnGpu arrays(c, {});
    soft_moe(arrays.forward(nullptr));
    EXPECT_EQ(arrays.results().y, made_again.y);
  }
}

TEST(GpuSoftMoe, GradientsOfParametersAreAddedWhereAsked) {
  for (const SoftMoeCase& c : some_cases()) {
    const SoftMoeResults want = run_on_gpu(c);
    const SoftMoeResults have = run_on_gpu(c, {}, true, 2.0F);
    const auto expect_sum = [](const Floats& sum, const Floats& part) {
      for (std::size_t i = 0; i < part.size(); ++i) {
        ASSERT_NEAR(sum[i], 2.0F + part[i], 1e-5F * (2 + std::abs(part[i]))) << i;
      }
    };
    EXPECT_EQ(have.dx, want.dx);
    expect_sum(have.dphi, want.dphi);
    expect_sum(have.dscale, want.dscale);
    expect_sum(have.dw13, want.dw13);
    expect_sum(have.dw2, want.dw2);
  }
}

TEST(GpuSoftMoe, GradientsThatNobodyAsksForChangeNoOther) {
  const SoftMoeCase c = some_cases()[2];
  const SoftMoeResults all = run_on_gpu(c);
  const auto only = [&](const auto& leave) {
    const OnGpu arrays(c, {}, 7.0F);
    SavedSoftMoe saved;
    soft_moe(arrays.forward(&saved));
    SoftMoeBackwardArgs args = arrays.backward(saved);
    leave(args);
    soft_moe_backward(args);
    return arrays.results();
  };
  const SoftMoeResults of_tokens = only(
      [](SoftMoeBackwardArgs& args) { args.dphi = {}, args.dscale = nullptr, args.experts = {}; });
  EXPECT_EQ(of_tokens.dx, all.dx);
  EXPECT_EQ(of_tokens.dphi, Floats(all.dphi.size(), 7.0F));
  const SoftMoeResults of_scale =
      only([](SoftMoeBackwardArgs& args) { args.dphi = {}, args.dx = {}; });
  EXPECT_EQ(of_scale.dscale, all.dscale);
  EXPECT_EQ(of_scale.dw13, all.dw13);
  const SoftMoeResults of_experts =
      only([](SoftMoeBackwardArgs& args) { args.dphi = {}, args.dx = {}, args.dscale = nullptr; });
  EXPECT_EQ(of_experts.dw2, all.dw2);
  EXPECT_EQ(of_experts.dscale, Floats{7.0F});
}

TEST(GpuSoftMoe, AGraphOfBothWaysServesNewTokens) {
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const SoftMoeCase& c : some_cases()) {
    for (const Types& types : {Types{}, Types{.compute = DType::kBF16}}) {
      SoftMoeCase other = c;
      std::reverse(other.x.begin(), other.x.end());
      std::reverse(other.dy.begin(), other.dy.end());
      const SoftMoeResults want = run_on_gpu(other, types);
      const OnGpu arrays(c, types);
      SavedSoftMoe saved;
      const auto both = [&] {
        soft_moe(arrays.forward(&saved, stream));
        soft_moe_backward(arrays.backward(saved, false, stream));
      };
      both();
      SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
      const CapturedGraph graph(stream, both);
      arrays.set(other);
      graph.launch();
      SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
      EXPECT_TRUE(arrays.results() == want);
    }
  }
  SWITCHYARD_CUDA(cudaStreamDestroy(stream));
}

TEST(GpuSoftMoe, WhatIsSavedDoesNotGrowInACapture) {
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const OnGpu arrays(some_cases()[0], {});
  SavedSoftMoe saved;
  expect_error(ErrorCode::kInvalidArgument, "while a stream is captured", [&] {
    const CapturedGraph graph(stream, [&] { soft_moe(arrays.forward(&saved, stream)); });
  });
  SWITCHYARD_CUDA(cudaStreamDestroy(stream));
}

TEST(GpuSoftMoe, SmallNoTokensAreNoWork) {
  SoftMoeCase c{.config = {.slots = 2},
                .num_tokens = 0,
                .experts = {.num_experts = 3, .hidden = 16, .inner = 8}};
  c.fill(12);
  for (const bool normalize : {false, true}) {
    c.config.normalize = normalize;
    const SoftMoeResults r = run_on_gpu(c);
    for (const Floats& gradient : {r.dphi, r.dscale, r.dw13, r.dw2}) {
      EXPECT_EQ(gradient, Floats(gradient.size(), 0.0F));
    }
  }
}

TEST(GpuSoftMoe, SmallASequenceOfOneCausalGroupIsZeroAndHasNoGradient) {
  SoftMoeCase c{.config = {.slots = 2, .causal = true},
                .num_tokens = 4,
                .experts = {.num_experts = 3, .hidden = 16, .inner = 8}};
  c.fill(13);
  const SoftMoeResults r = run_on_gpu(c);
  for (const Floats& zeros : {r.y, r.dispatch, r.combine, r.dx, r.dphi, r.dscale, r.dw13, r.dw2}) {
    EXPECT_EQ(zeros, Floats(zeros.size(), 0.0F));
  }
}

TEST(GpuSoftMoe, CausalOutputsDoNotDependOnLaterTokens) {
  SoftMoeCase c{.config = {.slots = 2, .group = 4, .causal = true},
                .num_tokens = 16,
                .experts = {.num_experts = 3, .hidden = 16, .inner = 8}};
  c.fill(9);
  const Floats before = run_on_gpu(c).y;
  for (std::int64_t from = 1; from < c.num_tokens; ++from) {
    SoftMoeCase other = c;
    const std::int64_t first = from * c.experts.hidden;
    for (std::size_t i = at(first); i < c.x.size(); ++i) other.x[i] = 3.0F - c.x[i];
    const Floats after = run_on_gpu(other).y;
    EXPECT_TRUE(std::equal(before.begin(), before.begin() + first, after.begin())) << from;
  }
}

TEST(GpuSoftMoe, ALogitThatIsNotFiniteGoesIntoTheStatus) {
  for (const bool normalize : {false, true}) {
    SoftMoeCase c{.config = {.slots = 2, .normalize = normalize},
                  .num_tokens = 12,
                  .experts = {.num_experts = 3, .hidden = 16, .inner = 8}};
    c.fill(16);
    c.x[4 * 16 + 3] = std::nanf("");
    c.x[9 * 16] = std::nanf("");
    const OnGpu arrays(c, {});
    SoftMoeArgs args = arrays.forward(nullptr);
    soft_moe(args);
    EXPECT_EQ(arrays.status().nan_logit >> 32, 4U);
    EXPECT_EQ(arrays.status().nan_logit & 0xffffffffU, 0U);
    args.execution.status = nullptr;
    soft_moe(args);
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
  }
}

TEST(GpuSoftMoe, ExpertsThatKeepScratchGiveTheSameBitsAndRaiseWhatTheyFindLater) {
  SoftMoeCase c = some_cases()[2];
  const SoftMoeResults want = run_on_gpu(c);
  const OnGpu arrays(c, {});
  const auto calls = make_fused_experts(arrays.make_weights());
  SavedSoftMoe saved;
  for (int turn = 0; turn < 2; ++turn) {
    calls->mix(arrays.forward(&saved), nullptr);
    calls->mix_backward(c.config, c.num_tokens, arrays.backward(saved), nullptr);
    calls->check();
    EXPECT_TRUE(arrays.results() == want);
  }
  c.x[4 * 16 + 3] = std::nanf("");
  arrays.set(c);
  calls->mix(arrays.forward(nullptr), nullptr);
  expect_error(ErrorCode::kInvalidArgument, "the logit of token 4 and slot 0 is not finite",
               [&] { calls->check(); });
  calls->check();
}

TEST(GpuSoftMoe, RefusesByNameWhatDoesNotFit) {
  const SoftMoeCase c = some_cases()[0];
  const OnGpu arrays(c, {});
  SavedSoftMoe saved;
  SoftMoeArgs args = arrays.forward(&saved);
  const std::int64_t bytes = args.execution.workspace_bytes;
  args.execution.workspace_bytes = bytes - 1;
  expect_error(ErrorCode::kInvalidArgument,
               "soft_moe needs " + std::to_string(bytes) + " bytes of workspace",
               [&] { soft_moe(args); });
  args = arrays.forward(&saved);
  args.out.data += 4;
  expect_error(ErrorCode::kUnsupported, "not aligned to 16 bytes", [&] { soft_moe(args); });
  args = arrays.forward(&saved);
  args.execution.backend = Backend::kCpu;
  expect_error(ErrorCode::kInvalidArgument, "weights are on cuda, the call is for cpu",
               [&] { soft_moe(args); });
  soft_moe(arrays.forward(&saved));
  EXPECT_TRUE(saved.ready());
  SoftMoeBackwardArgs back = arrays.backward(saved);
  back.execution.workspace_bytes = 0;
  expect_error(ErrorCode::kInvalidArgument, "soft_moe_backward needs",
               [&] { soft_moe_backward(back); });
  soft_moe_backward(arrays.backward(saved));
  EXPECT_FALSE(saved.ready());
  expect_error(ErrorCode::kInvalidArgument, "was used by a backward already",
               [&] { soft_moe_backward(arrays.backward(saved)); });
}

TEST(GpuSoftMoe, WhatIsSavedOnACpuIsNoForwardOfAGpu) {
  const SoftMoeCase c = some_cases()[0];
  const OnGpu arrays(c, {});
  SavedSoftMoe saved;
  const auto on_cpu = weights_of(c);
  Floats y(c.x.size());
  soft_moe({.x = raw_of(c.x, c.experts.hidden),
            .phi = raw_of(c.phi, c.experts.hidden),
            .weights = on_cpu.get(),
            .config = c.config,
            .out = raw_of(y, c.experts.hidden),
            .saved = &saved});
  expect_error(ErrorCode::kInvalidArgument, "what is saved is of a forward on cpu",
               [&] { soft_moe_backward(arrays.backward(saved)); });
  soft_moe(arrays.forward(&saved));  // takes it over
  soft_moe_backward(arrays.backward(saved));
  expect_near(arrays.results().y, y, 3e-5, "y");
}

}  // namespace
}  // namespace switchyard::test
