#include "checkpoint/config_reader.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <span>
#include <utility>

#include "checkpoint/config_keys.hpp"
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

ConfigReader::Found ConfigReader::find(std::string_view key) const {
  Found found{.name = key};
  const auto others = spellings_of(key);
  for (const std::string_view name : others.empty() ? std::span(&key, 1) : others) {
    const auto entry = json_.find(name);
    if (entry == json_.end() || entry->is_null()) continue;
    require_file(found.value == nullptr || *found.value == *entry, file_,
                 "{}={} and {}={} mean the same and differ", found.name,
                 found.value == nullptr ? "" : shown(*found.value), name, shown(*entry));
    // Messages name what was asked for where the file has it too.
    if (found.value == nullptr || name == key) found = {.name = name, .value = &*entry};
  }
  return found;
}

ConfigReader::Found ConfigReader::at(std::string_view key) const {
  const Found found = find(key);
  if (found.value != nullptr) return found;
  std::string others;
  for (const std::string_view name : spellings_of(key)) {
    if (name != key) others += fmt::format("{}{}", others.empty() ? " (also: " : ", ", name);
  }
  bad_file(file_, "lacks '{}'{}{}", key, others, others.empty() ? "" : ")");
}

bool ConfigReader::is_null(std::string_view key) const {
  const auto entry = json_.find(key);
  return entry != json_.end() && entry->is_null();
}

std::int64_t ConfigReader::whole(std::string_view key, std::int64_t low, std::int64_t high) const {
  const Found found = at(key);
  const Json* value = found.value;
  if (value->is_array() && !value->empty()) {
    const Json& first = value->front();
    require_file(std::all_of(value->begin(), value->end(),
                             [&](const Json& other) { return other == first; }),
                 file_, "{}={} differs from layer to layer", found.name, shown(*value));
    value = &first;
  }
  require_file(in_range(*value, low, high), file_, "{}={} is not a whole number from {} to {}",
               found.name, shown(*value), low, high);
  return value->get<std::int64_t>();
}

std::int64_t ConfigReader::whole_or(std::string_view key, std::int64_t low, std::int64_t high,
                                    std::int64_t absent) const {
  return has(key) ? whole(key, low, high) : absent;
}

float ConfigReader::real_or(std::string_view key, float absent) const {
  const Found found = find(key);
  if (found.value == nullptr) return absent;
  const Json& value = *found.value;
  require_file(value.is_number() && value.get<double>() >= 0.0 && value.get<double>() <= 3.0e38,
               file_, "{}={} is not a number >= 0", found.name, shown(value));
  return static_cast<float>(value.get<double>());
}

bool ConfigReader::flag_or(std::string_view key, bool absent) const {
  const Found found = find(key);
  if (found.value == nullptr) return absent;
  require_file(found.value->is_boolean(), file_, "{}={} is not true or false", found.name,
               shown(*found.value));
  return found.value->get<bool>();
}

std::string ConfigReader::text_or(std::string_view key, const char* absent) const {
  const Found found = find(key);
  if (found.value == nullptr) return absent;
  require_file(found.value->is_string(), file_, "{}={} is not a string", found.name,
               shown(*found.value));
  return found.value->get<std::string>();
}

bool ConfigReader::is_list(std::string_view key) const {
  const Found found = find(key);
  return found.value != nullptr && found.value->is_array();
}

std::vector<std::int64_t> ConfigReader::list(std::string_view key) const {
  std::vector<std::int64_t> values;
  const Found found = find(key);
  if (found.value == nullptr) return values;
  require_file(found.value->is_array(), file_, "{}={} is not a list", found.name,
               shown(*found.value));
  for (const Json& value : *found.value) {
    require_file(in_range(value, 0, INT64_MAX), file_, "{}: {} is not a whole number >= 0",
                 found.name, shown(value));
    values.push_back(value.get<std::int64_t>());
  }
  return values;
}

std::vector<std::string> ConfigReader::words(std::string_view key) const {
  std::vector<std::string> values;
  const Found found = find(key);
  if (found.value == nullptr) return values;
  require_file(found.value->is_array(), file_, "{}={} is not a list", found.name,
               shown(*found.value));
  for (const Json& value : *found.value) {
    require_file(value.is_string(), file_, "{}: {} is not a string", found.name, shown(value));
    values.push_back(value.get<std::string>());
  }
  return values;
}

ConfigReader ConfigReader::object(std::string_view key) const {
  const Found found = at(key);
  require_file(found.value->is_object(), file_, "{}={} is not an object", found.name,
               shown(*found.value));
  return {*found.value, file_};
}

void ConfigReader::require_value(std::string_view key, std::string_view expected) const {
  const Found found = find(key);
  if (found.value == nullptr) return;
  const Json only = Json::parse(expected);
  require_file(*found.value == only, file_, "{}={}: only {} is supported here", found.name,
               shown(*found.value), shown(only));
}

}  // namespace switchyard
