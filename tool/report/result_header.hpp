#pragma once

// Compacted files of results (tools/compact_results.py): a first line {"header": {...}} has what
// the short lines after it share. Whole lines, which have "schema", may follow.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

namespace switchyard::tool {

/// A whole number of a line. @throws nlohmann::json::exception: it is none.
inline std::int64_t whole_number(const nlohmann::json& value) {
  return value.get_ref<const nlohmann::json::number_integer_t&>();
}

/// What the lines of one file share.
class ResultHeader {
 public:
  /// The line as `bench` would have written it; nothing for a header, which counts from here on.
  /// @throws nlohmann::json::exception: not an object.
  std::optional<nlohmann::json> whole(nlohmann::json line) {
    if (line.contains("header")) {
      shared_ = std::move(line.at("header"));
      return std::nullopt;
    }
    if (line.contains("schema") || shared_.is_null()) return line;
    nlohmann::json out = shared_;
    for (const char* key : {"machine", "versions"}) {
      if (!line.contains(key)) continue;
      out[key].update(line.at(key));
      line.erase(key);
    }
    out.update(line);
    return out;
  }

 private:
  nlohmann::json shared_{};
};

}  // namespace switchyard::tool
