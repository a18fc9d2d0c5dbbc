// Engine "threads": ranks of one process. A window's parts are ordinary memory that only its rank
// reads; put() is a copy, a signal an atomic counter. Bound by memory bandwidth and, for small
// messages, by the time to wake a sleeping thread.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>

#include "comm/doorbell.hpp"
#include "core/check.hpp"
#include "switchyard/comm.hpp"

namespace switchyard {
namespace {

constexpr std::size_t kPartAlignment = 128;
struct FreeAligned {
  void operator()(std::byte* bytes) const {
    ::operator delete (bytes, std::align_val_t{kPartAlignment});
  }
};

/// The parts of one window, alive until the last rank has dropped it.
struct Parts {
  struct Part {
    std::size_t bytes = 0;
    int num_signals = 0;
    std::unique_ptr<std::byte, FreeAligned> memory;
    std::unique_ptr<std::atomic<std::uint64_t>[]> signals;
  };
  explicit Parts(int num_ranks) : parts(static_cast<std::size_t>(num_ranks)) {}
  std::vector<Part> parts;
};

/// What the ranks share besides windows.
struct Group {
  explicit Group(int num_ranks)
      : size(num_ranks),
        doorbell(static_cast<std::size_t>(num_ranks)),
        arrived(static_cast<std::size_t>(num_ranks)),
        recovering(static_cast<std::size_t>(num_ranks)),
        windows_made(static_cast<std::size_t>(num_ranks)) {}

  void ring_all() noexcept {
    for (Doorbell& bell : doorbell) bell.ring();
  }

  const int size;
  std::vector<Doorbell> doorbell;                   // one per rank
  std::vector<std::atomic<std::uint64_t>> arrived;  // barriers that each rank has come to
  std::atomic<bool> failed{false};
  std::atomic<std::uint64_t> recovered{0};
  std::mutex mutex;  // guards everything below
  std::string reason;
  std::vector<char> recovering;
  std::vector<std::uint64_t> windows_made;
  std::map<std::uint64_t, std::shared_ptr<Parts>> unfinished;  // by order of creation
  std::vector<std::weak_ptr<Parts>> windows;
};

class ThreadRank;

class ThreadWindow final : public Window {
 public:
  ThreadWindow(ThreadRank& owner, std::shared_ptr<Parts> parts, int rank)
      : owner_(owner), parts_(std::move(parts)), own_(part(rank)) {}

  std::byte* local() override { return own_.memory.get(); }
  [[nodiscard]] std::size_t bytes() const override { return own_.bytes; }
  [[nodiscard]] int num_signals() const override { return own_.num_signals; }
  void put(int rank, std::size_t offset, const void* data, std::size_t bytes) override {
    require(offset <= own_.bytes && bytes <= own_.bytes - offset,
            "put of {} bytes at {} exceeds the window's {}", bytes, offset, own_.bytes);
    if (bytes > 0) std::memcpy(part(rank).memory.get() + offset, data, bytes);
  }
  std::byte* peer(int rank) override { return part(rank).memory.get(); }
  void signal(int rank, int index, std::uint64_t value) override;
  std::uint64_t wait(int index, std::uint64_t value, const WaitTarget& target) override;

 private:
  Parts::Part& part(int rank) { return parts_->parts.at(static_cast<std::size_t>(rank)); }

  ThreadRank& owner_;
  std::shared_ptr<Parts> parts_;
  Parts::Part& own_;
};

class ThreadRank final : public Communicator {
 public:
  ThreadRank(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return group_->size; }
  [[nodiscard]] const char* engine() const override { return "threads"; }
  void set_timeout(std::chrono::milliseconds limit) override { timeout_ = limit; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return timeout_; }
  [[nodiscard]] std::uint64_t recoveries() const override { return group_->recovered.load(); }

  std::unique_ptr<Window> create_window(std::size_t bytes, int num_signals) override;
  void barrier(const char* phase) override;
  void give_up(const std::string& reason) noexcept override;
  void recover() override;

  Group& group() { return *group_; }
  /// Wait for `ready`, leaving with kTimeout at the deadline or once a rank has given up;
  /// `describe()` has phase, rank, expected and seen.
  template <typename Ready, typename Describe>
  void wait(const Ready& ready, const Describe& describe) {
    const auto done = [&] { return ready() || group_->failed.load(); };
    const bool in_time = bell().wait(done, deadline_after(timeout_));
    if (ready()) return;
    const std::string where = describe();
    if (!in_time) {
      give_up(fmt::format("rank {} waited {} ms: {}", rank_, timeout_.count(), where));
      fail(ErrorCode::kTimeout, "{} after {} ms", where, timeout_.count());
    }
    const std::lock_guard lock(group_->mutex);
    fail(ErrorCode::kTimeout, "{}; left because {}", where, group_->reason);
  }

 private:
  Doorbell& bell() { return group_->doorbell[static_cast<std::size_t>(rank_)]; }
  void reset_group();

  std::shared_ptr<Group> group_;
  const int rank_;
  std::chrono::milliseconds timeout_{10000};
};

void ThreadWindow::signal(int rank, int index, std::uint64_t value) {
  part(rank).signals[static_cast<std::size_t>(index)].store(value);
  owner_.group().doorbell[static_cast<std::size_t>(rank)].ring();
}

std::uint64_t ThreadWindow::wait(int index, std::uint64_t value, const WaitTarget& target) {
  const std::atomic<std::uint64_t>& counter = own_.signals[static_cast<std::size_t>(index)];
  owner_.wait([&] { return counter.load() >= value; },
              [&] {
                return fmt::format("{}: waiting for rank {}, expected {}, seen {}", target.phase,
                                   target.rank, value, counter.load());
              });
  return counter.load();
}

void ThreadRank::barrier(const char* phase) {
  Group& group = *group_;
  const std::uint64_t mine = ++group.arrived[static_cast<std::size_t>(rank_)];
  group.ring_all();
  const auto missing = [&] {
    int rank = 0;
    while (rank < group.size && group.arrived[static_cast<std::size_t>(rank)].load() >= mine)
      ++rank;
    return rank;
  };
  wait([&] { return missing() == group.size; },
       [&] {
         const int rank = std::min(missing(), group.size - 1);
         return fmt::format("{}: waiting for rank {}, expected {}, seen {}", phase, rank, mine,
                            group.arrived[static_cast<std::size_t>(rank)].load());
       });
}

std::unique_ptr<Window> ThreadRank::create_window(std::size_t bytes, int num_signals) {
  require(num_signals >= 0, "num_signals={} is negative", num_signals);
  std::shared_ptr<Parts> parts;
  std::uint64_t order = 0;
  {
    const std::lock_guard lock(group_->mutex);
    order = group_->windows_made[static_cast<std::size_t>(rank_)]++;
    std::shared_ptr<Parts>& entry = group_->unfinished[order];
    if (!entry) entry = std::make_shared<Parts>(group_->size);
    parts = entry;
  }
  Parts::Part& own = parts->parts[static_cast<std::size_t>(rank_)];
  own.bytes = bytes;
  own.num_signals = num_signals;
  try {
    own.memory.reset(static_cast<std::byte*>(
        ::operator new (std::max<std::size_t>(bytes, 1), std::align_val_t{kPartAlignment})));
    std::memset(own.memory.get(), 0, bytes);
    own.signals =
        std::make_unique<std::atomic<std::uint64_t>[]>(static_cast<std::size_t>(num_signals));
  } catch (const std::bad_alloc&) {
    give_up(fmt::format("rank {} has no memory for a window of {} bytes", rank_, bytes));
    fail(ErrorCode::kOutOfMemory, "a window of {} bytes on each rank", bytes);
  }
  barrier("window");
  for (int rank = 0; rank < group_->size; ++rank) {
    const Parts::Part& other = parts->parts[static_cast<std::size_t>(rank)];
    if (other.bytes == bytes && other.num_signals == num_signals) continue;
    fail(ErrorCode::kCommunication,
         "ranks disagree on the window: rank {} asks for {} bytes and {} signals, rank {} for {} "
         "and {}",
         rank, other.bytes, other.num_signals, rank_, bytes, num_signals);
  }
  {
    const std::lock_guard lock(group_->mutex);
    if (group_->unfinished.erase(order) > 0) group_->windows.emplace_back(parts);
  }
  return std::make_unique<ThreadWindow>(*this, parts, rank_);
}

void ThreadRank::give_up(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(group_->mutex);
    if (!group_->failed.load()) group_->reason = reason;  // the first reason is the cause
    group_->failed.store(true);
  }
  group_->ring_all();
}

/// All ranks are in recover(), so none uses what is reset here.
void ThreadRank::reset_group() {
  Group& group = *group_;
  std::erase_if(group.windows, [](const auto& window) { return window.expired(); });
  for (const auto& window : group.windows) {
    const std::shared_ptr<Parts> parts = window.lock();
    if (!parts) continue;
    for (const Parts::Part& part : parts->parts) {
      for (int i = 0; i < part.num_signals; ++i) {
        part.signals[static_cast<std::size_t>(i)].store(0);
      }
    }
  }
  group.unfinished.clear();
  // Ranks may have failed in different operations: count on from the same number.
  std::ranges::fill(group.windows_made, std::ranges::max(group.windows_made));
  std::uint64_t latest = 0;
  for (const auto& count : group.arrived) latest = std::max(latest, count.load());
  for (auto& count : group.arrived) count.store(latest);
  std::ranges::fill(group.recovering, char{0});
  group.reason.clear();
  group.failed.store(false);
  group.recovered.store(group.recovered.load() + 1);
}

void ThreadRank::recover() {
  Group& group = *group_;
  std::uint64_t before = 0;
  {
    const std::lock_guard lock(group.mutex);
    before = group.recovered.load();
    group.failed.store(true);  // nobody may pass a wait between the first and the last to come
    if (group.reason.empty()) group.reason = fmt::format("rank {} recovers", rank_);
    group.recovering[static_cast<std::size_t>(rank_)] = 1;
    if (std::ranges::count(group.recovering, char{1}) == group.size) reset_group();
  }
  group.ring_all();
  const auto done = [&] { return group.recovered.load() != before; };
  if (bell().wait(done, deadline_after(timeout_))) return;
  const std::lock_guard lock(group.mutex);
  if (done()) return;
  const auto missing = std::ranges::find(group.recovering, char{0}) - group.recovering.begin();
  const auto seen = std::ranges::count(group.recovering, char{1});
  group.recovering[static_cast<std::size_t>(rank_)] = 0;  // so that it can be tried again
  fail(ErrorCode::kTimeout, "recover: waiting for rank {}, expected {}, seen {} after {} ms",
       missing, group.size, seen, timeout_.count());
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_ranks(int num_ranks) {
  require(num_ranks >= 1 && num_ranks <= 64, "number of ranks is {}, want 1 to 64", num_ranks);
  const auto group = std::make_shared<Group>(num_ranks);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.push_back(std::make_unique<ThreadRank>(group, rank));
  }
  return ranks;
}

std::unique_ptr<Communicator> make_single_rank() { return std::move(make_thread_ranks(1).front()); }

}  // namespace switchyard
