// A progress bar in one line; Debian has no such library for C++.
#include "tool/progress.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <atomic>

#include "core/say.hpp"

namespace switchyard::tool {
namespace {

constexpr std::string_view kClear = "\r\033[K";

const bool is_terminal = isatty(STDERR_FILENO) == 1;
std::atomic<bool> is_shown{false};  // read by a signal handler

}  // namespace

ProgressBar::ProgressBar(int total) : total_(total) {}

ProgressBar::~ProgressBar() { clear(); }

void ProgressBar::show(int done, const std::string& now) {
  if (!is_terminal || total_ < 1) return;
  constexpr int kWidth = 24;
  const auto filled = static_cast<std::size_t>(kWidth * done / total_);
  is_shown = true;
  say(fmt::format("\r[{}{}] {}/{} {}\033[K", std::string(filled, '#'),
                  std::string(kWidth - filled, ' '), done, total_, now));
}

void ProgressBar::clear() {
  if (is_shown.exchange(false)) say(kClear);
}

void LoadBar::show(double share) {
  const std::lock_guard lock(mutex_);
  const int percent = static_cast<int>(100 * share);
  if (percent <= shown_) return;
  shown_ = percent;
  if (percent >= 100) {
    bar_.clear();
  } else {
    bar_.show(percent, what_);
  }
}

void leave_line() noexcept {
  if (is_terminal) say(is_shown ? kClear : "\n");
}

}  // namespace switchyard::tool
