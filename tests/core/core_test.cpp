#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "core/half.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

TEST(Half, EveryF16SurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float value = f16_to_float(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(f16_to_float(float_to_f16(value))));
    } else {
      ASSERT_EQ(float_to_f16(value), bits) << value;
    }
  }
}

TEST(Half, EveryBf16SurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float value = bf16_to_float(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(value))));
    } else {
      ASSERT_EQ(float_to_bf16(value), bits) << value;
    }
  }
}

TEST(Half, NarrowingRoundsHalfwayCasesToEvenAndOverflowsToInfinity) {
  for (std::uint32_t bits = 0; bits < 0x7bffU; ++bits) {
    const float low = f16_to_float(static_cast<std::uint16_t>(bits));
    const float high = f16_to_float(static_cast<std::uint16_t>(bits + 1));
    const float middle = 0.5F * (low + high);  // exact: one bit more than f16
    ASSERT_EQ(float_to_f16(middle), bits + (bits & 1U));
    ASSERT_EQ(float_to_f16(std::nextafter(middle, low)), bits);
    ASSERT_EQ(float_to_f16(std::nextafter(middle, high)), bits + 1);
  }
  EXPECT_EQ(float_to_f16(65519.996F), 0x7bffU);
  EXPECT_EQ(float_to_f16(65520.0F), 0x7c00U);
  EXPECT_EQ(float_to_bf16(1.00390625F), 0x3f80U);  // halfway, even below
  EXPECT_EQ(float_to_bf16(1.01171875F), 0x3f82U);  // halfway, even above
}

TEST(ThreadPool, CallsEveryIndexOnceForAnyNumberOfThreads) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (const std::int64_t count : {0, 1, 2, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<std::size_t>(count));
      pool.parallel_for(count, [&](std::int64_t i, int worker) {
        ASSERT_GE(worker, 0);
        ASSERT_LT(worker, threads);
        ++calls[static_cast<std::size_t>(i)];
      });
      for (const auto& n : calls) EXPECT_EQ(n, 1);
    }
  }
}

TEST(ThreadPool, RethrowsTheErrorOfABodyAndWorksAgain) {
  ThreadPool pool(3);
  EXPECT_THROW(pool.parallel_for(100,
                                 [](std::int64_t i, int) {
                                   if (i == 50) throw std::runtime_error("fifty");
                                 }),
               std::runtime_error);
  std::atomic<int> sum{0};
  pool.parallel_for(10, [&](std::int64_t i, int) { sum += static_cast<int>(i); });
  EXPECT_EQ(sum, 45);
}

}  // namespace
}  // namespace switchyard
