// Engine "threads": ranks of one process. A window's parts are ordinary memory, a put is a copy.
// Bound by memory bandwidth and, for small messages, by the time to wake a sleeping thread.
#include <sys/mman.h>

#include <algorithm>

#include "comm/ranks/doorbell.hpp"
#include "comm/ranks/engine_words.hpp"
#include "comm/ranks/shared_ranks.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

struct Group {
  explicit Group(int num_ranks) : doorbell(static_cast<std::size_t>(num_ranks)) {}
  ControlBlock control{};
  std::vector<Doorbell> doorbell;  // one per rank
};

class ThreadRank final : public SharedRank {
 public:
  ThreadRank(const std::shared_ptr<Group>& group, int rank, int size)
      : SharedRank({group, &group->control}, rank, size), group_(group) {}

  [[nodiscard]] const char* engine() const override { return kThreadsEngine; }
  void ring(int rank) noexcept override { group_->doorbell[static_cast<std::size_t>(rank)].ring(); }

 private:
  Part make_part(std::size_t bytes, std::array<std::uint64_t, 2>& words) override {
    // Zero pages from the system: a large window costs what is written of it.
    const std::size_t size = std::max<std::size_t>(bytes, 1);
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      fail(ErrorCode::kOutOfMemory, "cannot allocate a window of {} bytes", size);
    }
    offered_.reset(static_cast<std::byte*>(memory), [size](std::byte* p) { munmap(p, size); });
    words[0] = reinterpret_cast<std::uint64_t>(&offered_);
    return offered_;
  }
  Part open_part(int /*rank*/, std::size_t /*bytes*/, std::array<std::uint64_t, 2> words) override {
    // The address was a pointer of this process: make_part() of that rank wrote it.
    return *reinterpret_cast<const Part*>(words[0]);  // NOLINT(performance-no-int-to-ptr)
  }
  bool sleep_until(const std::function<bool()>& ready, Deadline deadline) override {
    return group_->doorbell[static_cast<std::size_t>(rank())].wait(ready, deadline);
  }

  std::shared_ptr<Group> group_;
  Part offered_;  // kept until the next window: others copy it in the meantime
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_ranks(int num_ranks) {
  require(num_ranks >= 1 && num_ranks <= kMaxRanks, "number of ranks is {}, want 1 to {}",
          num_ranks, kMaxRanks);
  const auto group = std::make_shared<Group>(num_ranks);
  std::vector<std::unique_ptr<Communicator>> ranks;
  ranks.reserve(static_cast<std::size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.push_back(std::make_unique<ThreadRank>(group, rank, num_ranks));
  }
  return ranks;
}

std::unique_ptr<Communicator> make_single_rank() { return std::move(make_thread_ranks(1).front()); }

}  // namespace switchyard
