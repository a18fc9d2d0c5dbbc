// What another rank sends is not believed: counts and ids that cannot be are errors that name the
// sender, before anything is indexed with them.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "comm/host/exchange.hpp"
#include "comm/ranks/packed.hpp"
#include "switchyard/dispatch.hpp"
#include "testkit/damaged_rank.hpp"
#include "testkit/exchange_checker.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/rank_harness.hpp"

namespace switchyard {
namespace {

using test::expect_error;

/// A message as rank 0 publishes it, and what rank 0 makes of it.
class OneRank {
 public:
  OneRank() : exchange_(*comm_, {.num_ranks = 1, .max_rows = 8}) {}

  std::int64_t receive(std::uint64_t sent_epoch, std::int64_t count, std::uint64_t epoch,
                       std::int64_t limit) {
    const ExchangeLayout& layout = exchange_.layout();
    exchange_.publish("counts", sent_epoch, {count}, layout.counts(0, 0), layout.counts_signal(0));
    std::int64_t read = -7;
    exchange_.read("counts", epoch, 0, layout.counts(0, 0), layout.counts_signal(0), limit, &read);
    return read;
  }

 private:
  std::unique_ptr<Communicator> comm_ = make_single_rank();
  Exchange exchange_;
};

TEST(ExchangeMessages, ACountWithinTheLimitIsRead) {
  EXPECT_EQ(OneRank().receive(1, 0, 1, 5), 0);
  EXPECT_EQ(OneRank().receive(1, 5, 1, 5), 5);
}

TEST(ExchangeMessages, AMessageOfAnotherExchangeIsRefused) {
  expect_error(ErrorCode::kCommunication,
               "counts: the message of rank 0 to rank 0 is of exchange 3, expected 2",
               [] { (void)OneRank().receive(3, 5, 2, 5); });
}

TEST(ExchangeMessages, ACountThatCannotBeIsRefused) {
  for (const std::int64_t count :
       {std::int64_t{6}, std::int64_t{-1}, std::numeric_limits<std::int64_t>::max(),
        std::numeric_limits<std::int64_t>::min()}) {
    expect_error(ErrorCode::kCommunication,
                 "has " + std::to_string(count) + " rows for rank 0, at most 5 are possible",
                 [&] { (void)OneRank().receive(1, count, 1, 5); });
  }
}

TEST(ExchangeMessages, AnArrayThatIsNoWholeNumberOfElementsIsRefused) {
  const std::vector<std::int64_t> values{1, -2, 3};
  EXPECT_EQ(array_of<std::int64_t>(unpack_message(pack_message(pack_array(values)))), values);
  EXPECT_TRUE(array_of<std::int64_t>(pack_array(std::vector<float>{})).empty());
  expect_error(ErrorCode::kCommunication, "has 12 bytes, want a multiple of 8",
               [] { (void)array_of<std::int64_t>(pack_array(std::vector<float>(3))); });
}

using Ids = std::array<std::int32_t, 3>;

/// Puts `bad` for the second id of the row with these ids.
Damage replace_id(const Ids& ids, std::int32_t bad) {
  return [ids, bad](std::byte* memory, std::size_t bytes) {
    const auto* wanted = reinterpret_cast<const std::byte*>(ids.data());
    std::byte* found = std::search(memory, memory + bytes, wanted, wanted + sizeof(ids));
    ASSERT_NE(found, memory + bytes);
    std::memcpy(found + 4, &bad, 4);
  };
}

TEST(ExchangeMessages, AnIdThatIsNotOfTheReceiversExpertsIsRefusedAndTheNextExchangeIsRight) {
  constexpr std::int64_t kHidden = 9;
  on_ranks(2, [](Communicator& inner) {
    DamagedRank comm(inner);
    ExpertParallel exchange(comm, {.num_experts = 10,
                                   .top_k = 3,
                                   .hidden = kHidden,
                                   .max_tokens = 2,
                                   .rank_invariant = true});
    // Two tokens a rank; rank 1 has the experts 5 to 9.
    const int rank = comm.rank();
    const Ids last = rank == 0 ? Ids{9, 7, 5} : Ids{6, 8, 9};
    const std::vector<std::int32_t> expert{0, 5, -1, last[0], last[1], last[2]};
    const std::vector<float> weight(6, 1.0F);
    const std::vector<float> x(2 * kHidden, 1.0F);
    const auto dispatch = [&] {
      return exchange.dispatch(
          {.x = {reinterpret_cast<const std::byte*>(x.data()), DType::kF32, 2, kHidden},
           .expert = {expert.data(), {2, 3}},
           .weight = {weight.data(), {2, 3}}});
    };
    for (const std::int32_t bad : {10, std::numeric_limits<std::int32_t>::max(), -2,
                                   std::numeric_limits<std::int32_t>::min(), 4}) {
      for (const int source : {0, 1}) {
        if (rank == 1) {
          comm.damage = replace_id(source == 0 ? Ids{9, 7, 5} : Ids{6, 8, 9}, bad);
          expect_error(ErrorCode::kCommunication,
                       "rows: row 1 of rank " + std::to_string(source) + " to rank 1 has expert " +
                           std::to_string(bad) + ", want 5 to 9 or -1",
                       [&] { (void)dispatch(); });
          comm.damage = nullptr;
        } else {
          try {  // it may have all it needs, and then leaves in the barrier
            (void)dispatch();
            comm.barrier("after the dispatch");
            ADD_FAILURE() << "no error";
          } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find("rank 1 failed"), std::string::npos)
                << error.what();
          }
        }
        comm.recover();
        const Received received = dispatch();
        EXPECT_EQ(received.x.rows, rank == 0 ? 2 : 4);
        comm.barrier("held");
      }
    }
  });
}

TEST(ExchangeMessages, TheCheckerOfExchangesSeesRowsThatAreNotThoseSent) {
  const ExchangeProblem problem{
      .name = "checker",
      .num_ranks = 1,
      .config = {.num_experts = 10, .top_k = 3, .hidden = 33, .max_tokens = 17}};
  const auto alone = make_single_rank();
  DamagedRank comm(*alone);
  ExpertParallel exchange(comm, problem.config);
  Checker checker(problem, comm);
  checker.run(exchange, 0);
  comm.damage = [](std::byte* memory, std::size_t bytes) {
    std::fill_n(memory, bytes, std::byte{0xff});
  };
  testing::TestPartResultArray failures;
  {
    const testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
    checker.run(exchange, 1);
  }
  EXPECT_GT(failures.size(), 0);
}

}  // namespace
}  // namespace switchyard
