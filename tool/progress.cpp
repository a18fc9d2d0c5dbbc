// A progress bar in one line; Debian has no such library for C++.
#include "tool/progress.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdio>

namespace switchyard::tool {

ProgressBar::ProgressBar(int total) : total_(total), terminal_(isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() { clear(); }

void ProgressBar::show(int done, const std::string& now) {
  if (!terminal_ || total_ < 1) return;
  constexpr int kWidth = 24;
  const auto filled = static_cast<std::size_t>(kWidth * done / total_);
  fmt::print(stderr, "\r[{}{}] {}/{} {}\033[K", std::string(filled, '#'),
             std::string(kWidth - filled, ' '), done, total_, now);
  std::fflush(stderr);
}

void ProgressBar::clear() {
  if (!terminal_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
}

void LoadBar::show(double share) {
  const std::lock_guard lock(mutex_);
  const int percent = static_cast<int>(100 * share);
  if (percent <= shown_) return;
  shown_ = percent;
  if (percent >= 100) {
    bar_.clear();
  } else {
    bar_.show(percent, "percent of the weights");
  }
}

}  // namespace switchyard::tool
