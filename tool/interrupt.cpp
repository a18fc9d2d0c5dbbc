// Interrupts. Files appear by renaming finished temporary ones, so the handler may end the process
// where it stands once these are gone.
#include "tool/interrupt.hpp"

#include <unistd.h>

#include <atomic>
#include <csignal>

#include "core/atomic_file.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/progress.hpp"

namespace switchyard::tool {
namespace {

enum Request : int { kNone, kAwaited, kCame };
std::atomic<int> request{kNone};  // lock-free: a signal handler may read and write it

void on_signal(int) {
  int awaited = kAwaited;
  if (request.compare_exchange_strong(awaited, kCame)) return;
  remove_unfinished_files();
  leave_line();
  _exit(kInterrupted);
}

}  // namespace

void install_interrupt_handler() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // what goes on behind an InterruptRequest is not disturbed
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  std::signal(SIGXFSZ, SIG_IGN);  // a file too large is an error of write(), with a message
}

InterruptRequest::InterruptRequest() { request = kAwaited; }
InterruptRequest::~InterruptRequest() { request = kNone; }
bool InterruptRequest::came() const { return request == kCame; }

}  // namespace switchyard::tool
