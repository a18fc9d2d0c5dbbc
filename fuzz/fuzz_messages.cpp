// What another rank may send: any bytes as messages and rows of an exchange, and any bytes as what
// it tells of itself. Either an error of communication, or rows that the next stages can work on.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/host/send_plan.hpp"
#include "comm/ranks/forwarding.hpp"
#include "layer/packed_result.hpp"
#include "switchyard/dispatch.hpp"
#include "switchyard/error.hpp"
#include "switchyard/plan.hpp"

using namespace switchyard;  // NOLINT

namespace {

/// One rank that finds other bytes in its window than it has put there.
class SentWindow final : public ForwardingWindow {
 public:
  SentWindow(std::unique_ptr<Window> inner, std::span<const std::uint8_t>& input)
      : ForwardingWindow(std::move(inner)), input_(input) {}

  /// The next bytes of the input: how many to write, where, and which.
  std::uint64_t wait(int index, std::uint64_t value, const WaitTarget& target) override {
    const std::uint64_t seen = ForwardingWindow::wait(index, value, target);
    while (input_.size() > 3 && input_[0] % 4 != 0) {
      const std::size_t place = (input_[1] + std::size_t{256} * input_[2]) * 4 % bytes();
      const std::size_t size =
          std::min({std::size_t{input_[0]}, input_.size() - 3, bytes() - place});
      std::memcpy(local() + place, input_.data() + 3, size);
      input_ = input_.subspan(3 + size);
    }
    if (!input_.empty()) input_ = input_.subspan(1);
    return seen;
  }

 private:
  std::span<const std::uint8_t>& input_;
};

class Rank final : public Communicator {
 public:
  explicit Rank(std::span<const std::uint8_t>& input) : input_(input) {}

  [[nodiscard]] int rank() const override { return 0; }
  [[nodiscard]] int size() const override { return 1; }
  [[nodiscard]] const Topology& topology() const override { return alone_->topology(); }
  [[nodiscard]] const char* engine() const override { return "fuzz"; }
  void set_timeout(std::chrono::milliseconds limit) override { alone_->set_timeout(limit); }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return alone_->timeout(); }
  std::unique_ptr<Window> create_window(std::size_t bytes, int num_signals) override {
    return std::make_unique<SentWindow>(alone_->create_window(bytes, num_signals), input_);
  }
  void barrier(const char* /*phase*/) override {}
  void give_up(const std::string& /*reason*/) noexcept override {}
  void recover() override {}
  [[nodiscard]] std::uint64_t recoveries() const override { return 0; }

 private:
  std::unique_ptr<Communicator> alone_ = make_single_rank();
  std::span<const std::uint8_t>& input_;
};

void exchange(std::span<const std::uint8_t> input) {
  constexpr std::int64_t kTokens = 3, kHidden = 5, kTopK = 2;
  // The first bytes of the window are what the ranks agree on: no damage before the exchange.
  std::span<const std::uint8_t> none;
  std::span<const std::uint8_t>& current = none;
  Rank rank(current);
  ExpertParallel exchange(rank, {.num_experts = 4,
                                 .top_k = kTopK,
                                 .hidden = kHidden,
                                 .max_tokens = kTokens,
                                 .combine_wire = DType::kF8E4M3,
                                 .rank_invariant = true});
  const std::vector<float> x(kTokens * kHidden, 1.0F);
  const std::vector<std::int32_t> expert{0, 3, 2, -1, 1, 0};
  const std::vector<float> weight(kTokens * kTopK, 0.5F);
  current = input;
  try {
    const Received received = exchange.dispatch(
        {.x = {reinterpret_cast<const std::byte*>(x.data()), DType::kF32, kTokens, kHidden},
         .expert = {expert.data(), {kTokens, kTopK}},
         .weight = {weight.data(), {kTokens, kTopK}}});
    const std::int64_t rows = received.x.rows;
    Plan owner;
    plan({.assignments = DenseAssignments{.expert = received.expert, .weight = received.weight},
          .total_experts = 4,
          .plan = owner.reserve(rows, kTopK, 4, rows * kTopK)});
    const std::int64_t groups = exchange.subtree().num_groups;
    const std::vector<float> partials(static_cast<std::size_t>(rows * groups * kHidden), 1.0F);
    std::vector<float> out(x.size());
    exchange.combine(
        {.partials = {reinterpret_cast<const std::byte*>(partials.data()), DType::kF32,
                      rows * groups, kHidden},
         .out = {reinterpret_cast<std::byte*>(out.data()), DType::kF32, kTokens, kHidden}});
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCommunication) std::abort();
  }
}

void story(std::span<const std::uint8_t> input) {
  const auto bytes = std::as_bytes(input);
  try {
    const nlohmann::json message = unpack_message({bytes.begin(), bytes.end()});
    const RoutingRecord record = record_of(message);
    const Traffic traffic = traffic_of(message);
    if (record.expert.size() > input.size() || traffic.rows.size() > input.size()) std::abort();
  } catch (const nlohmann::json::exception&) {  // it is no message, or lacks a member
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCommunication) std::abort();
  }
}

/// Counts of rows that the checks of a message let through: 0 to max_tokens each.
void placement(std::span<const std::uint8_t> input) {
  constexpr std::int32_t kRanks = 3;
  std::vector<std::int64_t> counts(kRanks * kRanks);
  for (std::size_t i = 0; i < counts.size() && i < input.size(); ++i) counts[i] = input[i] % 8;
  const std::int64_t most = input.size() > counts.size() ? input[counts.size()] % 32 : 24;
  Placement place;
  make_placement(counts, kRanks, most, place);
  for (std::int32_t to = 0; to < kRanks; ++to) {
    std::int64_t end = 0;
    for (std::int32_t from = 0; from < kRanks; ++from) {
      if (place.first_row(from, to) != end) std::abort();
      end += place.sent_rows(from, to);
    }
    if (end > most || place.dropped[static_cast<std::size_t>(to)] < 0) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span input(data + 1, size - 1);
  switch (data[0] % 3) {
    case 0: exchange(input); break;
    case 1: story(input); break;
    default: placement(input);
  }
  return 0;
}
