// Tables of result lines whose columns come from the lines themselves.
#include "tool/report/table.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "tool/options/words.hpp"
#include "tool/report/values.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr std::size_t kOpenRows = 12;
constexpr std::size_t kMostColumns = 60;  // lines of made-up members each have their own

/// The order of columns; what is not named comes between the first and the second list.
constexpr std::string_view kFirst[] = {"machine.isa", "case.name", "stage",  "sweep",
                                       "variant",     "published", "case.T", "case.E",
                                       "case.K",      "case.H",    "case.I"};
constexpr std::string_view kLast[] = {
    "median_us", "p95_us",  "limit_us", "limit_by", "share",         "gbps",
    "gbps_n1",   "gbps_n2", "tflops",   "padding",  "drop.measured", "drop.closed_form",
    "bar",       "value",   "target",   "holds",    "verdict"};

/// Members that are left to the files: steps between others that are shown, and circumstances.
constexpr std::string_view kLeft[] = {
    "schema",     "time",           "seed",          "samples",         "mean_us",   "std_us",
    "min_us",     "bytes",          "flops",         "flops_executed",  "intensity", "tokens_per_s",
    "peak_bytes", "implementation", "routing_share", "chain",           "scale",     "launch",
    "by",         "backend",        "capacity",      "ratio",           "program",   "commit",
    "suite",      "max_num_tokens", "error",         "most_wire_bytes", "bound_us",  "x"};
constexpr std::string_view kLeftPrefixes[] = {"machine.",    "versions.",   "point.",
                                              "routing.",    "load.",       "rows.",
                                              "pair_bytes.", "one_by_one.", "min_us."};

template <typename List>
std::size_t place_in(const List& list, std::string_view name) {
  return static_cast<std::size_t>(std::find(std::begin(list), std::end(list), name) -
                                  std::begin(list));
}

bool is_left(std::string_view member) {
  if (member == "machine.isa" || member == "load.cv" || member == "point.router") return false;
  return place_in(kLeft, member) < std::size(kLeft) ||
         std::any_of(std::begin(kLeftPrefixes), std::end(kLeftPrefixes),
                     [&](std::string_view prefix) { return member.starts_with(prefix); });
}

/// Groups of columns from left to right, and the place in the group.
std::pair<int, std::size_t> order_of(std::string_view member) {
  const std::size_t first = place_in(kFirst, member);
  if (first < std::size(kFirst)) return {0, first};
  const std::size_t last = place_in(kLast, member);
  if (last < std::size(kLast)) return {4, last};
  if (member.starts_with("case.")) return {1, 0};
  return {member.starts_with("peers.") ? 3 : 2, 0};
}

/// The values of each member by line; "" where a line lacks it.
struct Columns {
  std::map<std::string, std::vector<json>> values{};
  std::set<std::string> left{};
};

Columns columns_of(const LineList& lines) {
  Columns columns;
  for (std::size_t row = 0; row < lines.size(); ++row) {
    for (auto& [member, value] : leaves_of(lines[row]->json)) {
      if (columns.left.contains(member)) continue;
      auto column = columns.values.find(member);
      if (column == columns.values.end()) {
        if (is_left(member) || columns.values.size() >= kMostColumns) {
          columns.left.insert(member);
          continue;
        }
        column = columns.values.emplace(member, std::vector<json>(lines.size())).first;
      }
      column->second[row] = std::move(value);
    }
  }
  return columns;
}

bool varies(const std::vector<json>& column) {
  return std::any_of(column.begin(), column.end(),
                     [&](const json& value) { return value != column.front(); });
}

std::vector<std::string> sorted_names(const Columns& columns) {
  std::vector<std::string> names;
  for (const auto& [name, column] : columns.values) names.push_back(name);
  std::stable_sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) {
    return order_of(a) < order_of(b);
  });
  return names;
}

bool is_figure(std::string_view member) {
  return order_of(member).first > 2 || member.ends_with("_us") || member.ends_with("bytes") ||
         member.find("_us.") < 99;
}

/// What was measured: the case, and words beside it. Numbers beside it are figures.
bool tells_apart(std::string_view member, const std::vector<json>& column) {
  if (is_figure(member)) return false;
  if (member.starts_with("case.") || member == "machine.isa" || member == "point.router")
    return true;
  return member.find('.') == std::string_view::npos &&
         std::none_of(column.begin(), column.end(),
                      [](const json& value) { return value.is_number(); });
}

std::string cell_of(const std::string& member, const json& value) {
  if (value.is_null()) return "<td>";
  if (member == "holds") return value == true ? "<td class=ok>holds" : "<td class=miss>MISS";
  if (member == "share" && value.is_number()) {
    return fmt::format("<td>{:.1f}", 100 * value.get<double>());
  }
  return (value.is_number() ? "<td>" : "<td class=t>") + escape_html(shown(value));
}

std::string shared_words(const Columns& columns, const std::vector<std::string>& names) {
  std::string words;
  for (const std::string& name : names) {
    const std::vector<json>& column = columns.values.at(name);
    const std::string value = shown(column.front());
    if (varies(column) || is_figure(name) || value.empty() || column.front() == 0 ||
        column.front() == false) {
      continue;
    }
    words += fmt::format("{}<b>{}</b> {}", words.empty() ? "In all of them: " : ", ",
                         escape_html(title_of(name)), escape_html(value));
  }
  return words.empty() ? "" : words + ".";
}

std::string left_words(const Columns& columns) {
  std::string words;
  for (const std::string& member : columns.left) {
    if (is_left(member) && member.find('.') != std::string::npos) continue;  // said by the machine
    words += (words.empty() ? " Only in the files: " : ", ") + escape_html(member);
  }
  return words.empty() ? "" : words + ".";
}

}  // namespace

std::string title_of(const std::string& member) {
  static const std::map<std::string_view, const char*> kTitles = {
      {"share", "of the limit, %"},
      {"gbps", "GB/s"},
      {"gbps_n1", "GB/s by tokens received"},
      {"gbps_n2", "GB/s by choices"},
      {"tflops", "TFLOP/s"},
      {"limit_by", "limited by"},
      {"machine.isa", "instruction set"},
      {"load.cv", "load CV"},
      {"bw_strict_gbps", "GB/s, 2(K+1)HTb"},
      {"bw_32k_gbps", "GB/s, 2KHTb"}};
  const auto known = kTitles.find(member);
  if (known != kTitles.end()) return known->second;
  std::string title = member;
  bool is_time = title.ends_with("_us");
  if (is_time) title.resize(title.size() - 3);
  for (const std::string_view prefix : {"case.", "peers.", "median_us."}) {
    if (!member.starts_with(prefix)) continue;
    title = member.substr(prefix.size());
    is_time = prefix != "case.";
  }
  std::replace(title.begin(), title.end(), '_', ' ');
  return is_time ? title + ", µs" : title;
}

std::vector<std::string> varying_members(const LineList& lines) {
  const Columns columns = columns_of(lines);
  std::vector<std::string> names;
  for (const std::string& name : sorted_names(columns)) {
    const std::vector<json>& column = columns.values.at(name);
    if (tells_apart(name, column) && varies(column)) names.push_back(name);
  }
  return names;
}

std::string words_of_line(const Line& line, const std::vector<std::string>& varying,
                          const std::vector<std::string>& but) {
  std::string words;
  for (const std::string& member : varying) {
    const json* value = member_of(line.json, member);
    if (value == nullptr || std::find(but.begin(), but.end(), member) != but.end()) continue;
    if (value->is_boolean() && *value == false) continue;
    const std::string text = value->is_boolean() ? title_of(member) : shown(*value);
    if (text.empty()) continue;
    if (!words.empty()) words += ", ";
    words += value->is_number() ? title_of(member) + " " + text : text;
  }
  return words;
}

std::string table_of(const LineList& lines) {
  const Columns columns = columns_of(lines);
  const std::vector<std::string> names = sorted_names(columns);
  std::vector<std::string> shown_names;
  for (const std::string& name : names) {
    if (is_figure(name) || lines.size() == 1 || varies(columns.values.at(name))) {
      shown_names.push_back(name);
    }
  }
  std::string html = "<div class=scroll><table><thead><tr>";
  for (const std::string& name : shown_names)
    html += fmt::format("<th>{}", escape_html(title_of(name)));
  html += "<tbody>\n";
  for (std::size_t row = 0; row < lines.size(); ++row) {
    html += "<tr>";
    for (const std::string& name : shown_names) html += cell_of(name, columns.values.at(name)[row]);
    html += "\n";
  }
  html += "</table></div>\n";
  html += fmt::format("<p class=note>{}{}</p>\n",
                      lines.size() > 1 ? shared_words(columns, names) : "", left_words(columns));
  return folded(fmt::format("{} line{}", lines.size(), lines.size() == 1 ? "" : "s"), html,
                lines.size() <= kOpenRows);
}

std::string plain_table(const std::vector<std::string>& head,
                        const std::vector<std::vector<std::string>>& rows) {
  std::string html = "<div class=scroll><table><thead><tr>";
  for (const std::string& title : head) html += fmt::format("<th>{}", escape_html(title));
  html += "<tbody>\n";
  for (const std::vector<std::string>& row : rows) {
    html += "<tr>";
    for (const std::string& cell : row) {
      html += (parse_real(cell) ? "<td>" : "<td class=t>") + escape_html(cell);
    }
    html += "\n";
  }
  return html + "</table></div>\n";
}

std::string folded(const std::string& summary, const std::string& table, bool open) {
  return fmt::format("<details{}><summary>{}</summary>\n{}</details>\n", open ? " open" : "",
                     escape_html(summary), table);
}

}  // namespace switchyard::tool
