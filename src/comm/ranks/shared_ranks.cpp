// Barriers, windows, giving up and recovering over counters in shared memory.
#include "comm/ranks/shared_ranks.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <thread>

#include "core/check.hpp"

namespace switchyard {
namespace {

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

/// Steps of recover(). Rank 0 leads: it takes all ranks once all have come.
enum RecoveryStep : std::uint32_t {
  kAway,    // not in recover(), or left it
  kCome,    // waits; may still leave
  kTaken,   // may not leave: all have come
  kZeroed,  // its signals are zero
};

}  // namespace

/// A part is [signals | bytes of the window], both at multiples of 128.
class SharedWindow final : public Window {
 public:
  using Counter = std::atomic<std::uint64_t>;

  SharedWindow(SharedRank& owner, std::vector<SharedRank::Part> parts, std::size_t bytes,
               int num_signals)
      : owner_(owner), parts_(std::move(parts)), bytes_(bytes), num_signals_(num_signals) {
    owner_.windows_.push_back(this);
  }
  ~SharedWindow() override { std::erase(owner_.windows_, this); }
  SharedWindow(const SharedWindow&) = delete;
  SharedWindow& operator=(const SharedWindow&) = delete;

  static std::size_t signal_bytes(int num_signals) {
    return static_cast<std::size_t>(ExchangeLayout::align(8 * std::int64_t{num_signals}));
  }
  std::byte* local() override { return peer(owner_.rank()); }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }
  [[nodiscard]] int num_signals() const override { return num_signals_; }
  void put(int rank, std::size_t offset, const void* data, std::size_t bytes) override {
    require(offset <= bytes_ && bytes <= bytes_ - offset,
            "put of {} bytes at {} exceeds the window's {}", bytes, offset, bytes_);
    if (bytes > 0) std::memcpy(peer(rank) + offset, data, bytes);
  }
  std::byte* peer(int rank) override {
    return parts_.at(at(rank)).get() + signal_bytes(num_signals_);
  }
  void signal(int rank, int index, std::uint64_t value) override {
    counter(rank, index).store(value);
    owner_.ring(rank);
  }
  std::uint64_t wait(int index, std::uint64_t value, const WaitTarget& target) override {
    const Counter& seen = counter(owner_.rank(), index);
    owner_.wait([&] { return seen.load() >= value; },
                [&] {
                  return fmt::format("{}: waiting for rank {}, expected {}, seen {}", target.phase,
                                     target.rank, value, seen.load());
                });
    return seen.load();
  }
  void zero_signals() {
    for (int i = 0; i < num_signals_; ++i) counter(owner_.rank(), i).store(0);
  }

 private:
  Counter& counter(int rank, int index) {
    return reinterpret_cast<Counter*>(parts_.at(at(rank)).get())[index];
  }

  SharedRank& owner_;
  std::vector<SharedRank::Part> parts_;
  const std::size_t bytes_;
  const int num_signals_;
};

void SharedRank::ring_all() noexcept {
  for (int rank = 0; rank < size_; ++rank) ring(rank);
}

std::string SharedRank::reason() const {
  // Only for the time that another rank needs to copy its words.
  for (int i = 0; i < 1000 && control_->failed.load() == 1; ++i) std::this_thread::yield();
  return control_->failed.load() == 2 ? std::string(control_->reason.data()) : "a rank failed";
}

void SharedRank::give_up(const std::string& reason) noexcept {
  std::uint32_t none = 0;
  if (control_->failed.compare_exchange_strong(none, 1)) {  // the first reason is the cause
    const std::size_t length = std::min(reason.size(), control_->reason.size() - 1);
    std::memcpy(control_->reason.data(), reason.data(), length);
    control_->reason[length] = '\0';
    control_->failed.store(2);
  }
  ring_all();
}

void SharedRank::wait(const std::function<bool()>& ready,
                      const std::function<std::string()>& describe) {
  const auto done = [&] { return ready() || control_->failed.load() != 0; };
  const bool in_time = sleep_until(done, deadline_after(timeout_));
  if (ready()) return;
  const std::string where = describe();
  if (in_time) fail(ErrorCode::kTimeout, "{}; left because {}", where, reason());
  give_up(fmt::format("rank {} waited {} ms: {}", rank_, timeout_.count(), where));
  fail(ErrorCode::kTimeout, "{} after {} ms", where, timeout_.count());
}

void SharedRank::barrier(const char* phase) {
  const std::uint64_t mine = ++control_->arrived[at(rank_)];
  ring_all();
  const auto missing = [&] {
    int rank = 0;
    while (rank < size_ && control_->arrived[at(rank)].load() >= mine) ++rank;
    return rank;
  };
  wait([&] { return missing() == size_; },
       [&] {
         const int rank = std::min(missing(), size_ - 1);
         return fmt::format("{}: waiting for rank {}, expected {}, seen {}", phase, rank, mine,
                            control_->arrived[at(rank)].load());
       });
}

std::unique_ptr<Window> SharedRank::create_window(std::size_t bytes, int num_signals) {
  require(num_signals >= 0, "num_signals={} is negative", num_signals);
  const std::size_t part_bytes = SharedWindow::signal_bytes(num_signals) + bytes;
  std::array<std::uint64_t, 2> words{};
  std::vector<Part> parts(at(size_));
  try {
    parts[at(rank_)] = make_part(part_bytes, words);
  } catch (const std::exception&) {
    give_up(fmt::format("rank {} has no memory for a window of {} bytes", rank_, bytes));
    fail(ErrorCode::kOutOfMemory, "a window of {} bytes on each rank", bytes);
  }
  auto& own = control_->offer[at(rank_)];
  own[0] = bytes;
  own[1] = static_cast<std::uint64_t>(num_signals);
  own[2] = words[0];
  own[3] = words[1];
  barrier("window");
  std::optional<int> other;
  for (int rank = 0; rank < size_; ++rank) {
    const auto& offer = control_->offer[at(rank)];
    if (offer[0].load() != own[0].load() || offer[1].load() != own[1].load()) {
      if (!other) other = rank;
    } else if (rank != rank_) {
      parts[at(rank)] = open_part(rank, part_bytes, {offer[2].load(), offer[3].load()});
    }
  }
  const std::array<std::uint64_t, 2> asked = {control_->offer[at(other.value_or(0))][0].load(),
                                              control_->offer[at(other.value_or(0))][1].load()};
  barrier("window");  // all have read what is offered: the next window may be
  if (other) {
    fail(ErrorCode::kCommunication,
         "ranks disagree on the window: rank {} asks for {} bytes and {} signals, rank {} for {} "
         "and {}",
         *other, asked[0], asked[1], rank_, bytes, num_signals);
  }
  return std::make_unique<SharedWindow>(*this, std::move(parts), bytes, num_signals);
}

int SharedRank::first_away() const {
  int rank = 0;
  while (rank < size_ && control_->recovery[at(rank)].load() != kAway) ++rank;
  return rank;
}

void SharedRank::leave_recovery() {
  const int missing = std::min(first_away(), size_ - 1);
  int seen = 0;
  for (int rank = 0; rank < size_; ++rank) {
    seen += control_->recovery[at(rank)].load() != kAway ? 1 : 0;
  }
  control_->recovery[at(rank_)] = kAway;  // so that it can be tried again
  fail(ErrorCode::kTimeout, "recover: waiting for rank {}, expected {}, seen {} after {} ms",
       missing, size_, seen, timeout_.count());
}

/// Rank 0: from all have come to all may go.
void SharedRank::take_all(Deadline deadline) {
  int taken = 0;
  while (taken < size_) {
    if (!sleep_until([&] { return first_away() == size_; }, deadline)) leave_recovery();
    for (taken = 0; taken < size_; ++taken) {
      std::uint32_t come = kCome;  // a rank whose own deadline passes may leave until it is taken
      if (!control_->recovery[at(taken)].compare_exchange_strong(come, kTaken)) break;
    }
    if (taken < size_) {
      for (int rank = 0; rank < taken; ++rank) control_->recovery[at(rank)] = kCome;
    }
  }
  ring_all();
  for (SharedWindow* window : windows_) window->zero_signals();
  control_->recovery[at(rank_)] = kZeroed;
  const auto zeroed = [&] {
    int rank = 0;
    while (rank < size_ && control_->recovery[at(rank)].load() == kZeroed) ++rank;
    return rank == size_;
  };
  if (!sleep_until(zeroed, deadline_after(timeout_))) {
    for (int rank = 0; rank < size_; ++rank) control_->recovery[at(rank)] = kAway;
    leave_recovery();
  }
  // Ranks may have failed in different operations: all count from zero again.
  for (int rank = 0; rank < size_; ++rank) {
    control_->arrived[at(rank)] = 0;
    control_->recovery[at(rank)] = kAway;
  }
  control_->failed = 0;
  ++control_->recovered;
  ring_all();
}

/// The other ranks.
void SharedRank::follow(Deadline deadline) {
  const std::uint64_t before = control_->recovered.load();
  auto& step = control_->recovery[at(rank_)];
  if (!sleep_until([&] { return step.load() == kTaken; }, deadline)) {
    std::uint32_t come = kCome;
    if (step.compare_exchange_strong(come, kAway)) leave_recovery();
  }
  for (SharedWindow* window : windows_) window->zero_signals();
  step = kZeroed;
  ring(0);
  // Twice, as rank 0 waits once more for the others.
  if (!sleep_until([&] { return control_->recovered.load() != before; },
                   deadline_after(2 * timeout_))) {
    leave_recovery();
  }
}

void SharedRank::recover() {
  give_up(fmt::format("rank {} recovers", rank_));  // nobody may go on before all have come
  control_->recovery[at(rank_)] = kCome;
  ring_all();
  const Deadline deadline = deadline_after(timeout_);
  if (rank_ == 0) {
    take_all(deadline);
  } else {
    follow(deadline);
  }
}

}  // namespace switchyard
