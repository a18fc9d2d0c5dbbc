// Interrupts. Files appear by renaming finished temporary ones, so the handler may end the process
// where it stands once these are gone.
#include "tool/interrupt.hpp"

#include <unistd.h>

#include <csignal>

#include "core/atomic_file.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/progress.hpp"

namespace switchyard::tool {
namespace {

void on_signal(int) {
  remove_unfinished_files();
  leave_line();
  _exit(kInterrupted);
}

}  // namespace

void install_interrupt_handler() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  std::signal(SIGXFSZ, SIG_IGN);  // a file too large is an error of write(), with a message
}

}  // namespace switchyard::tool
