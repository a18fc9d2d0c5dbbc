// The whole layer on a GPU: decisions against those of the layer on the CPU, output element by
// element against the reference.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "switchyard/error.hpp"
#include "switchyard/layer.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/captured_graph.hpp"
#include "testkit/gpu/expect_output.hpp"
#include "testkit/gpu/made_up_layer.hpp"

namespace switchyard {
namespace {

using test::message_of;

LayerConfig small_config() {
  return {.router = {.num_experts = 12, .kind = TopKRouter{.top_k = 3}},
          .experts = {.num_experts = 12, .hidden = 64, .inner = 40}};
}

std::vector<float> run(MoeLayer& layer, const std::vector<float>& x, std::int64_t num_tokens,
                       RoutingRecord* record = nullptr) {
  const std::int64_t hidden = layer.config().experts.hidden;
  std::vector<float> out(x.size(), std::numeric_limits<float>::quiet_NaN());
  layer.forward(
      {.tokens = {reinterpret_cast<const std::byte*>(x.data()), DType::kF32, num_tokens, hidden},
       .out = {reinterpret_cast<std::byte*>(out.data()), DType::kF32, num_tokens, hidden},
       .request = {.record = record}});
  return out;
}

/// The CPU's decisions, an output within its bounds, and the same bits again.
void expect_same(const LayerConfig& config, DType dtype, bool bias_router, LayerOptions options,
                 std::int64_t num_tokens) {
  const MadeUp made(config, dtype, bias_router);
  const std::vector<float> x = random_floats(num_tokens * config.experts.hidden, 11);
  options.backend = Backend::kCpu;
  MoeLayer cpu(made.model, options);
  options.backend = Backend::kCuda;
  MoeLayer cuda(made.model, options);
  RoutingRecord cpu_record, cuda_record;
  (void)run(cpu, x, num_tokens, &cpu_record);
  const std::vector<float> got = run(cuda, x, num_tokens, &cuda_record);
  ASSERT_EQ(cuda_record.expert, cpu_record.expert);
  ASSERT_EQ(cuda_record.kept, cpu_record.kept);
  ASSERT_EQ(cuda_record.counts, cpu_record.counts);
  ASSERT_EQ(cuda_record.counts_kept, cpu_record.counts_kept);
  expect_within_bounds(made.model, options, dtype, x, {cuda_record}, got);
  EXPECT_EQ(cuda.rows_used(), cpu.rows_used());
  if (options.layout.kind != LayoutKind::kPadded || options.capacity_factor) {
    EXPECT_EQ(cuda.rows_executed(), cpu.rows_executed());
  }
  EXPECT_EQ(run(cuda, x, num_tokens), got);  // the same bits again
}

TEST(LayerCuda, SmallGivesTheCpusOutputInEveryLayoutAndUnderDrops) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const Layout& layout :
         {Layout{}, Layout{LayoutKind::kAligned, 16}, Layout{LayoutKind::kPadded}}) {
      for (const bool limited : {false, true}) {
        LayerOptions options{.layout = layout, .drop_policy = DropPolicy::kProbs};
        if (limited) options.capacity_factor = 0.75;
        expect_same(small_config(), dtype, limited, options, 37);
      }
    }
  }
}

TEST(LayerCuda, SmallSharedExpertsBiasesAndGroupsGiveTheCpusOutput) {
  LayerConfig config = small_config();
  config.shared = {.num_experts = 1, .hidden = 64, .inner = 48};
  expect_same(config, DType::kBF16, false, {}, 20);
  config.shared_gated = true;
  config.router.as_top_k().score = Score::kSigmoid;
  config.router.as_top_k().groups = 4;
  config.router.as_top_k().top_groups = 2;
  config.router.as_top_k().group_score = GroupScore::kTop2Sum;
  config.experts.bias = true;
  config.experts.activation = Activation::kClampedSwiglu;
  expect_same(config, DType::kBF16, true, {.max_tokens = 64}, 20);
  config.experts.gated = false;
  config.experts.activation = Activation::kGelu;
  expect_same(config, DType::kF16, true, {.combine_wire = DType::kBF16, .rank_invariant = true}, 1);
  config.experts.hidden = config.shared.hidden = 136;  // no whole number of fp8's blocks
  for (const DType wire : {DType::kBF16, DType::kF8E4M3}) {
    expect_same(config, DType::kF16, false, {.dispatch_wire = wire, .max_tokens = 64}, 20);
  }
}

TEST(LayerCuda, ManyTokensGiveTheCpusOutput) {
  LayerConfig config = small_config();
  config.experts = {.num_experts = 12, .hidden = 256, .inner = 128};
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    expect_same(config, dtype, false, {.num_threads = 4}, 3000);
  }
  config.shared = {.num_experts = 1, .hidden = 256, .inner = 72};
  expect_same(config, DType::kF32, false, {.num_threads = 4}, 3000);
}

TEST(LayerCuda, OfF32ATokensBitsAreItsOwnWithBatchInvariant) {
  LayerConfig config = small_config();
  config.experts = {.num_experts = 12, .hidden = 256, .inner = 128};
  const MadeUp made(config, DType::kF32, false);
  MoeLayer layer(made.model, {.backend = Backend::kCuda, .batch_invariant = true});
  const std::vector<float> x = random_floats(3000 * 256, 11);
  const std::vector<float> all = run(layer, x, 3000);
  for (const std::int64_t count : {1, 40, 700}) {
    const std::vector<float> some = run(layer, {x.begin(), x.begin() + count * 256}, count);
    EXPECT_EQ(some, std::vector<float>(all.begin(), all.begin() + count * 256)) << count;
  }
}

TEST(LayerCuda, SmallNoTokenIsFine) {
  const MadeUp made(small_config(), DType::kBF16, false);
  MoeLayer layer(made.model, {.backend = Backend::kCuda});
  EXPECT_TRUE(run(layer, {}, 0).empty());
  EXPECT_FALSE(run(layer, random_floats(5 * 64, 1), 5).empty());
}

TEST(LayerCuda, SmallGraphIsReplayedOnNewTokensInDeviceMemory) {
  const MadeUp made(small_config(), DType::kBF16, false);
  MoeLayer layer(made.model, {.backend = Backend::kCuda, .max_tokens = 50});
  const DeviceArray<float> x(50 * 64), out(50 * 64);
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreate(&stream));
  const ForwardArgs args{.tokens = {x.bytes(), DType::kF32, 50, 64},
                         .out = {out.bytes(), DType::kF32, 50, 64},
                         .stream = stream};
  const CapturedGraph graph(stream, [&] { layer.forward(args); });
  MoeLayer other(made.model, {.backend = Backend::kCuda});
  for (unsigned seed = 0; seed < 20; ++seed) {
    const std::vector<float> values = random_floats(50 * 64, seed);
    x.set(values);
    graph.launch();
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    EXPECT_EQ(out.get(), run(other, values, 50));
  }
  cudaStreamDestroy(stream);
}

/// Free device memory, after all work.
std::size_t free_device_bytes() {
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  std::size_t free = 0;
  std::size_t total = 0;
  SWITCHYARD_CUDA(cudaMemGetInfo(&free, &total));
  return free;
}

/// 1000 replays on new tokens, and so new routing; every 50th and the last against an eager call of
/// another layer, by bits.
void expect_a_thousand_replays(const LayerConfig& config, LayerOptions options,
                               std::int64_t num_tokens) {
  constexpr int kReplays = 1000;
  const MadeUp made(config, DType::kBF16, false);
  const std::int64_t hidden = config.experts.hidden;
  options.backend = Backend::kCuda;
  MoeLayer other(made.model, options);
  options.max_tokens = num_tokens;
  MoeLayer layer(made.model, options);
  const DeviceArray<float> x(index(num_tokens * hidden)), out(index(num_tokens * hidden));
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreate(&stream));
  const CapturedGraph graph(stream, [&] {
    layer.forward({.tokens = {x.bytes(), DType::kF32, num_tokens, hidden},
                   .out = {out.bytes(), DType::kF32, num_tokens, hidden},
                   .stream = stream});
  });
  std::set<std::vector<std::int32_t>> routings;
  std::size_t free_bytes = 0;
  for (int replay = 0; replay < kReplays; ++replay) {
    const std::vector<float> values =
        random_floats(num_tokens * hidden, static_cast<unsigned>(replay));
    x.set(values);
    graph.launch();
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    if (replay % 50 != 0 && replay != kReplays - 1) continue;
    const std::vector<float> replayed = out.get();
    RoutingRecord record;
    ASSERT_EQ(replayed, run(other, values, num_tokens, &record)) << "replay " << replay;
    routings.insert(record.expert);
    if (replay == 0) free_bytes = free_device_bytes();  // both layers have all they need
  }
  EXPECT_EQ(routings.size(), 21U);
  EXPECT_GE(free_device_bytes(), free_bytes);
  EXPECT_NO_THROW(layer.check());
  cudaStreamDestroy(stream);
}

TEST(LayerCuda, AGraphOfFewTokensIsReplayedAThousandTimesWithNewRouting) {
  expect_a_thousand_replays(small_config(), {}, 20);  // streamed weights
}

TEST(LayerCuda, AGraphOfManyTokensIsReplayedAThousandTimesWithNewRouting) {
  expect_a_thousand_replays(small_config(), {}, 300);  // grouped products
}

TEST(LayerCuda, AGraphWithPackedRowsDropsAndSharedExpertsIsReplayedAThousandTimes) {
  LayerConfig config = small_config();
  config.shared = {.num_experts = 1, .hidden = 64, .inner = 48};
  expect_a_thousand_replays(config,
                            {.layout = {LayoutKind::kAligned, 16},
                             .capacity_factor = 0.75,
                             .drop_policy = DropPolicy::kProbs},
                            60);
}

/// The names of the stages, in order, and what runs each call.
class StageNames final : public StageRecorder {
 public:
  void begin(std::string_view stage, void*) override { names.emplace_back(stage); }
  void end(std::string_view stage, const StageWork&, void*) override { ended.emplace_back(stage); }
  void chose(std::string_view call, std::string_view implementation) override {
    chosen[std::string(call)] = implementation;
  }
  std::vector<std::string> names{}, ended{};
  std::map<std::string, std::string> chosen{};
};

TEST(LayerCuda, SmallStagesAreToldToTheRecorderOfTheCall) {
  const MadeUp made(small_config(), DType::kBF16, false);
  MoeLayer layer(made.model, {.backend = Backend::kCuda});
  const std::vector<float> x = random_floats(5 * 64, 1);
  std::vector<float> out(x.size());
  StageNames names;
  ForwardArgs args{.tokens = {reinterpret_cast<const std::byte*>(x.data()), DType::kF32, 5, 64},
                   .out = {reinterpret_cast<std::byte*>(out.data()), DType::kF32, 5, 64},
                   .recorder = &names};
  layer.forward(args);
  ASSERT_GT(names.names.size(), 4U);  // then those of the experts
  const std::vector<std::string> first(names.names.begin(), names.names.begin() + 4);
  EXPECT_EQ(first, (std::vector<std::string>{"pack", "router_gemm", "select", "plan"}));
  EXPECT_EQ(names.ended, names.names);
  const std::vector<std::string> before = names.names;
  args.recorder = nullptr;
  layer.forward(args);
  EXPECT_EQ(names.names, before);
}

TEST(LayerCuda, SmallRecordersAreToldWhatRanAndWhatWouldRunWithoutThem) {
  const MadeUp made(small_config(), DType::kBF16, false);
  MoeLayer layer(made.model, {.backend = Backend::kCuda});
  const std::vector<float> x = random_floats(50 * 64, 1);
  std::vector<float> out(x.size());
  const auto chosen = [&](std::int64_t num_tokens) {
    StageNames names;
    layer.forward(
        {.tokens = {reinterpret_cast<const std::byte*>(x.data()), DType::kF32, num_tokens, 64},
         .out = {reinterpret_cast<std::byte*>(out.data()), DType::kF32, num_tokens, 64},
         .recorder = &names});
    return names.chosen;
  };
  auto few = chosen(5);
  EXPECT_EQ(few["route"], "cuda.warp");
  EXPECT_EQ(few["plan"], "cuda.few");
  EXPECT_EQ(few["experts"], "cuda.streaming");
  EXPECT_EQ(few["plan+experts"], "cuda.streaming");
  auto more = chosen(50);
  EXPECT_EQ(more["plan"], "cuda.counting");
  EXPECT_EQ(more.count("plan+experts"), 0U);
}

TEST(LayerCuda, SmallNanIsRaisedByStatusAndOnceAndByTheNextCall) {
  const MadeUp made(small_config(), DType::kBF16, false);
  MoeLayer layer(made.model, {.backend = Backend::kCuda, .max_tokens = 50});
  std::vector<float> values = random_floats(50 * 64, 1);
  const DeviceArray<float> good(values), out(50 * 64);
  values[31 * 64 + 5] = std::numeric_limits<float>::quiet_NaN();
  const DeviceArray<float> bad(values);
  const auto forward = [&](const DeviceArray<float>& x) {
    layer.forward(
        {.tokens = {x.bytes(), DType::kF32, 50, 64}, .out = {out.bytes(), DType::kF32, 50, 64}});
  };
  const char* words = "token 31 for expert 0 is NaN";
  forward(bad);
  EXPECT_NE(message_of([&] { layer.check(); }).find(words), std::string::npos);
  EXPECT_NO_THROW(layer.check());
  forward(bad);
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  EXPECT_NE(message_of([&] { forward(good); }).find(words), std::string::npos);
  forward(good);
  EXPECT_NO_THROW(layer.check());
  EXPECT_NE(message_of([&] { run(layer, values, 50); }).find(words), std::string::npos);
}

TEST(LayerCuda, SmallGivenRoutingWithAnIdOutOfRangeIsAnError) {
  const MadeUp made(small_config(), DType::kBF16, false);
  MoeLayer layer(made.model, {.backend = Backend::kCuda});
  const std::vector<float> x = random_floats(2 * 64, 1);
  std::vector<std::int32_t> expert{0, 3, -1, 12, 5, 1};
  const std::vector<float> weight(6, 0.5F);
  std::vector<float> out(2 * 64);
  const ForwardArgs args{
      .tokens = {reinterpret_cast<const std::byte*>(x.data()), DType::kF32, 2, 64},
      .out = {reinterpret_cast<std::byte*>(out.data()), DType::kF32, 2, 64},
      .expert = {expert.data(), {2, 3}},
      .weight = {weight.data(), {2, 3}}};
  EXPECT_THROW(layer.forward(args), Error);
  expert[3] = 11;
  EXPECT_NO_THROW(layer.forward(args));
}

}  // namespace
}  // namespace switchyard
