// The one kernel of a few assignments: its counters between calls that overlap and between streams,
// and the plan that it makes itself.

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "core/gpu/device_buffer.hpp"
#include "plan/gpu/plan_params.hpp"
#include "testkit/gpu/streaming_fixture.hpp"

namespace switchyard {
namespace {

TEST(StreamingWhole, TakesUpTo64AssignmentsOnHopper) {
  StreamingSync sync{};
  StreamingParams p;
  p.sync = &sync;
  p.num_experts = 256;
  p.hidden = 7168;
  p.inner = 256;
  p.dtype = DType::kF32;
  const auto whole = [&](std::int64_t tokens) {
    p.num_tokens = tokens;
    p.max_rows = p.max_assignments = 8 * tokens;
    return choose_streaming(p, kHopperChip).whole;
  };
  EXPECT_TRUE(whole(1));
  EXPECT_TRUE(whole(8));
  EXPECT_FALSE(whole(9));
  // 16-bit weights come in half the time.
  p.dtype = DType::kBF16;
  EXPECT_TRUE(whole(1));
  EXPECT_FALSE(whole(8));
  StreamingChip other = kHopperChip;
  other.hopper = false;
  p.max_rows = p.max_assignments = 8;
  EXPECT_FALSE(choose_streaming(p, other).whole);
  p.batch_invariant = true;
  EXPECT_FALSE(whole(1));
  p.batch_invariant = false;
  p.sync = nullptr;
  EXPECT_FALSE(whole(1));
}

TEST(StreamingWhole, CallsThatOverlapCanShareTheirCounters) {
  // Different numbers of hits, each kernel let in while the one before still runs.
  const Problem few{.name = "few",
                    .experts = spread(1, 8, 24, 20),
                    .num_experts = 24,
                    .hidden = 1024,
                    .inner = 256,
                    .plan_is_older = true};
  Problem more = few;
  more.experts = spread(7, 8, 24, 21);
  const Fixture fixtures[] = {Fixture(few), Fixture(more)};
  std::vector<std::vector<float>> want;
  std::vector<std::unique_ptr<DeviceBytes>> sums;
  std::vector<StreamingParams> calls;
  for (int i = 0; i < 40; ++i) {
    const Fixture& fixture = fixtures[i % 3 == 0 ? 1 : 0];
    if (i < 2) want.push_back(fixture.run(fixture.params()));
    const std::vector<float>& its = want[i % 3 == 0 ? 0 : 1];
    sums.push_back(std::make_unique<DeviceBytes>(its.size() * sizeof(float)));
    calls.push_back(fixture.params());
    calls.back().sums = sums.back()->data();
    calls.back().sync = fixtures[0].params().sync;
    calls.back().act = fixtures[1].params().act;
  }
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreate(&stream));
  for (int repeat = 0; repeat < 5; ++repeat) {
    for (const StreamingParams& call : calls) launch_streaming(call, stream);
  }
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const std::vector<float>& its = want[i % 3 == 0 ? 0 : 1];
    std::vector<float> got(its.size());
    SWITCHYARD_CUDA(
        cudaMemcpy(got.data(), sums[i]->data(), got.size() * 4, cudaMemcpyDeviceToHost));
    EXPECT_EQ(std::memcmp(got.data(), its.data(), got.size() * 4), 0) << "call " << i;
  }
  EXPECT_TRUE(fixtures[0].counters_are_zero());
  cudaStreamDestroy(stream);
}

TEST(StreamingWhole, CallsOfManyStreamsDoNotWaitForEachOther) {
  // More blocks than fit the device at once, and each call's wait for others of their own.
  const Fixture fixture({.name = "streams",
                         .experts = spread(1, 8, 16, 22),
                         .num_experts = 16,
                         .hidden = 1024,
                         .inner = 256,
                         .plan_is_older = true});
  const std::vector<float> want = fixture.run(fixture.params());
  const std::size_t bytes = want.size() * sizeof(float);
  std::vector<cudaStream_t> streams(6);
  std::vector<std::unique_ptr<DeviceBytes>> memory;
  std::vector<StreamingParams> calls;
  for (cudaStream_t& stream : streams) {
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    calls.push_back(fixture.params());
    memory.push_back(std::make_unique<DeviceBytes>(bytes));
    calls.back().sums = memory.back()->data();
    memory.push_back(std::make_unique<DeviceBytes>(std::size_t{8 * 256 * 2}));
    calls.back().act = memory.back()->data();
    memory.push_back(
        std::make_unique<DeviceBytes>(std::vector<std::uint8_t>(sizeof(StreamingSync), 0)));
    calls.back().sync = static_cast<StreamingSync*>(memory.back()->data());
  }
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  for (int repeat = 0; repeat < 30; ++repeat) {
    for (std::size_t i = 0; i < streams.size(); ++i) launch_streaming(calls[i], streams[i]);
  }
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  for (const StreamingParams& call : calls) {
    std::vector<float> got(want.size());
    SWITCHYARD_CUDA(cudaMemcpy(got.data(), call.sums, bytes, cudaMemcpyDeviceToHost));
    EXPECT_EQ(std::memcmp(got.data(), want.data(), bytes), 0);
  }
  for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
}

/// The routing of a fixture with eight experts a token, and a plan of it that is not made yet.
class Unplanned {
 public:
  Unplanned(const Problem& problem, const Fixture& fixture, bool with_none)
      : ids_(ids_of(problem, with_none)), weights_(weights_of(problem, fixture, ids_.size())) {
    plan_.expert = ints(id_);
    plan_.weight = static_cast<const float*>(weight_.data());
    plan_.expert_begin = ints(begin_);
    plan_.expert_rows = ints(rows_);
    plan_.row_token = ints(row_token_);
    plan_.row_weight = static_cast<float*>(row_weight_.data());
    plan_.token_begin = ints(token_begin_);
    plan_.token_row = ints(token_row_);
    plan_.status = static_cast<DeviceStatus*>(status_.data());
    plan_.num_tokens = num_tokens();
    plan_.top_k = kTopK;
    plan_.num_experts = plan_.total_experts = problem.num_experts;
    plan_.alignment = 1;
    plan_.capacity = 0xffffffffU;
  }
  [[nodiscard]] std::int32_t num_tokens() const {
    return static_cast<std::int32_t>(ids_.size()) / kTopK;
  }
  [[nodiscard]] StreamingParams params(const Fixture& fixture, const PlanReport& report) const {
    StreamingParams d = fixture.params();
    d.plan = &plan_;
    d.report = report;
    d.status = plan_.status;
    d.num_tokens = num_tokens();
    d.max_rows = d.max_assignments = static_cast<std::int64_t>(ids_.size());
    d.expert_begin = plan_.expert_begin;
    d.expert_rows = plan_.expert_rows;
    d.row_token = plan_.row_token;
    d.row_weight = plan_.row_weight;
    d.token_begin = plan_.token_begin;
    d.token_row = plan_.token_row;
    return d;
  }
  void expect_plan_of(const Fixture& fixture) const {
    EXPECT_TRUE(holds(row_token_, fixture.row_token()));
    EXPECT_TRUE(holds(row_weight_, fixture.row_weight()));
    EXPECT_TRUE(holds(token_begin_, fixture.token_begin()));
    EXPECT_TRUE(holds(token_row_, fixture.token_row()));
    EXPECT_TRUE(holds(begin_, fixture.expert_begin()));
    EXPECT_TRUE(holds(rows_, fixture.expert_rows()));
  }

  static constexpr std::int32_t kTopK = 8;

 private:
  static std::vector<std::int32_t> ids_of(const Problem& problem, bool with_none) {
    std::vector<std::int32_t> ids;
    for (const auto& of : problem.experts) ids.insert(ids.end(), of.begin(), of.end());
    if (with_none) ids.insert(ids.end(), {-1, -1, problem.num_experts, -2, -1, -1, -1, -1});
    return ids;
  }
  static std::vector<float> weights_of(const Problem& problem, const Fixture& fixture,
                                       std::size_t size) {
    std::vector<float> weights;
    for (std::size_t t = 0; t < problem.experts.size(); ++t) {
      for (const int expert : problem.experts[t]) {
        std::size_t row = 0;
        while (fixture.row_expert()[row] != expert ||
               fixture.row_token()[row] != static_cast<std::int32_t>(t)) {
          ++row;
        }
        weights.push_back(fixture.row_weight()[row]);
      }
    }
    weights.resize(size, 1.0F);
    return weights;
  }
  static std::int32_t* ints(const DeviceBytes& of) { return static_cast<std::int32_t*>(of.data()); }
  template <typename V>
  static bool holds(const DeviceBytes& device, const std::vector<V>& want) {
    std::vector<V> got(want.size());
    SWITCHYARD_CUDA(
        cudaMemcpy(got.data(), device.data(), got.size() * sizeof(V), cudaMemcpyDeviceToHost));
    return got == want;
  }

  static constexpr std::size_t kMost = 64 * 4;
  std::vector<std::int32_t> ids_;
  std::vector<float> weights_;
  DeviceBytes id_{ids_}, weight_{weights_}, status_{std::vector<DeviceStatus>(1)};
  DeviceBytes begin_{4096}, rows_{4096}, row_token_{kMost}, row_weight_{kMost}, token_begin_{kMost},
      token_row_{kMost};
  planning::PlanParams plan_{};
};

TEST(StreamingWhole, AKernelThatMakesThePlanGivesTheSameBits) {
  if (!streaming_chip().hopper) GTEST_SKIP() << "one kernel on Hopper only";
  struct Told {
    DeviceStatus status;
    std::int32_t used = -1;
    std::int32_t executed = -1;
  };
  for (const int tokens : {1, 3, 8}) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const Problem problem{.name = "plan",
                            .experts = spread(tokens, Unplanned::kTopK, 300, 23),
                            .num_experts = 300,
                            .hidden = 136,
                            .inner = 16,
                            .dtype = dtype};
      const Fixture fixture(problem);
      std::vector<float> want = fixture.run(fixture.params());
      const bool with_none = tokens < 8;  // one more token, whose ids are none
      const Unplanned unplanned(problem, fixture, with_none);
      want.resize(static_cast<std::size_t>(unplanned.num_tokens()) * 136, 0.0F);
      const DeviceBytes sums(want.size() * 4);
      const PinnedValue<Told> told;
      StreamingParams d = unplanned.params(fixture, {&told->status, &told->used, &told->executed});
      d.sums = sums.data();
      ASSERT_TRUE(choose_streaming(d, streaming_chip()).whole);
      launch_streaming(d, nullptr);
      SWITCHYARD_CUDA(cudaDeviceSynchronize());
      std::vector<float> got(want.size());
      SWITCHYARD_CUDA(cudaMemcpy(got.data(), sums.data(), got.size() * 4, cudaMemcpyDeviceToHost));
      EXPECT_EQ(got, want) << tokens << " tokens, " << to_string(dtype);
      EXPECT_TRUE(fixture.counters_are_zero());
      unplanned.expect_plan_of(fixture);
      EXPECT_EQ(told->used, tokens * Unplanned::kTopK);
      EXPECT_EQ(told->executed, tokens * Unplanned::kTopK);
      EXPECT_EQ(told->status.bad_ids, with_none ? 2U : 0U);
    }
  }
}

TEST(StreamingWhole, TheSecondOfTwoKernelsReportsThePlan) {
  struct Told {
    DeviceStatus status;
    std::int32_t used = -1;
    std::int32_t executed = -1;
  };
  for (const int tokens : {1, 40}) {
    const Fixture fixture({.name = "report",
                           .experts = spread(tokens, 8, 24, 27),
                           .num_experts = 24,
                           .hidden = 1024,
                           .inner = 512});
    const DeviceStatus found{.nan_logit = 7, .bad_ids = 3, .lost_rows = 0};
    const DeviceBytes status(std::vector<DeviceStatus>(1, found));
    const PinnedValue<Told> told;
    StreamingParams d = fixture.params();
    d.sync = nullptr;
    const std::vector<float> want = fixture.run(d);
    d.report = {&told->status, &told->used, &told->executed};
    d.status = static_cast<const DeviceStatus*>(status.data());
    EXPECT_EQ(fixture.run(d), want);
    EXPECT_EQ(told->used, 8 * tokens);
    EXPECT_EQ(told->executed, 8 * tokens);
    EXPECT_EQ(told->status.nan_logit, 7U);
    EXPECT_EQ(told->status.bad_ids, 3U);
  }
}

}  // namespace
}  // namespace switchyard
