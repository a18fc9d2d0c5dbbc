// The activations' sigmoid on a GPU against double, for all floats.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/activation.cuh"
#include "switchyard/device.hpp"
#include "testkit/gpu/device_array.hpp"

namespace switchyard {
namespace {

constexpr int kBlocks = 1056;
constexpr int kThreads = 256;

/// By which x * sigmoid(x) is off, over |x| (coarse) or the larger of |x| and 1: of all x whose
/// sigmoid a float has, a thread's largest.
template <bool kCoarse>
__global__ void largest_error(double* of_thread) {
  double largest = 0;
  const auto first = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (std::uint64_t bits = first; bits < std::uint64_t{1} << 32; bits += kBlocks * kThreads) {
    const float x = __uint_as_float(static_cast<std::uint32_t>(bits));
    if (!(fabsf(x) < 80.0F && fabsf(x) > 1e-30F)) continue;
    const double exact = x / (1.0 + exp(-static_cast<double>(x)));
    const double size =
        kCoarse ? fabs(static_cast<double>(x)) : fmax(fabs(static_cast<double>(x)), 1.0);
    largest = fmax(largest, fabs(sigmoid_weighted<kCoarse>(x, 1.0F) - exact) / size);
  }
  of_thread[first] = largest;
}

template <bool kCoarse>
double largest() {
  DeviceArray<double> of_threads(kBlocks * kThreads);
  largest_error<kCoarse><<<kBlocks, kThreads>>>(of_threads.data());
  const std::vector<double> all = of_threads.get();
  return *std::max_element(all.begin(), all.end());
}

TEST(Activation, SigmoidsAreWithinTheirBoundsForAllFloats) {
  if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  EXPECT_LE(largest<false>(), 3e-7);
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) GTEST_SKIP() << "not Hopper";
  const double coarse = largest<true>();
  EXPECT_LE(coarse, 0x1p-17);
  EXPECT_GT(coarse, 3e-7) << "what was measured is not the coarse one";
}

}  // namespace
}  // namespace switchyard
