// Windows over messages. Two MPI communicators: one for letters, made anew by recover() so that
// nothing of a failed exchange can arrive later, and one for control that stays, on which the ranks
// meet to recover.
#include "comm/ranks/mpi/messages.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "comm/exchange_layout.hpp"
#include "comm/ranks/deadline.hpp"
#include "comm/ranks/engine_words.hpp"
#include "comm/ranks/mpi/meeting.hpp"
#include "comm/ranks/mpi/post.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// Barriers and windows that all ranks are known to have come to. One that one rank has passed, all
/// pass, though another rank's word of it may come later than that a third has failed since.
struct Passed {
  std::uint64_t barriers = 0;
  std::uint32_t windows = 0;
};

/// The first of a vector of optional values that is missing, its size if none is.
template <typename T>
int first_missing(const std::vector<std::optional<T>>& values) {
  std::size_t i = 0;
  while (i < values.size() && values[i].has_value()) ++i;
  return static_cast<int>(i);
}

class MessageWindow;

class MessageRank final : public Communicator {
 public:
  MessageRank(MPI_Comm control, Topology topology);
  MessageRank(const MessageRank&) = delete;
  MessageRank& operator=(const MessageRank&) = delete;
  ~MessageRank() override = default;

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] const Topology& topology() const override { return topology_; }
  [[nodiscard]] const char* engine() const override { return kMpiEngine; }
  void set_timeout(std::chrono::milliseconds limit) override { timeout_ = limit; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return timeout_; }
  [[nodiscard]] std::uint64_t recoveries() const override { return meeting_.recoveries(); }
  std::unique_ptr<Window> create_window(std::size_t bytes, int num_signals) override;
  void barrier(const char* phase) override;
  void give_up(const std::string& reason) noexcept override;
  void recover() override;

  /// A wait that is `sure` to end does not leave because another rank has failed.
  void wait(
      const std::function<bool()>& ready, const std::function<std::string()>& describe,
      const std::function<bool()>& sure = [] { return false; });
  void send(int rank, const Letter& letter, const void* bytes = nullptr);
  void forget(std::uint32_t window) { windows_.erase(window); }

 private:
  void deliver(int source, const Letter& letter, const std::byte* bytes);
  void progress();
  bool poll(const std::function<bool()>& ready, Deadline deadline);
  void meet(Deadline deadline);
  void renew(Deadline deadline);

  MPI_Comm control_;
  MPI_Comm letters_ = MPI_COMM_NULL;
  const int rank_;
  const int size_;
  const Topology topology_;
  std::chrono::milliseconds timeout_{10000};
  std::unique_ptr<MessagePost> post_;
  std::vector<std::uint64_t> arrived_;
  std::map<std::uint32_t, MessageWindow*> windows_;
  std::map<std::uint32_t, std::vector<std::optional<std::pair<std::uint64_t, std::uint64_t>>>>
      offers_;
  std::uint32_t windows_made_ = 0;
  Passed passed_;
  bool failed_ = false;
  std::string reason_;
  MessageMeeting meeting_;
  // Of recover(): a step that timed out is gone on with at the next call.
  MPI_Comm next_letters_ = MPI_COMM_NULL;
  MPI_Request renewing_ = MPI_REQUEST_NULL;
};

class MessageWindow final : public Window {
 public:
  MessageWindow(MessageRank& owner, std::uint32_t id, std::size_t bytes, int num_signals)
      : owner_(owner),
        id_(id),
        bytes_(bytes),
        memory_(static_cast<std::byte*>(::operator new(std::max<std::size_t>(bytes, 1), kAlign))),
        signals_(at(num_signals), 0) {
    std::memset(memory_.get(), 0, bytes);
  }
  MessageWindow(const MessageWindow&) = delete;
  MessageWindow& operator=(const MessageWindow&) = delete;
  ~MessageWindow() override { owner_.forget(id_); }

  std::byte* local() override { return memory_.get(); }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }
  [[nodiscard]] int num_signals() const override { return static_cast<int>(signals_.size()); }
  void put(int rank, std::size_t offset, const void* data, std::size_t bytes) override {
    require(offset <= bytes_ && bytes <= bytes_ - offset,
            "put of {} bytes at {} exceeds the window's {}", bytes, offset, bytes_);
    if (bytes == 0) return;
    if (rank == owner_.rank()) {
      std::memcpy(memory_.get() + offset, data, bytes);
    } else {
      owner_.send(rank, {Letter::kPut, id_, offset, bytes}, data);
    }
  }
  std::byte* peer(int rank) override { return rank == owner_.rank() ? local() : nullptr; }
  void signal(int rank, int index, std::uint64_t value) override {
    if (rank == owner_.rank()) {
      signals_.at(at(index)) = value;
    } else {
      owner_.send(rank, {Letter::kSignal, id_, static_cast<std::uint64_t>(index), value});
    }
  }
  std::uint64_t wait(int index, std::uint64_t value, const WaitTarget& target) override {
    const std::uint64_t& seen = signals_.at(at(index));
    owner_.wait([&] { return seen >= value; },
                [&] {
                  return fmt::format("{}: waiting for rank {}, expected {}, seen {}", target.phase,
                                     target.rank, value, seen);
                });
    return seen;
  }
  void land(const Letter& letter, const std::byte* bytes) {
    if (letter.kind == Letter::kSignal) {
      signals_.at(letter.first) = letter.second;
    } else {
      std::memcpy(memory_.get() + letter.first, bytes, letter.second);
    }
  }
  void zero_signals() { std::ranges::fill(signals_, std::uint64_t{0}); }

 private:
  static constexpr std::align_val_t kAlign{ExchangeLayout::kAlignment};
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlign); }
  };
  MessageRank& owner_;
  const std::uint32_t id_;
  const std::size_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
  std::vector<std::uint64_t> signals_;
};

int rank_in(MPI_Comm communicator) {
  int rank = 0;
  check_mpi(MPI_Comm_rank(communicator, &rank), "MPI_Comm_rank");
  return rank;
}

int size_of_group(MPI_Comm communicator) {
  int size = 0;
  check_mpi(MPI_Comm_size(communicator, &size), "MPI_Comm_size");
  require(size <= kMaxRanks, "{} ranks, at most {} are possible", size, kMaxRanks);
  return size;
}

MessageRank::MessageRank(MPI_Comm control, Topology topology)
    : control_(control),
      rank_(rank_in(control)),
      size_(size_of_group(control)),
      topology_(std::move(topology)),
      arrived_(at(size_), 0),
      meeting_(control, rank_, size_) {
  renew(deadline_after(std::chrono::seconds(60)));
}

void MessageRank::send(int rank, const Letter& letter, const void* bytes) {
  post_->send(rank, letter, bytes);
}

void MessageRank::deliver(int source, const Letter& letter, const std::byte* bytes) {
  if (letter.kind == Letter::kArrive) {
    arrived_[at(source)] = letter.first;
  } else if (letter.kind == Letter::kOffer) {
    auto& offers = offers_[letter.window];
    offers.resize(at(size_));
    offers[at(source)] = {letter.first, letter.second};
  } else if (letter.kind == Letter::kFailed) {
    passed_.barriers = std::max(passed_.barriers, letter.first);
    passed_.windows = std::max(passed_.windows, letter.window);
    if (!failed_) reason_.assign(reinterpret_cast<const char*>(bytes), letter.second);
    failed_ = true;
  } else if (const auto window = windows_.find(letter.window); window != windows_.end()) {
    window->second->land(letter, bytes);
  }
}

void MessageRank::progress() {
  if (post_) post_->progress();
  meeting_.progress();
}

/// Polls until `ready()`; false at the deadline.
bool MessageRank::poll(const std::function<bool()>& ready, Deadline deadline) {
  constexpr int kYields = 20000;  // then sleep: the partner computes
  for (int i = 0;; ++i) {
    progress();
    if (ready()) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    if (i < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

void MessageRank::wait(const std::function<bool()>& ready,
                       const std::function<std::string()>& describe,
                       const std::function<bool()>& sure) {
  // What was sent must have left, too: nothing moves while this rank computes.
  const auto done = [&] { return ready() && post_->idle(); };
  const bool in_time =
      poll([&] { return done() || (failed_ && !sure()); }, deadline_after(timeout_));
  if (in_time && (ready() || !failed_)) return;
  const std::string where = describe();
  if (in_time) fail(ErrorCode::kTimeout, "{}; left because {}", where, reason_);
  give_up(fmt::format("rank {} waited {} ms: {}", rank_, timeout_.count(), where));
  fail(ErrorCode::kTimeout, "{} after {} ms", where, timeout_.count());
}

void MessageRank::barrier(const char* phase) {
  const std::uint64_t mine = ++arrived_[at(rank_)];
  for (int to = 0; to < size_; ++to) {
    if (to != rank_) send(to, {.kind = Letter::kArrive, .first = mine});
  }
  const auto missing = [&] {
    const auto late = [&](std::uint64_t count) { return count < mine; };
    return static_cast<int>(std::ranges::find_if(arrived_, late) - arrived_.begin());
  };
  wait([&] { return missing() == size_; },
       [&] {
         const int rank = std::min(missing(), size_ - 1);
         return fmt::format("{}: waiting for rank {}, expected {}, seen {}", phase, rank, mine,
                            arrived_[at(rank)]);
       },
       [&] { return mine <= passed_.barriers; });
  passed_.barriers = mine;
}

std::unique_ptr<Window> MessageRank::create_window(std::size_t bytes, int num_signals) {
  require(num_signals >= 0, "num_signals={} is negative", num_signals);
  const std::uint32_t id = windows_made_++;
  auto window = std::make_unique<MessageWindow>(*this, id, bytes, num_signals);
  windows_[id] = window.get();
  const Letter offer{Letter::kOffer, id, bytes, static_cast<std::uint64_t>(num_signals)};
  offers_[id].resize(at(size_));
  for (int to = 0; to < size_; ++to) {
    if (to != rank_) send(to, offer);
  }
  offers_[id][at(rank_)] = {offer.first, offer.second};
  const auto missing = [&] { return first_missing(offers_[id]); };
  wait([&] { return missing() == size_; },
       [&] {
         return fmt::format("window: waiting for rank {}, expected 1, seen 0",
                            std::min(missing(), size_ - 1));
       },
       [&] { return id < passed_.windows; });
  passed_.windows = id + 1;
  const auto offers = std::move(offers_[id]);
  offers_.erase(id);
  for (int rank = 0; rank < size_; ++rank) {
    const auto [other_bytes, other_signals] = *offers[at(rank)];
    if (other_bytes == offer.first && other_signals == offer.second) continue;
    fail(ErrorCode::kCommunication,
         "ranks disagree on the window: rank {} asks for {} bytes and {} signals, rank {} for {} "
         "and {}",
         rank, other_bytes, other_signals, rank_, bytes, num_signals);
  }
  return window;
}

void MessageRank::give_up(const std::string& reason) noexcept {
  if (failed_) return;
  failed_ = true;
  reason_ = reason;
  // A letter: it comes after all that this rank has sent before.
  const Letter letter{Letter::kFailed, passed_.windows, passed_.barriers, reason.size()};
  try {
    for (int to = 0; to < size_; ++to) {
      if (to != rank_) send(to, letter, reason.data());
    }
  } catch (const std::exception&) {
    // The others' own deadlines make them leave.
  }
}

/// All ranks are in recover(), or were and will come back.
void MessageRank::meet(Deadline deadline) {
  meeting_.come(windows_made_);
  if (poll([&] { return meeting_.is_over(); }, deadline)) return;
  fail(ErrorCode::kTimeout, "recover: waiting for rank {}, expected {}, seen {} after {} ms",
       meeting_.missing(), size_, meeting_.num_come(), timeout_.count());
}

/// A new communicator for letters: old ones cannot arrive there.
void MessageRank::renew(Deadline deadline) {
  if (renewing_ == MPI_REQUEST_NULL) {
    check_mpi(MPI_Comm_idup(control_, &next_letters_, &renewing_), "MPI_Comm_idup");
  }
  int done = 0;
  const bool renewed = poll(
      [&] {
        check_mpi(MPI_Test(&renewing_, &done, MPI_STATUS_IGNORE), "MPI_Test");
        return done != 0;
      },
      deadline);
  if (!renewed) {
    fail(ErrorCode::kTimeout, "recover: the new communicator is not there after {} ms",
         timeout_.count());
  }
  post_.reset();  // the old communicator is left as it is: freeing it may wait for the others
  letters_ = std::exchange(next_letters_, MPI_COMM_NULL);
  post_ = std::make_unique<MessagePost>(
      letters_, [this](int source, const Letter& letter, const std::byte* bytes) {
        deliver(source, letter, bytes);
      });
}

void MessageRank::recover() {
  give_up(fmt::format("rank {} recovers", rank_));
  const Deadline deadline = deadline_after(timeout_);
  meet(deadline);
  renew(deadline);
  windows_made_ = meeting_.end();
  offers_.clear();
  std::ranges::fill(arrived_, std::uint64_t{0});
  passed_ = {.barriers = 0, .windows = windows_made_};
  for (auto& [id, window] : windows_) window->zero_signals();
  failed_ = false;
  reason_.clear();
}

}  // namespace

void check_mpi(int status, const char* call) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(status, text, &length);
  fail(ErrorCode::kCommunication, "{}: {}", call, text);
}

std::unique_ptr<Communicator> make_message_rank(MPI_Comm communicator, Topology topology) {
  return std::make_unique<MessageRank>(communicator, std::move(topology));
}

}  // namespace switchyard
