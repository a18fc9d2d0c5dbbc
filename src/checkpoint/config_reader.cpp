#include "checkpoint/config_reader.hpp"

#include <cmath>
#include <utility>

#include "checkpoint/files/file_error.hpp"

namespace switchyard {
namespace {

std::string shown(const Json& value) {
  return value.dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 60);
}

bool in_range(const Json& value, std::int64_t low, std::int64_t high) {
  return value.is_number_integer() &&
         !(value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX) &&
         value.get<std::int64_t>() >= low && value.get<std::int64_t>() <= high;
}

}  // namespace

ConfigReader::ConfigReader(const Json& json, std::string file)
    : json_(json), file_(std::move(file)) {
  require_file(json.is_object(), file_, "is not a JSON object");
}

bool ConfigReader::has(const char* key) const {
  return json_.contains(key) && !json_[key].is_null();
}

std::int64_t ConfigReader::whole(const char* key, std::int64_t low, std::int64_t high) const {
  require_file(has(key), file_, "lacks '{}'", key);
  const Json& value = json_[key];
  require_file(in_range(value, low, high), file_, "{}={} is not a whole number from {} to {}", key,
               shown(value), low, high);
  return value.get<std::int64_t>();
}

std::int64_t ConfigReader::whole_or(const char* key, std::int64_t low, std::int64_t high,
                                    std::int64_t absent) const {
  return has(key) ? whole(key, low, high) : absent;
}

float ConfigReader::real_or(const char* key, float absent) const {
  if (!has(key)) return absent;
  const Json& value = json_[key];
  require_file(value.is_number() && value.get<double>() >= 0.0 && value.get<double>() <= 3.0e38,
               file_, "{}={} is not a number >= 0", key, shown(value));
  return static_cast<float>(value.get<double>());
}

bool ConfigReader::flag_or(const char* key, bool absent) const {
  if (!has(key)) return absent;
  require_file(json_[key].is_boolean(), file_, "{}={} is not true or false", key,
               shown(json_[key]));
  return json_[key].get<bool>();
}

std::string ConfigReader::text_or(const char* key, const char* absent) const {
  if (!has(key)) return absent;
  require_file(json_[key].is_string(), file_, "{}={} is not a string", key, shown(json_[key]));
  return json_[key].get<std::string>();
}

std::vector<std::int64_t> ConfigReader::list(const char* key) const {
  std::vector<std::int64_t> values;
  if (!has(key)) return values;
  require_file(json_[key].is_array(), file_, "{}={} is not a list", key, shown(json_[key]));
  for (const Json& value : json_[key]) {
    require_file(in_range(value, 0, INT64_MAX), file_, "{}: {} is not a whole number >= 0", key,
                 shown(value));
    values.push_back(value.get<std::int64_t>());
  }
  return values;
}

}  // namespace switchyard
