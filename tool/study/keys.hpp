#pragma once

#include <fmt/core.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/printable.hpp"
#include "tool/options/usage_error.hpp"

namespace switchyard::tool {

/// Reads the members of an object of a study file; what is read is known, the rest is refused.
class StudyKeys {
 public:
  /// @param place  Opens messages: "FILE: arms[1].model".
  StudyKeys(const nlohmann::json& object, std::string place)
      : object_(object), place_(std::move(place)) {
    if (!object.is_object()) throw UsageError("{} is no JSON object", place_);
  }

  /// The member, or nullptr.
  [[nodiscard]] const nlohmann::json* find(const char* key) {
    known_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }
  [[nodiscard]] std::string place(const char* key) const {
    return place_ + (place_.ends_with(":") ? " " : ".") + key;
  }

  /// A number in [low, high], or a truth value, or text; left as it is where there is none.
  template <class T>
  void read(const char* key, T& value, double low = 0,
            double high = std::numeric_limits<double>::max()) {
    if (const nlohmann::json* found = find(key)) value = value_of<T>(*found, place(key), low, high);
  }
  template <class T>
  void read(const char* key, std::vector<T>& values, double low = 0,
            double high = std::numeric_limits<double>::max()) {
    const nlohmann::json* found = find(key);
    if (found == nullptr) return;
    if (!found->is_array() || found->empty()) {
      throw UsageError("{}: {}, want a list with something in it", place(key), shown(*found));
    }
    values.clear();
    for (const nlohmann::json& one : *found) {
      values.push_back(value_of<T>(one, place(key), low, high));
    }
  }
  void refuse_others() const {
    for (const auto& [key, value] : object_.items()) {
      if (known_.contains(key)) continue;
      std::string words;
      for (const std::string& known : known_) words += (words.empty() ? "" : ", ") + known;
      throw UsageError("{} unknown key '{}', want one of: {}",
                       place_.ends_with(":") ? place_ : place_ + ":", printable(key), words);
    }
  }

  /// A value in a message.
  [[nodiscard]] static std::string shown(const nlohmann::json& value) {
    return printable(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), 60);
  }

 private:
  template <class T>
  static T value_of(const nlohmann::json& value, const std::string& place, double low,
                    double high) {
    if constexpr (std::is_same_v<T, bool>) {
      if (!value.is_boolean()) throw UsageError("{}: {}, want true or false", place, shown(value));
    } else if constexpr (std::is_same_v<T, std::string>) {
      if (!value.is_string()) throw UsageError("{}: {}, want text", place, shown(value));
    } else {
      constexpr bool kWhole = std::is_integral_v<T>;
      const bool fits = kWhole ? value.is_number_integer() : value.is_number();
      const double number = fits ? value.get<double>() : 0;
      if (!fits || !std::isfinite(number) || number < low || number > high) {
        throw UsageError("{}: {}, want a {}number from {:g}{}", place, shown(value),
                         kWhole ? "whole " : "", low,
                         high < 1e300 ? fmt::format(" to {:g}", high) : "");
      }
    }
    return value.get<T>();
  }

  const nlohmann::json& object_;
  std::string place_;
  std::set<std::string> known_;
};

}  // namespace switchyard::tool
