// The exchange of few tokens, whose dispatch makes the experts' lists and whose combine sums their
// rows on the way: the same bits as the stages one by one in throughput mode. Ranks are threads;
// they share the devices there are.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "interfaces/device_transports.hpp"
#include "switchyard/error.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/device_checker.hpp"

namespace switchyard {
namespace {

/// The driver reads these when it is first called: no kernel is loaded while another spins.
[[maybe_unused]] const bool kPrepared = setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0 &&
                                        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) == 0;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// What one exchange leaves on a rank, as far as it does not depend on the mode.
struct Seen {
  std::vector<std::int32_t> expert_begin;
  std::vector<std::uint32_t> row_weight;
  std::vector<std::byte> x, out;
  bool operator==(const Seen&) const = default;
};

/// One rank of a native exchange; row i of the experts is made from i and the epoch alone.
class NativeRank {
 public:
  NativeRank(const ExchangeProblem& problem, Communicator& comm, ExchangeMode mode, DType row_type,
             std::chrono::milliseconds timeout = std::chrono::seconds(20))
      : problem_(problem), comm_(comm), row_type_(row_type) {
    const int device = comm.rank() % std::max(1, num_devices());
    SWITCHYARD_CUDA(cudaSetDevice(device));
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    const ExpertParallelConfig& c = problem.config;
    x_ = std::make_unique<DeviceBytes>(at(c.max_tokens * c.hidden * 4), stream_);
    expert_ = std::make_unique<DeviceBytes>(at(c.max_tokens * c.top_k * 4), stream_);
    weight_ = std::make_unique<DeviceBytes>(at(c.max_tokens * c.top_k * 4), stream_);
    out_ = std::make_unique<DeviceBytes>(at(c.max_tokens * c.hidden * 4), stream_);
    native_ = make_device_native(
        comm, {.exchange = c, .options = {.device = device, .mode = mode, .timeout = timeout}});
    const std::int64_t rows = comm.size() * c.max_tokens * c.top_k;
    rows_ = std::make_unique<DeviceBytes>(at(rows * c.hidden * 4), stream_);
    comm.barrier("memory");
  }
  ~NativeRank() {
    try {
      comm_.barrier("no kernel runs any more");  // cudaFree waits for all of the device
    } catch (const std::exception&) {
    }
    cudaStreamDestroy(stream_);
  }
  NativeRank(const NativeRank&) = delete;
  NativeRank& operator=(const NativeRank&) = delete;

  void set_input(int epoch) {
    input_ = make_input(problem_, comm_.rank(), epoch);
    x_->set(input_.x);
    expert_->set(input_.expert);
    weight_->set(input_.weight);
  }
  /// Only the first choice of each token is used.
  void use_first_choices() {
    for (std::size_t i = 0; i < input_.expert.size(); ++i) {
      if (i % at(problem_.config.top_k) != 0) input_.expert[i] = -1;
    }
    expert_->set(input_.expert);
  }
  /// All rows that there may be.
  void set_rows(int epoch, bool all_ones = false) {
    const ExpertParallelConfig& c = problem_.config;
    const std::int64_t size = comm_.size() * c.max_tokens * c.top_k * c.hidden;
    std::vector<std::byte> rows(at(size * size_of(row_type_)), std::byte{0xff});
    std::mt19937 random(static_cast<unsigned>(epoch + 31 * comm_.rank()));
    for (std::int64_t i = 0; i < size && !all_ones; ++i) {
      store_float(rows.data(), row_type_, i, static_cast<float>(random() % 2001U) * 1e-3F - 1.0F);
    }
    rows_->set(rows);
  }
  DeviceNative::Rows dispatch() {
    const ExpertParallelConfig& c = problem_.config;
    const std::int64_t tokens = input_.num_tokens;
    return native_->dispatch({.x = {x_->as<std::byte>(), c.dtype, tokens, c.hidden},
                              .expert = {expert_->as<std::int32_t>(), {tokens, c.top_k}},
                              .weight = {weight_->as<float>(), {tokens, c.top_k}},
                              .execution = {.stream = stream_}});
  }
  void combine(const DeviceNative::Rows& received) {
    const ExpertParallelConfig& c = problem_.config;
    native_->combine({rows_->as<std::byte>(), row_type_, received.max_assignments, c.hidden},
                     {out_->as<std::byte>(), DType::kF32, input_.num_tokens, c.hidden}, stream_);
  }
  Seen run(int epoch) {
    set_input(epoch);
    set_rows(epoch);
    const DeviceNative::Rows received = dispatch();
    synchronize();
    Seen seen = look(received);
    combine(received);
    synchronize();
    seen.out = out();
    return seen;
  }
  [[nodiscard]] std::vector<std::byte> out() {
    return copy_out<std::byte>(out_->as<std::byte>(),
                               4 * input_.num_tokens * problem_.config.hidden, stream_);
  }
  void synchronize() {
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    native_->check();
  }
  cudaStream_t stream() { return stream_; }

 private:
  Seen look(const DeviceNative::Rows& received) {
    const PlanView& plan = received.plan;
    Seen seen;
    seen.expert_begin =
        copy_out<std::int32_t>(plan.expert_begin.data, plan.num_experts + 1, stream_);
    const std::int64_t count = seen.expert_begin.back();
    const auto rows = copy_out<std::int32_t>(plan.expert_rows.data, plan.num_experts, stream_);
    for (std::int32_t e = 0; e < plan.num_experts; ++e) {
      EXPECT_EQ(rows[at(e)], seen.expert_begin[at(e + 1)] - seen.expert_begin[at(e)]);
    }
    seen.row_weight = copy_out<std::uint32_t>(plan.row_weight.data, count, stream_);
    const ConstRawMatrix& x = received.received.x;
    const auto all = copy_out<std::byte>(x.data, x.bytes(), stream_);
    for (const std::int32_t row : copy_out<std::int32_t>(plan.row_token.data, count, stream_)) {
      const auto begin = all.begin() + row * x.row_bytes();
      seen.x.insert(seen.x.end(), begin, begin + x.row_bytes());
    }
    return seen;
  }

  const ExchangeProblem& problem_;
  Communicator& comm_;
  const DType row_type_;
  cudaStream_t stream_ = nullptr;
  RankInput input_;
  std::unique_ptr<DeviceBytes> x_, expert_, weight_, out_, rows_;
  std::unique_ptr<DeviceNative> native_;
};

class LowLatency : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  }
  void expect_same_bits(const ExchangeProblem& problem, DType row_type) {
    SCOPED_TRACE(problem.name);
    run_ranks(
        problem.num_ranks,
        [&](Communicator& comm) {
          std::vector<Seen> want;
          for (const auto mode : {ExchangeMode::kThroughput, ExchangeMode::kLowLatency}) {
            NativeRank rank(problem, comm, mode, row_type);
            for (int epoch = 0; epoch < 3; ++epoch) {
              const Seen seen = rank.run(epoch);
              if (mode == ExchangeMode::kThroughput) {
                want.push_back(seen);
                continue;
              }
              EXPECT_EQ(seen.expert_begin, want[at(epoch)].expert_begin);
              EXPECT_EQ(seen.row_weight, want[at(epoch)].row_weight);
              EXPECT_TRUE(seen.x == want[at(epoch)].x);
              EXPECT_TRUE(seen.out == want[at(epoch)].out);
            }
          }
        },
        std::chrono::seconds(60));
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, LowLatency, testing::Values(1, 2, 3, 4));

TEST_P(LowLatency, ListsRowsAndSumsHaveTheBitsOfThroughputModeForEveryTypeAndWire) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType wire : {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3}) {
      ExchangeProblem problem = problem_of(GetParam(), 24, 6, 520, 37);
      problem.config.dtype = dtype;
      problem.config.dispatch_wire = wire;
      problem.config.combine_wire = wire;
      problem.tokens = {37, 0, 20};
      expect_same_bits(problem, dtype);
    }
  }
}

TEST_P(LowLatency, OneTokenOrFiveHundredUnusedAndRepeatedChoicesAreRight) {
  for (const std::int64_t tokens : {1, 8, 128, 512}) {
    expect_same_bits(problem_of(GetParam(), 40, 8, 72, tokens), DType::kBF16);
  }
  for (const auto routing : {ExchangeProblem::Routing::kRepeated, ExchangeProblem::Routing::kUnused,
                             ExchangeProblem::Routing::kOneExpert}) {
    ExchangeProblem problem = problem_of(GetParam(), 12, 5, 264, 50);
    problem.routing = routing;
    expect_same_bits(problem, DType::kBF16);
  }
  expect_same_bits(problem_of(GetParam(), 64, 32, 8, 40), DType::kF16);  // the largest K
  expect_same_bits(problem_of(GetParam(), 3, 2, 128, 9), DType::kBF16);  // a rank without experts
}

TEST_P(LowLatency, AGraphOfExchangesIsReplayedWithOtherRouting) {
  const ExchangeProblem problem = problem_of(GetParam(), 16, 4, 256, 60);
  run_ranks(
      GetParam(),
      [&](Communicator& comm) {
        constexpr int kReplays = 20;
        std::vector<std::vector<std::byte>> want;
        {
          NativeRank rank(problem, comm, ExchangeMode::kThroughput, DType::kBF16);
          for (int replay = 0; replay < kReplays; ++replay) want.push_back(rank.run(replay).out);
        }
        NativeRank rank(problem, comm, ExchangeMode::kLowLatency, DType::kBF16);
        (void)rank.run(0);
        const CapturedGraph graph(rank.stream(), [&] {
          for (int i = 0; i < 3; ++i) rank.combine(rank.dispatch());
        });
        comm.barrier("captured");
        for (int replay = 0; replay < kReplays; ++replay) {
          rank.set_input(replay);
          rank.set_rows(replay);
          graph.launch();
          rank.synchronize();
          EXPECT_TRUE(rank.out() == want[at(replay)]) << "replay " << replay;
        }
        comm.barrier("replayed");
      },
      std::chrono::seconds(60));
}

// A dispatch that gives up has sent ids without lists for them: a row may then stand in the old
// lists more than once, and the combine must read none that is not there.
TEST_P(LowLatency, ACombineAfterADispatchThatGaveUpReadsOnlyRowsThatThereAre) {
  const int ranks = GetParam();
  if (ranks == 1) GTEST_SKIP() << "nobody to wait for";
  const ExchangeProblem problem = problem_of(ranks, 16, 8, 64, 8);
  run_ranks(
      ranks,
      [&](Communicator& comm) {
        NativeRank rank(problem, comm, ExchangeMode::kLowLatency, DType::kF32,
                        std::chrono::milliseconds(300));
        rank.set_input(0);
        rank.use_first_choices();
        rank.set_rows(0);
        rank.combine(rank.dispatch());
        rank.synchronize();
        rank.set_input(1);  // all choices
        comm.barrier("ready");
        if (comm.rank() != 1) {
          rank.combine(rank.dispatch());
          SWITCHYARD_CUDA(cudaStreamSynchronize(rank.stream()));
          test::expect_error(ErrorCode::kTimeout, "waiting for rank", [&] { rank.synchronize(); });
        }
        comm.recover();
        for (int epoch = 2; epoch < 4; ++epoch) (void)rank.run(epoch);
      },
      std::chrono::seconds(60));
}

TEST_P(LowLatency, RowsThatLookLikeNoResultComeHomeAsNaN) {
  for (const DType wire : {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3}) {
    ExchangeProblem problem = problem_of(GetParam(), 8, 2, 136, 12);
    problem.config.combine_wire = wire;
    run_ranks(GetParam(), [&](Communicator& comm) {
      NativeRank rank(problem, comm, ExchangeMode::kLowLatency, DType::kF32);
      rank.set_input(0);
      rank.set_rows(0, true);
      rank.combine(rank.dispatch());
      rank.synchronize();
      const std::vector<std::byte> out = rank.out();
      for (std::size_t i = 0; i < out.size(); i += 4) {
        float value = 0;
        std::memcpy(&value, &out[i], 4);
        ASSERT_TRUE(std::isnan(value)) << "value " << i / 4;
      }
      (void)rank.run(1);
      // Partial rows of nothing but ones too: those of a new checker are.
      DeviceChecker checker(problem, comm, ExchangeMode::kLowLatency);
      checker.set_input(0);
      checker.combine(checker.dispatch());
      checker.synchronize();
    });
  }
}

}  // namespace
}  // namespace switchyard
