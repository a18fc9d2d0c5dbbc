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

}  // namespace switchyard::tool
