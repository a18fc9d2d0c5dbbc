#pragma once

// The options of a router as they are spelled.

#include <charconv>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "switchyard/routing/router_kinds.hpp"

namespace switchyard {

inline std::string names_of(const auto& list) {
  std::string names;
  for (const auto& entry : list) names += std::string(names.empty() ? "" : ", ") + entry.name;
  return names;
}

inline bool is_word(std::string_view words, std::string_view text) {
  while (true) {
    const std::size_t bar = words.find('|');
    if (words.substr(0, bar) == text) return true;
    if (bar == std::string_view::npos) return false;
    words.remove_prefix(bar + 1);
  }
}

/// The options of one spelling, each known to be the kind's and in its range.
class Given {
 public:
  Given(const RouterKind& kind, std::string_view text) : kind_(kind) {
    for (bool more = !text.empty(); more;) {
      const std::size_t comma = text.find(',');
      take(text.substr(0, comma));
      more = comma != std::string_view::npos;
      if (more) text.remove_prefix(comma + 1);
    }
  }

  [[nodiscard]] std::optional<std::string_view> word(std::string_view name) const {
    for (const auto& [option, value] : values_) {
      if (option == name) return value;
    }
    return std::nullopt;
  }
  [[nodiscard]] double number(std::string_view name, double otherwise) const {
    const auto text = word(name);
    return text ? *number_of(*text) : otherwise;
  }
  [[nodiscard]] std::int32_t whole(std::string_view name, std::int32_t otherwise) const {
    return static_cast<std::int32_t>(number(name, otherwise));
  }
  [[nodiscard]] bool yes(std::string_view name, bool otherwise) const {
    const auto text = word(name);
    return text ? *text == "yes" : otherwise;
  }

 private:
  static std::optional<double> number_of(std::string_view text) {
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return value;
  }

  void take(std::string_view text) {
    const std::size_t equals = text.find('=');
    require(equals != std::string_view::npos && equals > 0,
            "router {}: '{}' is not OPTION=VALUE; its options: {}", kind_.name, printable(text),
            kind_.options.empty() ? "none" : names_of(kind_.options));
    std::string name(text.substr(0, equals));
    for (char& c : name) c = c == '_' ? '-' : c;
    const std::string_view value = text.substr(equals + 1);
    for (const RouterOption& option : kind_.options) {
      if (option.name != name) continue;
      require(!word(option.name), "router {}: {} is given twice", kind_.name, option.name);
      check_value(option, value);
      values_.emplace_back(option.name, value);
      return;
    }
    fail(ErrorCode::kInvalidArgument, "router {} has no option '{}'; its options: {}", kind_.name,
         printable(name), kind_.options.empty() ? "none" : names_of(kind_.options));
  }

  void check_value(const RouterOption& option, std::string_view text) const {
    if (option.low == option.high) {
      require(is_word(option.value, text), "router {}: {}='{}' is not one of {}", kind_.name,
              option.name, printable(text), option.value);
      return;
    }
    const std::optional<double> value = number_of(text);
    require(value && *value >= option.low && *value <= option.high &&
                (!option.whole || *value == std::floor(*value)),
            "router {}: {}='{}', want a {}number from {} to {}", kind_.name, option.name,
            printable(text), option.whole ? "whole " : "", option.low, option.high);
  }

  const RouterKind& kind_;
  std::vector<std::pair<std::string_view, std::string_view>> values_;
};

}  // namespace switchyard
