// Time over what a suite varies, and how the stages share it.
#include "tool/report/suite_plots.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "switchyard/names.hpp"
#include "tool/options/words.hpp"
#include "tool/report/plots.hpp"
#include "tool/report/values.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr std::size_t kMostSeries = 10;  // colours of a plot
constexpr std::size_t kMostBars = 32;
constexpr std::size_t kFewestPlaces = 3;  // of an axis that is neither tokens nor ranks
constexpr std::size_t kFewForPeers = 3;   // series that have their limit and peers beside them

/// Members that may follow from x: in weak scaling the ranks grow with the tokens, and a sweep's
/// place sets sizes of the case.
bool may_follow(const std::string& member, const std::string& x) {
  return member == "case.R" || member == "case.threads" ||
         (x == "value" && member.starts_with("case."));
}

bool has_number(const LineList& lines, const std::string& member) {
  return std::all_of(lines.begin(), lines.end(),
                     [&](const Line* line) { return number_of(line->json, member).has_value(); });
}

bool follows_from(const LineList& lines, const std::string& member, const std::string& x) {
  std::map<double, std::string> value_at;
  for (const Line* line : lines) {
    const json* value = member_of(line->json, member);
    const std::string text = value == nullptr ? "" : shown(*value);
    const auto [place, fresh] = value_at.try_emplace(number_of(line->json, x).value_or(0), text);
    if (!fresh && place->second != text) return false;
  }
  return value_at.size() > 2;
}

/// Lines by what tells them apart other than x.
using ByName = std::vector<std::pair<std::string, LineList>>;
ByName by_name(const LineList& lines, const std::vector<std::string>& varying,
               const std::string& x) {
  std::vector<std::string> but = {x};
  for (const std::string& member : varying) {
    if (may_follow(member, x) && follows_from(lines, member, x)) but.push_back(member);
  }
  ByName groups;
  std::map<std::string, std::size_t> places;
  for (const Line* line : lines) {
    std::string name = words_of_line(*line, varying, but);
    const auto [place, fresh] = places.try_emplace(name, groups.size());
    if (fresh) groups.emplace_back(std::move(name), LineList());
    groups[place->second].second.push_back(line);
  }
  return groups;
}

std::size_t distinct(const LineList& lines, const std::string& member) {
  std::set<double> values;
  for (const Line* line : lines) values.insert(number_of(line->json, member).value_or(0));
  return values.size();
}

/// How many points lie on lines of at least two.
std::size_t points_on_lines(const LineList& lines, const std::vector<std::string>& varying,
                            const std::string& x) {
  std::size_t points = 0;
  for (const auto& [name, group] : by_name(lines, varying, x)) {
    const std::size_t size = distinct(group, x);
    if (size > 1) points += size;
  }
  return points;
}

/// What a plot of these lines is over; nothing where every case has one point.
std::optional<std::string> x_of(const Suite& suite, const LineList& lines,
                                const std::vector<std::string>& varying) {
  std::vector<std::string> wanted;
  if (const std::string x = text_of(lines.front()->json, "x"); !x.empty()) {
    wanted.push_back("case." + x);
  }
  if (!text_of(lines.front()->json, "sweep").empty()) wanted.emplace_back("value");
  if (suite.name.ends_with("scaling")) wanted.emplace_back("case.R");
  wanted.emplace_back("case.T");
  for (const std::string& member : wanted) {
    if (has_number(lines, member) && points_on_lines(lines, varying, member) > 0) return member;
  }
  std::optional<std::string> best;
  std::size_t most = 0;
  for (const std::string& member : varying) {
    if (!member.starts_with("case.") || !has_number(lines, member)) continue;
    if (distinct(lines, member) < kFewestPlaces) continue;
    const std::size_t points = points_on_lines(lines, varying, member);
    if (points > most) {
      most = points;
      best = member;
    }
  }
  return best;
}

void add_point(Series& series, const Line& line, const std::string& x, const std::string& y) {
  const auto at = number_of(line.json, x);
  const auto value = number_of(line.json, y);
  if (at && value) series.points.push_back({.x = *at, .y = *value});
}

void sort_points(Series& series) {
  std::stable_sort(series.points.begin(), series.points.end(),
                   [](const Point& a, const Point& b) { return a.x < b.x; });
}

/// What the limit and the peers of the same lines took.
std::vector<Series> beside(const std::string& name, const LineList& lines, const std::string& x) {
  std::map<std::string, Series> found;
  for (const Line* line : lines) {
    if (number_of(line->json, "limit_us").value_or(0) > 0) {
      add_point(found["limit"], *line, x, "limit_us");
    }
    for (const char* of : {"peers", "median_us"}) {
      const json* members = member_of(line->json, of);
      if (members == nullptr || !members->is_object()) continue;
      for (const auto& [who, value] : members->items()) {
        add_point(found[who], *line, x, fmt::format("{}.{}", of, who));
      }
    }
  }
  std::vector<Series> all;
  for (auto& [who, series] : found) {
    series.name = name.empty() ? who : fmt::format("{}: {}", name, who);
    series.mark = Mark::kDashed;
    sort_points(series);
    if (series.points.size() > 1) all.push_back(std::move(series));
  }
  return all;
}

/// The text member that splits lines into the fewest groups, two to eight.
std::optional<std::string> splitter_of(const LineList& lines,
                                       const std::vector<std::string>& varying) {
  std::optional<std::string> best;
  std::size_t fewest = 9;
  for (const std::string& member : varying) {
    std::set<std::string> values;
    for (const Line* line : lines) {
      const json* value = member_of(line->json, member);
      values.insert(value == nullptr ? "" : shown(*value));
    }
    if (values.size() > 1 && values.size() < fewest) {
      fewest = values.size();
      best = member;
    }
  }
  return best;
}

std::string plots_of(const Suite& suite, const LineList& lines, const std::string& title,
                     int splits);

std::string split_plots(const Suite& suite, const LineList& lines, const std::string& title,
                        const std::string& member, int splits) {
  std::map<std::string, LineList> parts;
  for (const Line* line : lines) {
    const json* value = member_of(line->json, member);
    parts[value == nullptr ? "" : shown(*value)].push_back(line);
  }
  std::string html;
  for (const auto& [value, part] : parts) {
    const json* const first = member_of(part.front()->json, member);
    std::string words = value;
    if (first == nullptr) {
      words = "without " + title_of(member);
    } else if (first->is_number()) {
      words = title_of(member) + " " + value;
    }
    html +=
        plots_of(suite, part, title.empty() ? words : fmt::format("{}, {}", title, words), splits);
  }
  return html;
}

std::string plots_of(const Suite& suite, const LineList& lines, const std::string& title,
                     int splits) {
  const std::vector<std::string> varying = varying_members(lines);
  const auto x = x_of(suite, lines, varying);
  if (!x) return "";
  std::vector<Series> series;
  LineList lone;
  ByName groups = by_name(lines, varying, *x);
  std::erase_if(groups, [&](const auto& group) { return distinct(group.second, *x) < 2; });
  if (groups.size() > kMostSeries && splits > 0) {
    std::vector<std::string> others = varying;
    std::erase(others, *x);
    if (const auto member = splitter_of(lines, others)) {
      return split_plots(suite, lines, title, *member, splits - 1);
    }
  }
  std::string more;
  if (groups.size() > kMostSeries) {
    more = fmt::format(" ({} of {} cases; all are in the table)", kMostSeries, groups.size());
    groups.resize(kMostSeries);
  }
  for (const auto& [name, group] : groups) {
    Series median{.name = name.empty() ? "median" : name};
    for (const Line* line : group) add_point(median, *line, *x, "median_us");
    sort_points(median);
    if (!median.points.empty()) series.push_back(std::move(median));
  }
  if (groups.size() <= kFewForPeers) {
    for (const auto& [name, group] : groups) {
      for (Series& one : beside(name, group, *x)) series.push_back(std::move(one));
    }
  }
  std::string axis = title_of(*x);
  if (*x == "value") axis = text_of(lines.front()->json, "sweep");
  if (*x == "case.T") axis = "tokens";
  if (*x == "case.R") axis = "ranks";
  std::replace(axis.begin(), axis.end(), '_', ' ');
  const std::string what = title.empty() ? "Time over " + axis : title + ": time over " + axis;
  return figure_of(
      {.title = what + more, .x = {axis}, .y = {"microseconds"}, .series = std::move(series)});
}

/// Whether a stage is made of others of the same case: "a+b+c" of "a+b" and "c".
bool is_sum_of(const std::string& stage, const std::set<std::string>& stages) {
  if (stage.empty()) return true;
  return std::any_of(stages.begin(), stages.end(), [&](const std::string& part) {
    if (part == stage || !stage.starts_with(part)) return part.empty();
    return stage[part.size()] == '+' && (stages.contains(stage.substr(part.size() + 1)) ||
                                         is_sum_of(stage.substr(part.size() + 1), stages));
  });
}

}  // namespace

std::string time_plots(const Suite& suite) {
  LineList wholes;
  std::map<std::string, LineList> kinds;  // of sweeps; "" of other lines
  for (const Line* line : suite.lines) {
    if (is_whole_stage(text_of(line->json, "stage"))) wholes.push_back(line);
  }
  for (const Line* line : wholes.empty() ? suite.lines : wholes) {
    kinds[text_of(line->json, "sweep")].push_back(line);
  }
  std::string html;
  for (auto& [sweep, lines] : kinds) {
    std::string title = sweep;
    std::replace(title.begin(), title.end(), '_', ' ');
    html += plots_of(suite, lines, title, 2);
  }
  return html;
}

std::string stage_bars(const Suite& suite) {
  std::vector<Bar> bars;
  for (const auto& [name, lines] : by_name(suite.lines, varying_members(suite.lines), "stage")) {
    std::set<std::string> stages;
    for (const Line* line : lines) stages.insert(text_of(line->json, "stage"));
    Bar bar{.name = name.empty() ? suite.name : name};
    double sum = 0;
    for (const Line* line : lines) {
      const std::string stage = text_of(line->json, "stage");
      const auto median = number_of(line->json, "median_us");
      if (!median || stage.empty() || is_whole_stage(stage) || is_sum_of(stage, stages)) continue;
      bar.parts.emplace_back(stage, *median);
      sum += *median;
    }
    bar.total = human_time(sum);
    if (bar.parts.size() > 1) bars.push_back(std::move(bar));
  }
  std::string title = "Time of the stages, their sum at the right";
  if (bars.size() > kMostBars) {
    title += fmt::format(" ({} of {} cases; all are in the table)", kMostBars, bars.size());
    bars.resize(kMostBars);
  }
  return share_bars(title, bars);
}

}  // namespace switchyard::tool
