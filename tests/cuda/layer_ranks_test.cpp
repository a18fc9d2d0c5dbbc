// The whole layer over ranks on GPUs: decisions against those of the same ranks on the CPU, output
// element by element against the reference, bits against itself for other numbers of ranks. Ranks
// are threads that share the first GPU; the last tests spread them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "switchyard/comm.hpp"
#include "switchyard/error.hpp"
#include "testkit/gpu/captured_graph.hpp"
#include "testkit/gpu/expect_output.hpp"
#include "testkit/gpu/made_up_layer.hpp"

namespace switchyard {
namespace {

using std::chrono::milliseconds;

/// The driver reads these when it is first called: no kernel is loaded while another spins, and
/// every rank's stream has a queue of its own.
[[maybe_unused]] const bool kPrepared = setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0 &&
                                        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) == 0;

enum class Place { kOneGpu, kAllGpus };

class StageNames final : public StageRecorder {
 public:
  void begin(std::string_view /*stage*/, void* /*stream*/) override {}
  void end(std::string_view stage, const StageWork& /*work*/, void* /*stream*/) override {
    names.insert(std::string(stage));
  }
  std::set<std::string> names;
};

struct RankRun {
  std::vector<float> out{};  ///< [T, H], all ranks' tokens.
  std::vector<RoutingRecord> records{};
  std::vector<std::int64_t> rows_used{};
  std::set<std::string> stages{};  ///< Of rank 0.
  Traffic traffic{};
};

ForwardArgs host_args(const float* x, float* out, std::int64_t num_tokens, std::int64_t hidden) {
  return {.tokens = {reinterpret_cast<const std::byte*>(x), DType::kF32, num_tokens, hidden},
          .out = {reinterpret_cast<std::byte*>(out), DType::kF32, num_tokens, hidden}};
}

/// Tokens of rank r: [begin[r], begin[r + 1]).
RankRun run_on_ranks(const MadeUp& made, LayerOptions options, const std::vector<float>& x,
                     const std::vector<std::int64_t>& begin, Place place = Place::kOneGpu) {
  const int ranks = static_cast<int>(begin.size()) - 1;
  const std::int64_t hidden = made.model.config.experts.hidden;
  for (std::size_t r = 0; r + 1 < begin.size(); ++r) {
    options.max_tokens = std::max({options.max_tokens, begin[r + 1] - begin[r], std::int64_t{1}});
  }
  RankRun run;
  run.out.assign(x.size(), std::numeric_limits<float>::quiet_NaN());
  run.records.resize(index(ranks));
  run.rows_used.resize(index(ranks));
  run_ranks(
      ranks,
      [&](Communicator& comm) {
        const auto rank = index(comm.rank());
        if (options.backend == Backend::kCuda) {
          use_gpu_of_rank(place == Place::kOneGpu ? 0 : comm.rank());
        }
        MoeLayer layer(made.model, options, &comm);
        const std::int64_t first = begin[rank] * hidden;
        ForwardArgs args = host_args(x.data() + first, run.out.data() + first,
                                     begin[rank + 1] - begin[rank], hidden);
        args.request.record = &run.records[rank];
        StageNames stages;
        args.recorder = &stages;
        for (int call = 0; call < 2; ++call) layer.forward(args);
        run.rows_used[rank] = layer.rows_used();
        if (rank != 0) return;
        run.traffic = layer.traffic();
        run.stages = stages.names;
      },
      std::chrono::seconds(30));
  return run;
}

std::vector<std::int64_t> evenly(std::int64_t num_tokens, int ranks) {
  std::vector<std::int64_t> begin;
  for (int r = 0; r <= ranks; ++r) begin.push_back(r * num_tokens / ranks);
  return begin;
}

void expect_same(const LayerConfig& config, DType dtype, LayerOptions options,
                 const std::vector<std::int64_t>& begin, Place place = Place::kOneGpu) {
  SCOPED_TRACE(begin.size() - 1);
  const MadeUp made(config, dtype, false);
  const std::vector<float> x = random_floats(begin.back() * config.experts.hidden, 11);
  options.backend = Backend::kCpu;
  const RankRun want = run_on_ranks(made, options, x, begin);
  options.backend = Backend::kCuda;
  const RankRun got = run_on_ranks(made, options, x, begin, place);
  for (std::size_t r = 0; r + 1 < begin.size(); ++r) {
    ASSERT_EQ(got.records[r].expert, want.records[r].expert) << "rank " << r;
    ASSERT_EQ(got.records[r].kept, want.records[r].kept) << "rank " << r;
    ASSERT_EQ(got.records[r].counts_kept, want.records[r].counts_kept) << "rank " << r;
    EXPECT_EQ(got.rows_used[r], want.rows_used[r]) << "rank " << r;
  }
  EXPECT_EQ(got.traffic.rows, want.traffic.rows);
  EXPECT_EQ(got.traffic.payload_bytes, want.traffic.payload_bytes);
  expect_within_bounds(made.model, options, dtype, x, got.records, got.out);
}

LayerConfig small_config() {
  return {.router = {.num_experts = 12, .kind = TopKRouter{.top_k = 3}},
          .experts = {.num_experts = 12, .hidden = 64, .inner = 40}};
}

/// So that `auto` takes the throughput mode.
constexpr std::int64_t kManyTokens = 600;

TEST(LayerRanks, GiveTheCpusOutputForEveryNumberOfRanksAndBothModes) {
  for (const int ranks : {1, 2, 3, 4, 5}) {
    for (const std::int64_t max_tokens : {std::int64_t{0}, kManyTokens}) {
      expect_same(small_config(), DType::kBF16, {.max_tokens = max_tokens}, evenly(50, ranks));
    }
  }
}

TEST(LayerRanks, ManyRowsGoThroughTheGroupedProducts) {
  LayerConfig config = small_config();
  config.experts = {.num_experts = 12, .hidden = 256, .inner = 128};
  expect_same(config, DType::kF16, {}, evenly(1300, 2));
}

/// Experts whose rows are left to the exchange to list and to sum, where it can.
LayerOptions leaving_rows(const LayerOptions& options) {
  LayerOptions left = options;
  left.backend = Backend::kCuda;
  left.batch_invariant = true;  // no implementation combines then
  return left;
}

TEST(LayerRanks, InLowLatencyNoCombineRunsBetweenExpertsAndExchange) {
  const MadeUp made(small_config(), DType::kBF16, false);
  const std::vector<float> x = random_floats(50 * 64, 11);
  const auto stages = [&](const LayerOptions& options) {
    return run_on_ranks(made, leaving_rows(options), x, evenly(50, 2)).stages;
  };
  const std::set<std::string> few = stages({});
  EXPECT_TRUE(few.contains("exchange"));
  EXPECT_FALSE(few.contains("combine"));
  for (const LayerOptions& options :
       {LayerOptions{.max_tokens = kManyTokens}, LayerOptions{.layout = {LayoutKind::kPadded}},
        LayerOptions{.combine_wire = DType::kBF16, .rank_invariant = true}}) {
    EXPECT_TRUE(stages(options).contains("combine"));
  }
}

TEST(LayerRanks, SumsMadeWhileSendingHaveTheBitsOfThoseMadeBefore) {
  LayerConfig config = small_config();
  config.shared = {.num_experts = 1, .hidden = 64, .inner = 48};
  LayerConfig few_experts = small_config();
  few_experts.router.num_experts = few_experts.experts.num_experts = 3;
  const MadeUp with_shared(config, DType::kBF16, false);
  const MadeUp with_few(few_experts, DType::kF32, false);
  const std::vector<float> x = random_floats(50 * 64, 11);
  for (const DType wire : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    for (const MadeUp* made : {&with_shared, &with_few}) {
      for (const int ranks : {2, 4}) {
        LayerOptions options = leaving_rows({.combine_wire = wire});
        const RankRun few = run_on_ranks(*made, options, x, evenly(50, ranks));
        options.max_tokens = kManyTokens;
        const RankRun many = run_on_ranks(*made, options, x, evenly(50, ranks));
        EXPECT_EQ(few.out, many.out) << ranks << " ranks, " << to_string(wire);
        EXPECT_EQ(few.rows_used, many.rows_used);
      }
    }
  }
}

TEST(LayerRanks, LeftRowsGiveTheCpusOutput) {
  LayerConfig config = small_config();
  config.shared = {.num_experts = 1, .hidden = 64, .inner = 48};
  for (const int ranks : {1, 2, 3, 4}) {
    for (const DType wire : {DType::kBF16, DType::kF8E4M3}) {
      expect_same(
          config, DType::kBF16,
          leaving_rows(
              {.capacity_factor = 0.75, .drop_policy = DropPolicy::kProbs, .dispatch_wire = wire}),
          evenly(50, ranks));
    }
  }
  expect_same(small_config(), DType::kBF16, leaving_rows({}), {0, 0, 30, 31});
  config.router.num_experts = config.experts.num_experts = 3;  // and a rank without any
  expect_same(config, DType::kBF16, leaving_rows({}), evenly(17, 4));
}

TEST(LayerRanks, RanksWithoutTokensOrExpertsAreFine) {
  expect_same(small_config(), DType::kBF16, {}, {0, 0, 30, 31});
  expect_same(small_config(), DType::kBF16, {}, {0, 0, 0});
  LayerConfig few = small_config();
  few.router.num_experts = few.experts.num_experts = 3;
  for (const Layout& layout :
       {Layout{}, Layout{LayoutKind::kAligned, 16}, Layout{LayoutKind::kPadded}}) {
    expect_same(few, DType::kBF16, {.layout = layout}, evenly(17, 4));
  }
}

TEST(LayerRanks, LayoutsAndDropsAreThoseOfTheCpu) {
  for (const Layout& layout :
       {Layout{}, Layout{LayoutKind::kAligned, 16}, Layout{LayoutKind::kPadded}}) {
    expect_same(small_config(), DType::kBF16,
                {.layout = layout, .capacity_factor = 0.75, .drop_policy = DropPolicy::kProbs},
                {0, 11, 37, 60});
  }
}

TEST(LayerRanks, SharedExpertsAreAddedAtHome) {
  LayerConfig config = small_config();
  config.shared = {.num_experts = 1, .hidden = 64, .inner = 48};
  config.shared_gated = true;
  config.experts.bias = true;
  expect_same(config, DType::kBF16, {}, evenly(40, 3));
}

TEST(LayerRanks, SumsTravelInEveryWireType) {
  for (const DType wire : {DType::kBF16, DType::kF16, DType::kF8E4M3}) {
    expect_same(small_config(), DType::kBF16, {.combine_wire = wire}, evenly(40, 2));
  }
  expect_same(small_config(), DType::kBF16, {.combine_wire = DType::kBF16, .rank_invariant = true},
              evenly(40, 2));
}

TEST(LayerRanks, TokensTravelInEveryType) {
  for (const DType wire : {DType::kBF16, DType::kF16, DType::kF8E4M3}) {
    for (const std::int64_t max_tokens : {std::int64_t{0}, kManyTokens}) {
      expect_same(small_config(), DType::kBF16, {.dispatch_wire = wire, .max_tokens = max_tokens},
                  evenly(40, 3));
    }
  }
}

TEST(LayerRanks, TheBitsAreThoseOfOneRank) {
  LayerConfig config = small_config();
  config.router.num_experts = config.experts.num_experts = 16;
  const MadeUp made(config, DType::kBF16, false);
  const std::vector<float> x = random_floats(64 * 64, 11);
  for (const DType wire : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t max_tokens : {std::int64_t{0}, kManyTokens}) {
      const LayerOptions options{.backend = Backend::kCuda,
                                 .combine_wire = wire,
                                 .batch_invariant = true,
                                 .rank_invariant = wire != DType::kF32,
                                 .max_tokens = max_tokens};
      const RankRun one = run_on_ranks(made, options, x, {0, 64});
      for (const int ranks : {2, 4, 8}) {
        const RankRun several = run_on_ranks(made, options, x, evenly(64, ranks));
        EXPECT_EQ(several.out, one.out) << ranks << " ranks, " << to_string(wire);
      }
    }
  }
}

TEST(LayerRanks, ALateRankIsNamedAndAfterRecoveryAllIsRight) {
  const MadeUp made(small_config(), DType::kBF16, false);
  const std::vector<float> x = random_floats(30 * 64, 1);
  for (const std::int64_t max_tokens : {std::int64_t{10}, kManyTokens}) {
    run_ranks(3, [&](Communicator& comm) {
      use_gpu_of_rank(0);
      comm.set_timeout(milliseconds(4000));
      MoeLayer layer(made.model, {.backend = Backend::kCuda, .max_tokens = max_tokens}, &comm);
      comm.set_timeout(std::chrono::seconds(30));
      const float* const own = x.data() + std::ptrdiff_t{comm.rank()} * 640;
      std::vector<float> want(640);
      layer.forward(host_args(own, want.data(), 10, 64));
      comm.barrier("before the fault");
      if (comm.rank() != 1) {
        std::vector<float> out(640);
        try {
          layer.forward(host_args(own, out.data(), 10, 64));
          ADD_FAILURE() << "no error";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kTimeout) << error.what();
          EXPECT_NE(std::string(error.what()).find("waiting for rank"), std::string::npos)
              << error.what();
        }
      }
      comm.recover();
      for (int call = 0; call < 2; ++call) {
        std::vector<float> out(640);
        layer.forward(host_args(own, out.data(), 10, 64));
        EXPECT_EQ(out, want);
      }
    });
  }
}

struct Sample {
  std::vector<float> x{};
  std::vector<float> want{};
};

/// Inputs of 20 tokens that route differently, and what `layer` makes of them.
std::vector<Sample> make_samples(MoeLayer& layer, int rank) {
  std::vector<Sample> samples;
  for (unsigned seed = 0; seed < 40; ++seed) {
    Sample sample{.x = random_floats(20 * 64, 100 * seed + static_cast<unsigned>(rank))};
    sample.want.resize(sample.x.size());
    layer.forward(host_args(sample.x.data(), sample.want.data(), 20, 64));
    samples.push_back(std::move(sample));
  }
  return samples;
}

/// Dispatch, experts and combine of 4 ranks in a graph that is replayed a thousand times.
void replay_with_other_routing(Place place) {
  const MadeUp made(small_config(), DType::kBF16, false);
  for (const std::int64_t max_tokens : {std::int64_t{20}, kManyTokens}) {
    run_ranks(4, [&](Communicator& comm) {
      use_gpu_of_rank(place == Place::kOneGpu ? 0 : comm.rank());
      const LayerOptions options{
          .backend = Backend::kCuda, .batch_invariant = true, .max_tokens = max_tokens};
      MoeLayer alone(made.model, options);  // the same bits: 4 ranks divide the groups of sums
      MoeLayer layer(made.model, options, &comm);
      const std::vector<Sample> samples = make_samples(alone, comm.rank());
      const DeviceArray<float> x(20 * 64), out(20 * 64);
      cudaStream_t stream = nullptr;
      SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      ForwardArgs args{.tokens = {x.bytes(), DType::kF32, 20, 64},
                       .out = {out.bytes(), DType::kF32, 20, 64}};
      if (place == Place::kOneGpu) {
        EXPECT_THROW(layer.forward(args), Error);  // device memory, and no stream
        comm.recover();                            // a rank that throws makes the others leave
      }
      args.stream = stream;
      x.set(samples[0].x);
      comm.barrier("ready");
      layer.forward(args);  // not the graph: the first call after a recovery waits
      layer.check();
      const CapturedGraph graph(stream, [&] { layer.forward(args); });
      std::vector<float> got(20 * 64);
      for (std::size_t i = 0; i < 1000; ++i) {
        const Sample& sample = samples[i % samples.size()];
        const auto bytes = sample.x.size() * sizeof(float);
        SWITCHYARD_CUDA(
            cudaMemcpyAsync(x.data(), sample.x.data(), bytes, cudaMemcpyHostToDevice, stream));
        SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
        comm.barrier("input");
        graph.launch();
        // No copy is queued behind kernels that wait: ranks on one GPU would wait for it.
        SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
        layer.check();
        SWITCHYARD_CUDA(
            cudaMemcpyAsync(got.data(), out.data(), bytes, cudaMemcpyDeviceToHost, stream));
        SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
        ASSERT_EQ(got, sample.want) << "replay " << i;
      }
      comm.barrier("end");
      cudaStreamDestroy(stream);
    });
  }
}

TEST(LayerRanks, AGraphOfOneCallIsReplayedAThousandTimesWithOtherRouting) {
  replay_with_other_routing(Place::kOneGpu);
}

TEST(LayerRanks, AnIdOutOfRangeIsAnErrorOnItsRank) {
  const MadeUp made(small_config(), DType::kBF16, false);
  const std::vector<float> x = random_floats(2 * 64, 1);
  try {
    run_ranks(2, [&](Communicator& comm) {
      use_gpu_of_rank(0);
      MoeLayer layer(made.model, {.backend = Backend::kCuda, .max_tokens = 2}, &comm);
      const std::vector<std::int32_t> expert{0, 3, -1, comm.rank() == 1 ? 12 : 11, 5, 1};
      const std::vector<float> weight(6, 0.5F);
      std::vector<float> out(2 * 64);
      ForwardArgs args = host_args(x.data(), out.data(), 2, 64);
      args.expert = {expert.data(), {2, 3}};
      args.weight = {weight.data(), {2, 3}};
      layer.forward(args);
    });
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    EXPECT_NE(std::string(error.what()).find("token 1 has expert 12"), std::string::npos)
        << error.what();
  }
}

TEST(LayerRanks, WhatHasNoRoomToRunTogetherIsRefused) {
  const MadeUp made(small_config(), DType::kBF16, false);
  try {
    run_ranks(4, [&](Communicator& comm) {
      use_gpu_of_rank(0);
      const MoeLayer layer(made.model, {.backend = Backend::kCuda, .max_tokens = 16384}, &comm);
    });
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    EXPECT_NE(std::string(error.what()).find("share a GPU"), std::string::npos) << error.what();
  }
}

TEST(LayerRanksSpread, OnSeveralGpusGiveTheCpusOutputAndTheBitsOfOneRank) {
  const std::size_t gpus = find_gpus().list.size();
  if (gpus < 2) GTEST_SKIP() << "one GPU";
  for (const int ranks : {2, 3, 4, 8}) {
    for (const std::int64_t max_tokens : {std::int64_t{0}, kManyTokens}) {
      expect_same(small_config(), DType::kBF16, {.max_tokens = max_tokens}, evenly(50, ranks),
                  Place::kAllGpus);
    }
  }
  const MadeUp made(small_config(), DType::kBF16, false);
  const std::vector<float> x = random_floats(64 * 64, 11);
  const LayerOptions options{.backend = Backend::kCuda, .batch_invariant = true};
  const RankRun one = run_on_ranks(made, options, x, {0, 64});
  EXPECT_EQ(run_on_ranks(made, options, x, evenly(64, 2), Place::kAllGpus).out, one.out);
}

TEST(LayerRanksSpread, AGraphOfOneCallIsReplayedAThousandTimesWithOtherRouting) {
  if (find_gpus().list.size() < 2) GTEST_SKIP() << "one GPU";
  replay_with_other_routing(Place::kAllGpus);
}

}  // namespace
}  // namespace switchyard
