// Back through the experts on a GPU: every gradient is one that the reference in double admits, and
// by bits where they are promised.

#include <utility>

#include "core/gpu/cuda_check.hpp"
#include "tests/cuda/experts_gradient_case.hpp"

namespace switchyard::test {
namespace {

constexpr const Implementation<ExpertsBackwardArgs>* kAllKernels[] = {&kExpertsBackwardGpu,
                                                                      &kExpertsBackwardGpuSm90};

/// Each test runs with all kernels that the device has.
class ExpertsBackwardOnTheDevice
    : public testing::TestWithParam<const Implementation<ExpertsBackwardArgs>*> {
 protected:
  void SetUp() override {
    if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  }
  static Way with(Way way) {
    way.kernels = GetParam();
    return way;
  }
  static void expect_right(const Problem& p, const Way& way = {}) {
    const Case layer(p);
    layer.expect_reference(layer.run(with(way)), way);
  }
};
INSTANTIATE_TEST_SUITE_P(Kernels, ExpertsBackwardOnTheDevice, testing::ValuesIn(kAllKernels),
                         [](const auto& kernels) {
                           return std::string(kernels.param->name).substr(5);
                         });

TEST_P(ExpertsBackwardOnTheDevice, SmallLayersAgreeWithTheReferenceInDouble) {
  for (const DType dtype : kTypes) {
    for (const bool keep : {true, false}) {
      SCOPED_TRACE(testing::Message() << to_string(dtype) << " kept " << keep);
      Problem p = problem(72, 40, dtype, {3, 0, 70, 1});
      p.gap = 5;
      expect_right(p, {.keep = keep});
    }
  }
}

TEST_P(ExpertsBackwardOnTheDevice, EveryActivationAgreesWithTheReferenceInDouble) {
  using enum Activation;
  for (const Activation activation :
       {kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kClampedSwiglu, kIdentity}) {
    for (const bool gated : {true, false}) {
      if (activation == kClampedSwiglu && !gated) continue;
      for (const DType dtype : kTypes) {
        SCOPED_TRACE(testing::Message()
                     << to_string(activation) << " gated " << gated << " " << to_string(dtype));
        Problem p = problem(40, 24, dtype, {9, 17});
        p.config.activation = activation;
        p.config.gated = gated;
        p.config.limit = 1.0F;
        p.config.bias = gated;
        expect_right(p, {.keep = gated, .accumulate = !gated});
      }
    }
  }
}

TEST_P(ExpertsBackwardOnTheDevice, SizesThatNoTileDividesAgreeWithTheReferenceInDouble) {
  for (const DType dtype : kTypes) {
    for (const auto& [hidden, inner] : {std::pair{8, 8}, {136, 264}, {264, 136}, {24, 128}}) {
      SCOPED_TRACE(testing::Message() << "H " << hidden << " I " << inner << to_string(dtype));
      Problem p = problem(hidden, inner, dtype, {33, 130, 1});
      p.gap = 3;
      expect_right(p);
    }
  }
  expect_right(problem(12, 20, DType::kF32, {9, 3}));  // 16 bytes are four values
}

TEST_P(ExpertsBackwardOnTheDevice, ManyRowsOfOneExpertAreSummedUpInParts) {
  for (const DType dtype : kTypes) {
    for (const Ints& rows : {Ints{700, 2}, Ints{0, 1025}, Ints{257, 600}}) {
      SCOPED_TRACE(testing::Message() << rows[0] << " and " << rows[1] << to_string(dtype));
      expect_right(problem(40, 24, dtype, rows), {.accumulate = rows[0] == 257});
    }
  }
}

TEST_P(ExpertsBackwardOnTheDevice, SmallGradientsInTheComputeTypeAreWrittenOrAdded) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const bool accumulate : {true, false}) {
      SCOPED_TRACE(testing::Message() << to_string(dtype) << " added " << accumulate);
      expect_right(problem(72, 40, dtype, {3, 0, 300}),
                   {.accumulate = accumulate, .gradients = dtype});
    }
  }
}

TEST_P(ExpertsBackwardOnTheDevice, SmallExpertsWithoutRowsGetZerosAndKeepWhatIsAddedTo) {
  for (const Ints& rows : {Ints{0, 0, 0}, Ints{0, 1, 0}}) {
    for (const bool accumulate : {true, false}) {
      for (const std::int32_t gap : {0, 4}) {
        Problem p = problem(40, 24, DType::kBF16, rows);
        p.gap = gap;
        expect_right(p, {.accumulate = accumulate});
      }
    }
  }
}

TEST_P(ExpertsBackwardOnTheDevice, KeptAndRecomputedPreActivationsAndTwoRunsGiveTheSameBits) {
  for (const DType dtype : kTypes) {
    for (const bool gated : {true, false}) {
      Problem p = problem(328, 200, dtype, {300, 0, 5, 129, 900});
      p.config.gated = gated;
      const Case layer(p);
      const Gradients first = layer.run(with({.keep = true}));
      EXPECT_TRUE(first == layer.run(with({.keep = true}))) << to_string(dtype) << gated;
      EXPECT_TRUE(first == layer.run(with({.keep = false}))) << to_string(dtype) << gated;
    }
  }
}

TEST_P(ExpertsBackwardOnTheDevice, RowsInMemoryOfTheCallerGiveTheSameBits) {
  for (const DType dtype : kTypes) {
    for (const bool gated : {true, false}) {
      Problem p = problem(328, 200, dtype, {300, 0, 5, 129, 900});
      p.gap = 3;
      p.config.gated = gated;
      const Case layer(p);
      const Gradients want = layer.run(with({}));
      for (const bool keep : {true, false}) {
        const Way way = with({.keep = keep, .lends = true});
        EXPECT_TRUE(want == layer.run(way)) << to_string(dtype) << gated << keep;
        layer.expect_rest_untouched(way);
      }
    }
  }
}

TEST_P(ExpertsBackwardOnTheDevice, SmallForwardThatKeepsThePreActivationGivesTheSameRows) {
  for (const DType dtype : kTypes) {
    for (const bool gated : {true, false}) {
      Problem p = problem(136, 264, dtype, {200, 0, 5, 64});
      p.gap = 2;
      p.config.gated = gated;
      const Case layer(p);
      EXPECT_EQ(layer.forward(true), layer.forward(false)) << to_string(dtype) << gated;
    }
  }
}

TEST_P(ExpertsBackwardOnTheDevice, ACapturedCallServesOtherPlans) {
  Problem p = problem(72, 40, DType::kBF16, {10, 700, 2});
  Case layer(p);
  const Way way = with({.keep = false});
  layer.reset(way);
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
  SWITCHYARD_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  layer.call(layer.args(way, stream), way);
  SWITCHYARD_CUDA(cudaStreamEndCapture(stream, &graph));
  SWITCHYARD_CUDA(cudaGraphInstantiate(&run, graph, 0));
  for (const Ints& rows : {Ints{10, 700, 2}, Ints{0, 0, 0}, Ints{400, 0, 300}}) {
    layer.set_rows(rows);
    layer.reset(way);
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
    SWITCHYARD_CUDA(cudaGraphLaunch(run, stream));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    const Gradients replayed = layer.gradients(way);
    EXPECT_TRUE(replayed == layer.run(way)) << rows[0];
    layer.expect_reference(replayed, way);
  }
  SWITCHYARD_CUDA(cudaGraphExecDestroy(run));
  SWITCHYARD_CUDA(cudaGraphDestroy(graph));
  SWITCHYARD_CUDA(cudaStreamDestroy(stream));
}

TEST_P(ExpertsBackwardOnTheDevice, SmallGradientsThatNobodyAsksForAreLeftAlone) {
  const Case layer(problem(72, 40, DType::kBF16, {3, 40}));
  const Way way = with({});
  const Gradients all = layer.run(way);
  layer.reset(way);
  static_cast<void>(layer.forward(true));
  ExpertsBackwardArgs only = layer.args(way);
  only.gradients = {.w2 = only.gradients.w2};
  only.drow_weight = {};
  only.dx_rows = {};
  layer.call(only, way);
  const Gradients one = layer.gradients(way);
  EXPECT_EQ(one.w2, all.w2);
  for (const Floats* left : {&one.weight, &one.dx, &one.w13, &one.b13, &one.b2}) {
    EXPECT_TRUE(std::all_of(left->begin(), left->end(), [](float v) { return std::isnan(v); }));
  }
}

TEST_P(ExpertsBackwardOnTheDevice, NanInAGradientPassesThrough) {
  const Case layer(problem(72, 40, DType::kBF16, {3, 40}));
  const Way way = with({});
  Floats dout(index_at((kTokens + 1) * 72), kNan);
  layer.dout.set(stored_as(DType::kBF16, dout));
  const Gradients got = layer.run(way);
  for (const Floats* values : {&got.weight, &got.dx, &got.w13, &got.w2, &got.b13, &got.b2}) {
    EXPECT_TRUE(std::all_of(values->begin(), values->end(), [](float v) { return std::isnan(v); }));
  }
}

TEST_P(ExpertsBackwardOnTheDevice, WhatCannotBeDoneIsNamed) {
  const Case layer(problem(72, 40, DType::kBF16, {3, 40}));
  ExpertsBackwardArgs call = layer.args({});
  --call.execution.workspace_bytes;
  EXPECT_THROW(experts_backward(call), Error);
  call = layer.args({});
  call.dx_rows.data += 1;
  EXPECT_THROW(experts_backward(call), Error);
  call = layer.args({});
  call.preactivation.dtype = DType::kF16;
  EXPECT_THROW(experts_backward(call), Error);
}

}  // namespace
}  // namespace switchyard::test
