// Exchanges beside each other: two on one communicator, two communicators in one process; and what
// creation refuses, in words, on every rank.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/ranks/forwarding.hpp"
#include "switchyard/error.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/device_checker.hpp"

namespace switchyard {
namespace {

class DeviceObjects : public testing::Test {
 protected:
  void SetUp() override {
    if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  }
};

void run_in_turn(DeviceChecker& first, DeviceChecker& second) {
  for (int epoch = 0; epoch < 4; ++epoch) {
    first.run(epoch);
    second.run(epoch);
  }
}

TEST_F(DeviceObjects, TwoExchangesOnOneCommunicatorTakeTurns) {
  const ExchangeProblem many = problem_of(3, 16, 4, 264, 60);
  const ExchangeProblem few = problem_of(3, 7, 3, 2048, 9);
  run_ranks(
      3,
      [&](Communicator& comm) {
        DeviceChecker first(many, comm, ExchangeMode::kThroughput);
        DeviceChecker second(few, comm, ExchangeMode::kLowLatency);
        run_in_turn(first, second);
      },
      std::chrono::seconds(60));
}

TEST_F(DeviceObjects, TwoCommunicatorsOfOneProcessDoNotMixWhatTheyCarry) {
  const ExchangeProblem a = problem_of(3, 16, 4, 264, 60);
  const ExchangeProblem b = problem_of(3, 7, 3, 512, 33);
  const auto others = make_thread_ranks(3);
  run_ranks(
      3,
      [&](Communicator& comm) {
        Communicator& other = *others[static_cast<std::size_t>(comm.rank())];
        other.set_timeout(std::chrono::seconds(60));
        DeviceChecker first(a, comm, ExchangeMode::kThroughput);
        DeviceChecker second(b, other, ExchangeMode::kThroughput);
        run_in_turn(first, second);
      },
      std::chrono::seconds(60));
}

TEST_F(DeviceObjects, EachValueThatOneRankHasDifferentlyIsNamedOnEveryRank) {
  using Config = ExpertParallelConfig;
  const struct {
    void (*change)(Config&, DeviceExchangeOptions&);
    const char* words;
  } cases[] = {
      {[](Config& c, DeviceExchangeOptions&) { c.num_experts = 17; }, "num_experts="},
      {[](Config& c, DeviceExchangeOptions&) { c.top_k = 3; }, "top_k="},
      {[](Config& c, DeviceExchangeOptions&) { c.hidden = 72; }, "hidden="},
      {[](Config& c, DeviceExchangeOptions&) { c.max_tokens = 9; }, "max_tokens="},
      {[](Config& c, DeviceExchangeOptions&) { c.dtype = DType::kF16; }, "dtype="},
      {[](Config& c, DeviceExchangeOptions&) { c.dispatch_wire = DType::kF8E4M3; },
       "dispatch_wire="},
      {[](Config&, DeviceExchangeOptions& o) { o.mode = ExchangeMode::kThroughput; }, "mode="},
      {[](Config&, DeviceExchangeOptions& o) { o.ctas = 3; }, "ctas="},
      {[](Config&, DeviceExchangeOptions& o) { o.one_place = true; }, "one_place="},
  };
  run_ranks(2, [&](Communicator& comm) {
    for (const auto& [change, words] : cases) {
      Config config = problem_of(2, 16, 4, 64, 8).config;
      DeviceExchangeOptions options{.device = comm.rank() % num_devices(), .ctas = 4};
      if (comm.rank() == 1) change(config, options);
      test::expect_error(ErrorCode::kCommunication, words,
                         [&] { const DeviceExpertParallel exchange(comm, config, options); });
    }
    const ExchangeProblem problem = problem_of(2, 16, 4, 64, 8);
    DeviceChecker(problem, comm, ExchangeMode::kAuto).run(0);  // and afterwards they agree
  });
}

TEST_F(DeviceObjects, MoreRanksThanEightOrOddSizesAreRefusedInWords) {
  const auto refused = [](int ranks, std::int64_t hidden, const char* words) {
    run_ranks(ranks, [&](Communicator& comm) {
      const ExpertParallelConfig config = problem_of(ranks, 32, 4, hidden, 8).config;
      test::expect_error(ErrorCode::kUnsupported, words, [&] {
        const DeviceExpertParallel exchange(comm, config,
                                            {.device = comm.rank() % num_devices(), .ctas = 1});
      });
    });
  };
  refused(9, 64, "9 ranks, at most 8: its kernels keep a set of ranks in 8 bits");
  refused(1, 60, "hidden=60 is no multiple of 8");
}

/// As `inner`, but every rank says that it is on a node of its own.
class ANodeEach final : public ForwardingCommunicator<> {
 public:
  explicit ANodeEach(Communicator& inner) : ForwardingCommunicator(inner) {
    for (int r = 0; r < inner.size(); ++r) {
      topology_.node.push_back(r);
      topology_.domain.push_back(r);
      topology_.name.push_back("host-" + std::to_string(r));
    }
  }
  [[nodiscard]] const Topology& topology() const override { return topology_; }

 private:
  Topology topology_;
};

TEST_F(DeviceObjects, ARankOnAnotherNodeIsNamedWhereWindowsReachOneNodeOnly) {
  run_ranks(2, [](Communicator& comm) {
    const ExpertParallelConfig config = problem_of(2, 16, 4, 64, 8).config;
    const DeviceExchangeOptions options{
        .device = comm.rank() % num_devices(), .engine = DeviceEngine::kPeer, .ctas = 2};
    ANodeEach nodes(comm);
    test::expect_error(ErrorCode::kUnsupported, "on node 1 (host-1)",
                       [&] { const DeviceExpertParallel exchange(nodes, config, options); });
    const DeviceExpertParallel exchange(comm, config, options);
    EXPECT_EQ(exchange.topology().domain, (std::vector<std::int32_t>{0, 0}));
  });
}

TEST_F(DeviceObjects, ABoundOfRowsChoosesTheModeThatHasOne) {
  run_ranks(2, [](Communicator& comm) {
    ExpertParallelConfig config = problem_of(2, 16, 4, 64, 8).config;
    config.max_recv_rows = 3;
    DeviceExchangeOptions options{.device = comm.rank() % num_devices(), .ctas = 2};
    EXPECT_EQ(DeviceExpertParallel(comm, config, options).mode(), ExchangeMode::kThroughput);
    options.mode = ExchangeMode::kLowLatency;
    test::expect_error(ErrorCode::kUnsupported, "takes no max_recv_rows",
                       [&] { const DeviceExpertParallel exchange(comm, config, options); });
  });
}

}  // namespace
}  // namespace switchyard
