// What another rank sends is not believed: counts and ids that cannot be are errors that name the
// sender, before anything is indexed with them.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/host/exchange.hpp"
#include "comm/ranks/packed.hpp"
#include "switchyard/dispatch.hpp"
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
  EXPECT_EQ(array_of<std::int64_t>(unpack(pack(pack_array(values)))), values);
  EXPECT_TRUE(array_of<std::int64_t>(pack_array(std::vector<float>{})).empty());
  expect_error(ErrorCode::kCommunication, "has 12 bytes, want a multiple of 8",
               [] { (void)array_of<std::int64_t>(pack_array(std::vector<float>(3))); });
}

/// Passes everything on; when rows have come, `damage` gets this rank's memory before it is read.
class DamagedWindow final : public Window {
 public:
  using Damage = std::function<void(std::byte* memory, std::size_t bytes)>;

  DamagedWindow(std::unique_ptr<Window> inner, const Damage& damage)
      : inner_(std::move(inner)), damage_(damage) {}

  std::byte* local() override { return inner_->local(); }
  [[nodiscard]] std::size_t bytes() const override { return inner_->bytes(); }
  [[nodiscard]] int num_signals() const override { return inner_->num_signals(); }
  void put(int rank, std::size_t offset, const void* data, std::size_t bytes) override {
    inner_->put(rank, offset, data, bytes);
  }
  std::byte* peer(int rank) override { return inner_->peer(rank); }
  void signal(int rank, int index, std::uint64_t value) override {
    inner_->signal(rank, index, value);
  }
  std::uint64_t wait(int index, std::uint64_t value, const WaitTarget& target) override {
    const std::uint64_t seen = inner_->wait(index, value, target);
    const bool all_have_come = std::string(target.phase) == "rows" && target.rank == 1;
    if (all_have_come && damage_) damage_(local(), bytes());
    return seen;
  }

 private:
  std::unique_ptr<Window> inner_;
  const Damage& damage_;
};

class DamagedRank final : public Communicator {
 public:
  explicit DamagedRank(Communicator& inner) : inner_(inner) {}

  DamagedWindow::Damage damage;

  [[nodiscard]] int rank() const override { return inner_.rank(); }
  [[nodiscard]] int size() const override { return inner_.size(); }
  [[nodiscard]] const Topology& topology() const override { return inner_.topology(); }
  [[nodiscard]] const char* engine() const override { return inner_.engine(); }
  void set_timeout(std::chrono::milliseconds limit) override { inner_.set_timeout(limit); }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return inner_.timeout(); }
  std::unique_ptr<Window> create_window(std::size_t bytes, int num_signals) override {
    return std::make_unique<DamagedWindow>(inner_.create_window(bytes, num_signals), damage);
  }
  void barrier(const char* phase) override { inner_.barrier(phase); }
  void give_up(const std::string& reason) noexcept override { inner_.give_up(reason); }
  void recover() override { inner_.recover(); }
  [[nodiscard]] std::uint64_t recoveries() const override { return inner_.recoveries(); }

 private:
  Communicator& inner_;
};

using Ids = std::array<std::int32_t, 3>;

/// Puts `bad` for the second id of the row with these ids.
DamagedWindow::Damage replace_id(const Ids& ids, std::int32_t bad) {
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

}  // namespace
}  // namespace switchyard
