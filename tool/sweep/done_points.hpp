#pragma once

#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "tool/sweep/points.hpp"

namespace switchyard::tool {

/// What makes two lines of a point comparable: the build, the machine and what the points share.
struct SweepPlace {
  std::string suite{}, commit{}, cpu{}, isa{}, gpu{}, backend{};
  std::int64_t seed = 0;
};

/// The points of a sweep that a file of results has already, all their lines.
class DonePoints {
 public:
  /// Reads the file, if there is one, and cuts off what a sweep that was killed has left at its
  /// end: a part of a line, and lines of a point that are not all there.
  /// @throws UsageError: a line in it is no JSON object. Error{kIo}.
  DonePoints(const std::string& path, const SweepPlace& place);

  [[nodiscard]] bool has(const SweepPoint& point) const;
  /// Whether every comparison in their lines held.
  [[nodiscard]] bool hold() const { return hold_; }

 private:
  std::set<std::string> keys_;
  bool hold_ = true;
};

}  // namespace switchyard::tool
