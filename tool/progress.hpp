#pragma once

#include <mutex>
#include <string>
#include <utility>

namespace switchyard::tool {

/// A bar on stderr, only where that is a terminal; gone when the object is.
class ProgressBar {
 public:
  explicit ProgressBar(int total);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Show that `done` of all are done and what comes now.
  void show(int done, const std::string& now);
  /// Take the bar away, so that lines can be printed; the next show() brings it back.
  void clear();

 private:
  int total_;
};

/// The bar of what is known as a share: weights that load, from any thread; gone when they are
/// there. Ranks that load side by side share it: it shows the farthest of them.
class LoadBar {
 public:
  /// @param what  Behind the numbers.
  explicit LoadBar(std::string what = "percent of the weights") : what_(std::move(what)) {}
  void show(double share);
  /// Before anything else is printed: not every load says that it has come to its end.
  void clear() { bar_.clear(); }

 private:
  std::mutex mutex_;
  std::string what_;
  ProgressBar bar_{100};
  int shown_ = 0;
};

/// On a terminal the cursor goes to the begin of a line that is free, whatever stands before it: a
/// bar, or the "^C" of the terminal itself. For the handler of a signal that ends the process.
void leave_line() noexcept;

}  // namespace switchyard::tool
