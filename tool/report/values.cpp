#include "tool/report/values.hpp"

#include <fmt/core.h>

#include <cmath>

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr std::size_t kLongestList = 8;

bool is_leaf(const json& value) { return value.is_primitive() && !value.is_null(); }

/// A short list of leaves as one text; "" for others.
std::string list_text(const json& list) {
  std::string text;
  if (list.size() > kLongestList) return text;
  for (const json& value : list) {
    if (!is_leaf(value)) return "";
    if (!text.empty()) text += ' ';
    text += shown(value);
  }
  return text;
}

void add_leaves(const json& object, const std::string& path, Leaves& leaves) {
  for (const auto& [name, value] : object.items()) {
    const std::string at = path + name;
    if (value.is_object()) {
      add_leaves(value, at + ".", leaves);
    } else if (value.is_array()) {
      if (std::string text = list_text(value); !text.empty()) leaves.emplace_back(at, text);
    } else if (is_leaf(value)) {
      leaves.emplace_back(at, value);
    }
  }
}

}  // namespace

const json* member_of(const json& line, std::string_view path) {
  const json* value = &line;
  while (!path.empty()) {
    const std::size_t dot = path.find('.');
    if (!value->is_object()) return nullptr;
    const auto member = value->find(std::string(path.substr(0, dot)));
    if (member == value->end()) return nullptr;
    value = &*member;
    path.remove_prefix(dot == std::string_view::npos ? path.size() : dot + 1);
  }
  return value;
}

std::optional<double> number_of(const json& line, std::string_view path) {
  const json* value = member_of(line, path);
  if (value == nullptr || !value->is_number()) return std::nullopt;
  return value->get<double>();
}

std::string text_of(const json& line, std::string_view path) {
  const json* value = member_of(line, path);
  return value != nullptr && value->is_string() ? value->get<std::string>() : "";
}

bool flag_of(const json& line, std::string_view path) {
  const json* value = member_of(line, path);
  return value != nullptr && value->is_boolean() && value->get<bool>();
}

std::string shown(double value) {
  if (std::abs(value) >= 1e15) return fmt::format("{:.4g}", value);
  if (std::abs(value) >= 1000) return fmt::format("{:.0f}", value);
  return fmt::format("{:.4g}", value);
}

std::string shown(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_number_unsigned()) return fmt::format("{}", value.get<std::uint64_t>());
  if (value.is_number_integer()) return fmt::format("{}", value.get<std::int64_t>());
  return value.is_number() ? shown(value.get<double>()) : "";
}

Leaves leaves_of(const json& line) {
  Leaves leaves;
  if (line.is_object()) add_leaves(line, "", leaves);
  return leaves;
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '\'': out += "&#39;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string script_text(const json& value) {
  std::string out;
  for (const char c : value.dump(-1, ' ', true)) {
    if (c == '<') {
      out += "\\u003c";
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace switchyard::tool
