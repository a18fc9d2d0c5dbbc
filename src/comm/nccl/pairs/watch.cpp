// One thread for each exchange by ncclSend and ncclRecv. It sleeps most of the time: an eighth of
// the deadline, at most 50 ms.
#include "comm/nccl/pairs/watch.hpp"

#include <algorithm>
#include <utility>

#include "comm/ranks/deadline.hpp"

namespace switchyard {

using std::chrono::milliseconds;

NcclWatch::NcclWatch(const TransferProgress* progress, milliseconds timeout,
                     std::function<void()> give_up)
    : progress_(progress),
      timeout_(timeout),
      give_up_(std::move(give_up)),
      thread_([this] { watch(); }) {}

NcclWatch::~NcclWatch() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void NcclWatch::watch() {
  const volatile TransferProgress* const seen = progress_;
  const milliseconds pause = std::clamp(timeout_ / 8, milliseconds(1), milliseconds(50));
  std::uint64_t waited_for[2] = {};
  Deadline until[2] = {};
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, pause, [this] { return ending_; })) {
    for (int direction = 0; direction < 2; ++direction) {
      const std::uint64_t packed = seen->packed[direction];
      if (expired_ >= 0 || seen->finished[direction] >= packed) {
        waited_for[direction] = 0;
      } else if (waited_for[direction] != packed) {
        waited_for[direction] = packed;
        until[direction] = deadline_after(timeout_);
      } else if (std::chrono::steady_clock::now() >= until[direction]) {
        expired_ = direction;
        give_up_();
      }
    }
  }
}

}  // namespace switchyard
