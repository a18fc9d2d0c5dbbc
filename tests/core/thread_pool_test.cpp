// Loops on a pool's own threads and on those of an OpenMP runtime, which the process loads here as
// torch would: by dlopen, for nobody else to see.
#include "switchyard/thread_pool.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/threads/thread_sanitizer.hpp"
#include "switchyard/names.hpp"
#include "testkit/expect_error.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace switchyard {
namespace {

constexpr bool kThreadSanitizer = SWITCHYARD_THREAD_SANITIZER != 0;

constexpr const char* kVariable = "SWITCHYARD_THREAD_RUNTIME";

/// GNU's runtime, loaded by the first who asks.
void* openmp() {
  static void* const handle = dlopen("libgomp.so.1", RTLD_NOW | RTLD_LOCAL);
  EXPECT_NE(handle, nullptr) << dlerror();
  return handle;
}

/// Calls `body` on each member of an OpenMP team.
template <typename Body>
void in_region(unsigned num_threads, const Body& body) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  const auto parallel = reinterpret_cast<Parallel>(dlsym(openmp(), "GOMP_parallel"));
  parallel([](void* data) { (*static_cast<const Body*>(data))(); },
           const_cast<void*>(static_cast<const void*>(&body)), num_threads, 0);
}

std::int64_t sum_to(ThreadPool& pool, std::int64_t count) {
  std::atomic<std::int64_t> sum{0};
  pool.parallel_for(count, [&](std::int64_t i, int) { sum += i; });
  return sum;
}

// First, before another test of this process has loaded one.
TEST(WithoutOpenMp, AutoIsThreadsOfItsOwnAndOpenMpIsRefused) {
  EXPECT_EQ(ThreadPool(2).runtime(), ThreadRuntime::kOwn);
  EXPECT_EQ(test::message_of([] { const ThreadPool pool(2, ThreadRuntime::kOpenMp); }),
            "unsupported: no OpenMP runtime is loaded in this process");
}

class ThreadPoolOn : public testing::TestWithParam<ThreadRuntime> {
 protected:
  void SetUp() override { ASSERT_NE(openmp(), nullptr); }
};

TEST_P(ThreadPoolOn, CallsEveryIndexOnceForAnyNumberOfThreads) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads, GetParam());
    EXPECT_EQ(pool.num_threads(), threads);
    EXPECT_EQ(pool.runtime(), GetParam());
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

TEST_P(ThreadPoolOn, NoTwoThreadsAreTheSameWorkerAtOnce) {
  constexpr int kThreads = 4;
  ThreadPool pool(kThreads, GetParam());
  std::vector<std::atomic<int>> inside(kThreads);
  std::atomic<int> shared{0};
  pool.parallel_for(2000, [&](std::int64_t, int worker) {
    std::atomic<int>& mine = inside[static_cast<std::size_t>(worker)];
    if (++mine != 1) ++shared;
    std::this_thread::yield();
    --mine;
  });
  EXPECT_EQ(shared, 0);
}

TEST_P(ThreadPoolOn, RethrowsTheErrorOfABodyAndWorksAgain) {
  ThreadPool pool(3, GetParam());
  EXPECT_THROW(pool.parallel_for(100,
                                 [](std::int64_t i, int) {
                                   if (i == 50) throw std::runtime_error("fifty");
                                 }),
               std::runtime_error);
  EXPECT_EQ(sum_to(pool, 10), 45);
}

TEST_P(ThreadPoolOn, WhatTheThreadsWroteIsSeenAfterTheLoopAndInTheNextOne) {
  ThreadPool pool(3, GetParam());
  std::vector<int> values(300);
  for (int round = 1; round <= 50; ++round) {
    pool.parallel_for(300, [&](std::int64_t i, int) { ++values[static_cast<std::size_t>(i)]; });
    for (const int value : values) ASSERT_EQ(value, round);
  }
}

TEST_P(ThreadPoolOn, PoolsOfSeveralCallersDoNotDisturbEachOther) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      ThreadPool pool(2, GetParam());
      for (int round = 0; round < 50; ++round) wrong += sum_to(pool, 100) == 4950 ? 0 : 1;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

#if defined(__x86_64__)
TEST_P(ThreadPoolOn, EveryIndexIsComputedInTheCallersFloatingPointMode) {
  ThreadPool pool(3, GetParam());
  const unsigned before = _mm_getcsr();
  for (const unsigned mode : {0x1f80U, 0x9fc0U}) {  // denormals kept, denormals are zeros
    _mm_setcsr(mode);
    std::atomic<int> kept{0};
    pool.parallel_for(300, [&](std::int64_t, int) {
      const volatile float tiny = 1e-39F;
      if (tiny * 0.5F != 0) ++kept;
      std::this_thread::yield();
    });
    EXPECT_EQ(kept, mode == 0x1f80U ? 300 : 0);
    EXPECT_EQ(_mm_getcsr() & 0xffc0U, mode & 0xffc0U);
  }
  _mm_setcsr(before);
}
#endif

TEST_P(ThreadPoolOn, AChildOfForkHasThreadsOfItsOwnForAPoolOfItsParent) {
  if (kThreadSanitizer) GTEST_SKIP() << "the thread sanitizer has no threads after a fork";
  ThreadPool pool(3, GetParam());
  ASSERT_EQ(sum_to(pool, 100), 4950);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // instead of a test that hangs
    {
      ThreadPool made_here(2);
      if (sum_to(made_here, 100) != 4950) _exit(2);
      if (made_here.runtime() != ThreadRuntime::kOwn) _exit(3);
    }
    if (sum_to(pool, 100) != 4950) _exit(4);
    if (pool.runtime() != ThreadRuntime::kOwn) _exit(5);
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(sum_to(pool, 100), 4950) << "the parent goes on";
}

TEST_P(ThreadPoolOn, AChildOfForkCanFreeAPoolOfItsParentUnused) {
  if (kThreadSanitizer) GTEST_SKIP() << "the thread sanitizer has no threads after a fork";
  auto pool = std::make_unique<ThreadPool>(3, GetParam());
  ASSERT_EQ(sum_to(*pool, 100), 4950);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    pool.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "signal " << WTERMSIG(status);
}

INSTANTIATE_TEST_SUITE_P(Runtimes, ThreadPoolOn,
                         testing::Values(ThreadRuntime::kOwn, ThreadRuntime::kOpenMp),
                         [](const auto& suite) { return std::string(to_string(suite.param)); });

TEST(ThreadPool, ALoopInsideOfAnOpenMpRegionRunsInTheCallingThread) {
  if (kThreadSanitizer) GTEST_SKIP() << "the thread sanitizer does not see a region of others";
  ASSERT_NE(openmp(), nullptr);
  std::atomic<int> wrong{0};
  std::atomic<int> members{0};
  ThreadPool pool(3, ThreadRuntime::kOpenMp);
  in_region(2, [&] {
    ++members;
    const auto here = std::this_thread::get_id();
    std::int64_t sum = 0;
    pool.parallel_for(100, [&](std::int64_t i, int worker) {
      sum += i;
      if (worker != 0 || std::this_thread::get_id() != here) ++wrong;
    });
    if (sum != 4950) ++wrong;
  });
  EXPECT_EQ(members, 2);
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadPool, AutoTakesOpenMpWhereItIsLoadedAndTheEnvironmentDecides) {
  ASSERT_NE(openmp(), nullptr);
  const char* const before = std::getenv(kVariable);
  const std::string kept = before == nullptr ? "" : before;
  ASSERT_EQ(unsetenv(kVariable), 0);
  EXPECT_EQ(ThreadPool(2).runtime(), ThreadRuntime::kOpenMp);
  EXPECT_NE(ThreadPool(2).description().find("libgomp"), std::string::npos);
  ASSERT_EQ(setenv(kVariable, "own", 1), 0);
  EXPECT_EQ(ThreadPool(2).runtime(), ThreadRuntime::kOwn);
  EXPECT_EQ(ThreadPool(2, ThreadRuntime::kOpenMp).runtime(), ThreadRuntime::kOpenMp);
  ASSERT_EQ(setenv(kVariable, "tbb", 1), 0);
  EXPECT_EQ(test::message_of([] { const ThreadPool pool(2); }),
            "invalid argument: SWITCHYARD_THREAD_RUNTIME=tbb, want auto, own or openmp");
  ASSERT_EQ(kept.empty() ? unsetenv(kVariable) : setenv(kVariable, kept.c_str(), 1), 0);
}

TEST(ThreadPool, ZeroThreadsAreAsManyAsOpenMpHasAndOneOfItsOwn) {
  using SetThreads = void (*)(int);
  const auto set_threads = reinterpret_cast<SetThreads>(dlsym(openmp(), "omp_set_num_threads"));
  set_threads(3);
  EXPECT_EQ(ThreadPool(0, ThreadRuntime::kOpenMp).num_threads(), 3);
  EXPECT_EQ(ThreadPool(0, ThreadRuntime::kOwn).num_threads(), 1);
  EXPECT_EQ(test::message_of([] { const ThreadPool pool(-1); }),
            "invalid argument: number of threads is -1, want 1 to 4096, or 0: OpenMP's");
}

}  // namespace
}  // namespace switchyard
