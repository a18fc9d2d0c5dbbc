// What a file of results has of a sweep.
#include "tool/sweep/done_points.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "bench/measure/results.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/report/result_header.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

std::string key_of(std::string_view work, const json& at, std::int64_t threads) {
  return fmt::format("{} {} on {} threads", work, at.dump(), threads);
}

std::string key_of(const json& line) {
  return key_of(line.at("work").get<std::string>(), line.at("point"),
                whole_number(line.at("case").at("threads")));
}

/// A line of a point of any sweep.
bool is_point(const json& line) {
  return line.is_object() && line.contains("suite") && line.contains("point") &&
         line.contains("lines");
}

bool is_from(const json& line, const SweepPlace& place) {
  const json& machine = line.at("machine");
  return line.at("suite") == place.suite && line.at("commit") == place.commit &&
         line.at("backend") == place.backend && line.at("seed") == place.seed &&
         machine.at("cpu") == place.cpu && machine.at("isa") == place.isa &&
         machine.at("gpu") == place.gpu;
}

/// Lines of one point, one behind the other.
struct Group {
  std::string id{};
  std::size_t begin = 0;  ///< Of the first, in the file.
  std::int64_t lines = 0, wanted = 0;

  [[nodiscard]] bool is_whole() const { return lines == wanted; }
};

}  // namespace

DonePoints::DonePoints(const std::string& path, const SweepPlace& place) {
  bench::mend_lines(path, [&](std::string_view text) {
    ResultHeader header;
    Group group;
    std::size_t begin = 0;
    for (int number = 1; begin < text.size(); ++number) {
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      const bool is_cut = end == text.size();  // its end is missing
      const json read = json::parse(text.substr(begin, end - begin), nullptr, false);
      if (read.is_discarded() && is_cut) {
        return group.is_whole() ? begin : group.begin;
      }
      if (begin == end) {
        ++begin;
        continue;
      }
      try {
        if (!read.is_object())
          throw UsageError("--results: {} line {} is no JSON object", path, number);
        const std::optional<json> line = header.whole(read);
        if (line && is_point(*line)) {
          const std::string id = line->at("suite").get<std::string>() + " " + key_of(*line);
          if (group.is_whole() || group.id != id) {
            group = {.id = id, .begin = begin, .wanted = whole_number(line->at("lines"))};
          }
          ++group.lines;
          if (group.is_whole() && is_from(*line, place)) {
            keys_.insert(key_of(*line));
            hold_ = hold_ && line->value("holds", true);
          }
        } else if (line) {
          group = {};
        }
      } catch (const json::exception&) {
        throw UsageError("--results: {} line {} is no result line", path, number);
      }
      begin = end + 1;
    }
    return group.is_whole() ? text.size() : group.begin;
  });
}

bool DonePoints::has(const SweepPoint& point) const {
  return keys_.contains(key_of(point.kind, point.at, point.work.layer.num_threads));
}

}  // namespace switchyard::tool
