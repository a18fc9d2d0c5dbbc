// What is paid for what, and drops against capacity.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "tool/report/plots.hpp"
#include "tool/report/sections.hpp"
#include "tool/report/values.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

std::string note_of(const Line& line) {
  std::string note = text_of(line.json, "case.name");
  for (const char* member : {"T", "E", "K", "capacity_factor"}) {
    const auto value = number_of(line.json, std::string("case.") + member);
    if (value && *value > 0) note += fmt::format(" {} {}", title_of(member), *value);
  }
  for (const char* member : {"case.skew", "case.layout", "stage"}) {
    if (const std::string text = text_of(line.json, member); !text.empty()) note += " " + text;
  }
  return note;
}

using SeriesBy = std::map<std::string, Series>;

std::vector<Series> list_of(SeriesBy& by, std::size_t fewest_points, std::size_t most_series) {
  std::vector<Series> list;
  for (auto& [name, series] : by) {
    std::set<std::pair<double, double>> places;
    for (const Point& point : series.points) places.emplace(point.x, point.y);
    if (places.size() < fewest_points || list.size() >= most_series) continue;
    series.name = name;
    list.push_back(std::move(series));
  }
  return list;
}

/// Tokens a second against the time of a layer, by machine: more tokens at once cost time.
std::string throughput_of(const std::string& machine, const LineList& lines) {
  SeriesBy by;
  for (const Line* line : lines) {
    const auto us = number_of(line->json, "median_us");
    const auto tokens = number_of(line->json, "case.T");
    if (text_of(line->json, "stage") != "layer" || !us || !tokens || !(*us > 0)) continue;
    Series& series = by[text_of(line->json, "case.name")];
    series.mark = Mark::kDots;
    series.points.push_back({.x = *us, .y = *tokens / *us * 1e6, .note = note_of(*line)});
  }
  std::vector<Series> list = list_of(by, 2, 9);
  if (list.empty()) return "";
  for (Series& series : list) {
    std::sort(series.points.begin(), series.points.end(),
              [](const Point& a, const Point& b) { return a.x < b.x; });
  }
  list.push_back(frontier_of(list, true));
  return figure_of({.title = machine + ": tokens a second against a layer's time",
                    .x = {"microseconds of a layer"},
                    .y = {"tokens/s"},
                    .series = std::move(list)});
}

/// Time against a figure of the load in which the lines of a suite differ.
std::string against_load(const Suite& suite, const char* member, const std::string& label,
                         bool frontier) {
  SeriesBy by;
  const bool has_whole = std::any_of(suite.lines.begin(), suite.lines.end(), [](const Line* line) {
    return is_whole_stage(text_of(line->json, "stage"));
  });
  const auto point_of = [&](const Line& line) -> std::optional<Point> {
    const auto us = number_of(line.json, "median_us");
    const auto value = number_of(line.json, member);
    if (!us || !value || is_whole_stage(text_of(line.json, "stage")) != has_whole) return {};
    return Point{.x = *value, .y = *us};
  };
  std::set<double> values;
  for (const Line* line : suite.lines) {
    if (const std::optional<Point> point = point_of(*line)) values.insert(point->x);
  }
  if (values.size() < 3) return "";
  const std::vector<std::string> varying = varying_members(suite.lines);
  const std::vector<std::string> but = {"case.skew", "case.router", "case.capacity_factor",
                                        "load.cv",   "rows.used",   "rows.executed"};
  for (const Line* line : suite.lines) {
    std::optional<Point> point = point_of(*line);
    if (!point) continue;
    point->note = note_of(*line);
    Series& series = by[words_of_line(*line, varying, but)];
    series.mark = frontier ? Mark::kDots : Mark::kLine;
    series.points.push_back(std::move(*point));
  }
  for (auto& [name, series] : by) {
    std::sort(series.points.begin(), series.points.end(),
              [](const Point& a, const Point& b) { return a.x < b.x; });
  }
  std::vector<Series> list = list_of(by, 2, 9);
  if (list.empty()) return "";
  if (frontier) list.push_back(frontier_of(list, false));
  return figure_of({.title = suite.name + " on " + suite.machine + ": time against " + label,
                    .x = {label, false},
                    .y = {"microseconds"},
                    .series = std::move(list)});
}

/// Where on the axis of capacity a point lies, and the curve it belongs to.
std::string curve_of(const Line& line) {
  std::string name;
  for (const char* member : {"E", "K", "T"}) {
    const auto value = number_of(line.json, std::string("case.") + member);
    if (value) name += fmt::format("{}{} {}", name.empty() ? "" : ", ", member, *value);
  }
  return name;
}

}  // namespace

std::string trades_of(const Lines& lines) {
  std::string figures;
  for (const auto& [machine, of] : by_machine(lines)) figures += throughput_of(machine, of);
  for (const Suite& suite : suites_of(lines)) {
    figures += against_load(suite, "load.cv", "load CV", false);
    figures += against_load(suite, "load.dropped", "share dropped", true);
  }
  if (figures.empty()) return "";
  return "<section id=trades><h2>What is paid for what</h2>\n<p>Where a line of points that "
         "nothing "
         "is better than is drawn (the Pareto frontier), every other point loses on both axes to "
         "one of it. Load CV is the standard deviation of the experts' loads over their "
         "mean.</p>\n<div class=grid>" +
         figures + "</div></section>\n";
}

std::string capacity_of(const Lines& lines) {
  std::map<std::string, std::map<std::string, std::pair<Series, Series>>> plots;
  for (const Line& line : lines.lines) {
    const auto factor = number_of(line.json, "case.capacity_factor");
    const auto dropped = number_of(line.json, "capacity.dropped");
    const auto expected = number_of(line.json, "capacity.expected");
    const auto error = number_of(line.json, "capacity.standard_error");
    if (!factor || !dropped || !expected || !error) continue;
    auto& [measured, formula] = plots[line.machine][curve_of(line)];
    const auto same = std::find_if(measured.points.begin(), measured.points.end(),
                                   [&](const Point& point) { return point.x == *factor; });
    if (same != measured.points.end()) continue;  // another stage of the same draw
    measured.points.push_back({.x = *factor, .y = *dropped * 100, .note = note_of(line)});
    formula.points.push_back({.x = *factor,
                              .y = *expected * 100,
                              .low = std::max(0.0, *expected - 3 * *error) * 100,
                              .high = (*expected + 3 * *error) * 100});
  }
  std::string figures;
  for (auto& [machine, curves] : plots) {
    std::map<std::string, Plot> by_sizes;  // of E and K: one curve for each T
    for (auto& [name, curve] : curves) {
      Plot& plot = by_sizes[name.substr(0, name.rfind(", T"))];
      plot.x = {"capacity factor", false};
      plot.y = {"dropped, %", false};
      auto& [measured, formula] = curve;
      const auto by_x = [](const Point& a, const Point& b) { return a.x < b.x; };
      std::sort(measured.points.begin(), measured.points.end(), by_x);
      std::sort(formula.points.begin(), formula.points.end(), by_x);
      const std::size_t tokens = name.rfind(", T");
      const std::string which = tokens == std::string::npos ? name : name.substr(tokens + 2);
      measured.name = which + " measured";
      measured.mark = Mark::kDots;
      formula.name = which + " closed form, ±3 standard errors";
      plot.series.push_back(std::move(formula));
      plot.series.push_back(std::move(measured));
    }
    for (auto& [name, plot] : by_sizes) {
      plot.title = fmt::format("{}: {}", machine, name);
      figures += figure_of(plot);
    }
  }
  if (figures.empty()) return "";
  return "<section id=capacity><h2>Drop against capacity</h2>\n<p>An expert takes at most "
         "ceil(capacity factor x tokens x K / E) assignments; what comes beyond is dropped. Points "
         "are counted, lines follow from the binomial distribution of uniform routing, the band is "
         "three standard errors wide on each side.</p>\n<div class=grid>" +
         figures + "</div></section>\n";
}

}  // namespace switchyard::tool
