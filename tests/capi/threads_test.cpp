// Handles of the C interface from several threads, and after fork(). For longer than in a test run:
// --gtest_repeat.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "capi/calls.hpp"
#include "core/threads/thread_sanitizer.hpp"
#include "switchyard/error.hpp"
#include "switchyard/switchyard.h"
#include "testkit/random_values.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kExperts = 6;
constexpr std::int64_t kTopK = 2;
constexpr std::int64_t kHidden = 32;
constexpr std::int64_t kInner = 16;
constexpr int kThreads = 4;
constexpr std::array<std::int64_t, kThreads> kTokens = {1, 7, 40, 19};  // buffers grow and shrink

struct Described {
  template <typename T>
  Described(std::vector<T>& values, std::vector<std::int64_t> sizes) : shape(std::move(sizes)) {
    constexpr bool kInt = std::is_same_v<T, std::int32_t>;
    tensor = {.data = values.data(),
              .device_type = SY_DEVICE_CPU,
              .device_id = 0,
              .ndim = static_cast<std::int32_t>(shape.size()),
              .type_code = kInt ? SY_CODE_INT : SY_CODE_FLOAT,
              .type_bits = 32,
              .type_lanes = 1,
              .shape = shape.data(),
              .strides = nullptr,
              .byte_offset = 0};
  }
  Described(const Described&) = delete;
  Described& operator=(const Described&) = delete;
  std::vector<std::int64_t> shape;
  sy_tensor tensor{};
};

class Handles : public testing::Test {
 protected:
  Handles() {
    sy_expert_config_init(&experts_config_, sizeof experts_config_);
    experts_config_.num_experts = kExperts;
    experts_config_.hidden = kHidden;
    experts_config_.inner = kInner;
    for (std::int64_t i = 0; i < 40 * kTopK; ++i) {
      ids_.push_back(static_cast<std::int32_t>((i * 5 + i / kTopK) % kExperts));
    }
  }

  [[nodiscard]] sy_layer make_layer(int num_threads) {
    sy_router_config router;
    sy_router_config_init(&router, sizeof router);
    router.num_experts = kExperts;
    router.top_k = kTopK;
    sy_layer_options options;
    sy_layer_options_init(&options, sizeof options);
    options.num_threads = num_threads;
    sy_layer_arrays arrays{};
    arrays.struct_size = sizeof arrays;
    arrays.router = &router;
    arrays.experts = &experts_config_;
    const Described gate(gate_, {kExperts, kHidden});
    arrays.gate = &gate.tensor;
    arrays.w13 = &w13_.tensor;
    arrays.w2 = &w2_.tensor;
    sy_layer layer = nullptr;
    EXPECT_EQ(sy_layer_from_arrays(&arrays, &options, nullptr, &layer), SY_OK) << sy_last_error();
    return layer;
  }
  [[nodiscard]] sy_experts make_experts(int num_threads) {
    sy_experts experts = nullptr;
    EXPECT_EQ(sy_experts_create(&experts_config_, &w13_.tensor, &w2_.tensor, nullptr, nullptr,
                                num_threads, &experts),
              SY_OK)
        << sy_last_error();
    return experts;
  }

  /// What `call` makes of some tokens that `seed` decides.
  using Call = std::function<sy_status(const sy_tensor* x, const sy_tensor* out, std::int64_t)>;
  [[nodiscard]] static std::vector<float> result(const Call& call, std::int64_t tokens,
                                                 unsigned seed) {
    std::vector<float> x = random_floats(tokens * kHidden, seed), out(x.size());
    const Described tx(x, {tokens, kHidden}), tout(out, {tokens, kHidden});
    EXPECT_EQ(call(&tx.tensor, &tout.tensor, tokens), SY_OK) << sy_last_error();
    return out;
  }
  static void from_four_threads(const Call& call) {
    std::array<std::vector<float>, kThreads> want;
    for (std::size_t i = 0; i < kThreads; ++i) {
      want.at(i) = result(call, kTokens.at(i), static_cast<unsigned>(i));
    }
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
        do {
          ASSERT_EQ(result(call, kTokens.at(i), static_cast<unsigned>(i)), want.at(i));
        } while (std::chrono::steady_clock::now() < end);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  [[nodiscard]] Call forward(sy_layer layer) {
    return [=](const sy_tensor* x, const sy_tensor* out, std::int64_t) {
      return sy_layer_forward(layer, x, nullptr, nullptr, out, nullptr);
    };
  }
  [[nodiscard]] Call run(sy_experts experts) {
    return [this, experts](const sy_tensor* x, const sy_tensor* out, std::int64_t tokens) {
      std::vector<std::int32_t> ids = ids_;
      ids.resize(static_cast<std::size_t>(tokens * kTopK));
      std::vector<float> weight(ids.size(), 0.5F);
      const Described expert(ids, {tokens, kTopK}), weights(weight, {tokens, kTopK});
      return sy_experts_run(experts, x, &expert.tensor, &weights.tensor, out, nullptr);
    };
  }

  sy_expert_config experts_config_{};
  std::vector<float> gate_ = random_floats(kExperts * kHidden, 11U);
  std::vector<float> values13_ = random_floats(kExperts * 2 * kInner * kHidden, 12U, 0.2F);
  std::vector<float> values2_ = random_floats(kExperts * kHidden * kInner, 13U, 0.2F);
  Described w13_{values13_, {kExperts, 2 * kInner, kHidden}};
  Described w2_{values2_, {kExperts, kHidden, kInner}};
  std::vector<std::int32_t> ids_;
};

TEST_F(Handles, FourThreadsOnOneLayerGetWhatOneGets) {
  sy_layer layer = make_layer(2);
  from_four_threads(forward(layer));
  sy_layer_free(layer);
}

TEST_F(Handles, FourThreadsOnOneExpertsObjectGetWhatOneGets) {
  sy_experts experts = make_experts(2);
  from_four_threads(run(experts));
  sy_experts_free(experts);
}

/// What a child of fork() writes to the pipe and how it ends: it must end by itself.
std::string in_a_child(const std::function<std::string()>& body) {
  std::array<int, 2> pipe_ends{};
  EXPECT_EQ(pipe(pipe_ends.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a hang becomes a signal
    const std::string said = body();
    const bool sent = write(pipe_ends[1], said.data(), said.size()) >= 0;
    _exit(sent ? 0 : 1);
  }
  close(pipe_ends[1]);
  std::string said(4096, '\0');
  const ssize_t size = read(pipe_ends[0], said.data(), said.size());
  close(pipe_ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  said.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
  return said;
}

/// The sanitizer ends a child of fork() that starts threads.
constexpr int kMostThreads = SWITCHYARD_THREAD_SANITIZER != 0 ? 1 : 3;

TEST_F(Handles, WorkInAChildOfForkAndCanBeFreedThere) {
  for (int threads = 1; threads <= kMostThreads; ++threads) {
    sy_layer layer = make_layer(threads);
    sy_layer unused = make_layer(threads);
    sy_experts experts = make_experts(threads);
    const std::vector<float> want = result(forward(layer), 7, 1);
    const std::vector<float> want_experts = result(run(experts), 7, 1);
    EXPECT_EQ(in_a_child([&] {
                sy_layer_free(unused);
                const bool same = result(forward(layer), 7, 1) == want &&
                                  result(run(experts), 7, 1) == want_experts;
                sy_layer_free(layer);
                sy_experts_free(experts);
                return same ? "same" : "other";
              }),
              "same");
    EXPECT_EQ(result(forward(layer), 7, 1), want) << "the parent goes on";
    sy_layer_free(layer);
    sy_layer_free(unused);
    sy_experts_free(experts);
  }
}

TEST(Calls, OnWhatHasRanksAreRefusedByAChildOfForkByName) {
  const capi::Calls calls("the layer", capi::StaysBehind::kRanks);
  (void)calls.begin();
  const std::string said = in_a_child([&]() -> std::string {
    try {
      (void)calls.begin();
      return "begun";
    } catch (const Error& error) {
      return std::string(error.what()) + (calls.may_free() ? " may" : " may not");
    }
  });
  EXPECT_NE(
      said.find("the layer was made before fork(): its place among the ranks is with process " +
                std::to_string(getpid())),
      std::string::npos)
      << said;
  EXPECT_NE(said.find(" may not"), std::string::npos) << said;
}

TEST(CallLock, HeldByAnotherThreadWhenTheProcessForksIsAnErrorInTheChildAndNoHang) {
  capi::CallLock lock;
  std::mutex mutex;
  std::condition_variable changed;
  bool held = false, done = false;
  std::thread other([&] {
    const std::lock_guard call(lock);
    std::unique_lock guard(mutex);
    held = true;
    changed.notify_one();
    changed.wait(guard, [&] { return done; });
  });
  {
    std::unique_lock guard(mutex);
    changed.wait(guard, [&] { return held; });
  }
  const std::string said = in_a_child([&]() -> std::string {
    try {
      lock.lock();
      return "locked";
    } catch (const Error& error) {
      return error.what();
    }
  });
  EXPECT_NE(said.find("another thread was in a call when process"), std::string::npos) << said;
  {
    const std::lock_guard guard(mutex);
    done = true;
  }
  changed.notify_one();
  other.join();
  const std::lock_guard call(lock);  // free again in the parent
}

}  // namespace
}  // namespace switchyard
