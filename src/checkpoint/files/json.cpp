#include "checkpoint/files/json.hpp"

#include <unordered_set>
#include <vector>

#include "checkpoint/files/file_error.hpp"

namespace switchyard {

Json parse_json(std::string_view text, const std::string& file) {
  constexpr int kMaxDepth = 64;
  std::vector<std::unordered_set<std::string>> open_objects;
  const auto inspect = [&](int depth, Json::parse_event_t event, Json& parsed) {
    require_file(depth <= kMaxDepth, file, "JSON is nested deeper than {}", kMaxDepth);
    if (event == Json::parse_event_t::object_start) open_objects.emplace_back();
    if (event == Json::parse_event_t::object_end) open_objects.pop_back();
    if (event == Json::parse_event_t::key) {
      const auto key = parsed.get<std::string>();
      require_file(open_objects.back().insert(key).second, file, "duplicate key '{}'", key);
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), inspect);
  } catch (const Json::exception& error) {
    const std::string_view what = error.what();
    const std::size_t prefix = what.find("] ");  // "[json.exception.parse_error.101] "
    bad_file(file, "not valid JSON: {}",
             prefix == std::string_view::npos ? what : what.substr(prefix + 2));
  }
}

}  // namespace switchyard
