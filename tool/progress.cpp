// A progress bar in one line; Debian has no such library for C++.
#include "tool/progress.hpp"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "core/say.hpp"

namespace switchyard::tool {
namespace {

constexpr std::string_view kClear = "\r\033[K";

const bool is_terminal = isatty(STDERR_FILENO) == 1;
std::atomic<bool> is_shown{false};  // read by a signal handler

/// As much of a line of UTF-8 as the terminal has columns: what goes on in the next one would stay.
std::string fitted(std::string line) {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return line;
  std::size_t columns = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const bool begins = (static_cast<unsigned char>(line[i]) & 0xC0U) != 0x80U;
    if (begins && ++columns > size.ws_col) return line.substr(0, i);
  }
  return line;
}

}  // namespace

ProgressBar::ProgressBar(int total) : total_(total) {}

ProgressBar::~ProgressBar() { clear(); }

void ProgressBar::show(int done, const std::string& now) {
  if (!is_terminal || total_ < 1) return;
  constexpr int kWidth = 24;
  const auto filled = static_cast<std::size_t>(kWidth * done / total_);
  is_shown = true;
  const std::string line =
      fitted(fmt::format("[{}{}] {}/{} {}", std::string(filled, '#'),
                         std::string(kWidth - filled, ' '), done, total_, now));
  say(fmt::format("\r{}\033[K", line));
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
