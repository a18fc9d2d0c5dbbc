#include "tool/report/plots.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tool/report/values.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr std::size_t kColors = 10;  // --c0 to --c9 of the page's style

bool has_place(const Axis& axis, double value) {
  return std::isfinite(value) && (!axis.log || value > 0);
}

/// Four digits: more than a screen has.
double rounded(double value) {
  if (value == 0 || !std::isfinite(value)) return 0;
  const double unit = std::pow(10, std::floor(std::log10(std::abs(value))) - 3);
  return std::isfinite(1 / unit) ? std::round(value / unit) * unit : value;
}

json number(double value) {
  const double short_one = rounded(value);
  return short_one == std::floor(short_one) && std::abs(short_one) < 1e15
             ? json(static_cast<std::int64_t>(short_one))
             : json(std::stod(fmt::format("{:.4g}", short_one)));
}

json series_json(const Plot& plot, const Series& series) {
  static constexpr const char* kMarks[] = {"line", "dashed", "dots", "roof"};
  json points = json::array();
  for (const Point& point : series.points) {
    if (!has_place(plot.x, point.x) || !has_place(plot.y, point.y)) continue;
    json entry = {number(point.x), number(point.y)};
    const bool band = point.low != 0 || point.high != 0;
    if (band || !point.note.empty()) entry.push_back(point.note);
    if (band) {
      entry.push_back(number(point.low));
      entry.push_back(number(point.high));
    }
    points.push_back(std::move(entry));
  }
  return {{"name", series.name},
          {"mark", kMarks[static_cast<std::size_t>(series.mark)]},
          {"points", std::move(points)}};
}

json axis_json(const Axis& axis) { return {{"label", axis.label}, {"log", axis.log}}; }

}  // namespace

std::string figure_of(const Plot& plot) {
  json series = json::array();
  for (const Series& one : plot.series) {
    json entry = series_json(plot, one);
    if (!entry.at("points").empty()) series.push_back(std::move(entry));
  }
  if (series.empty() || !has_plots()) return "";
  const json data = {
      {"x", axis_json(plot.x)}, {"y", axis_json(plot.y)}, {"series", std::move(series)}};
  return fmt::format(
      "<figure class=plot><figcaption>{}</figcaption><div class=canvas></div><output></output>"
      "<div class=legend></div><script type='application/json'>{}</script></figure>\n",
      escape_html(plot.title), script_text(data));
}

Series frontier_of(const std::vector<Series>& all, bool large_y) {
  std::vector<Point> points;
  for (const Series& series : all) {
    points.insert(points.end(), series.points.begin(), series.points.end());
  }
  const double sign = large_y ? -1 : 1;
  std::sort(points.begin(), points.end(), [&](const Point& a, const Point& b) {
    return std::pair(a.x, sign * a.y) < std::pair(b.x, sign * b.y);
  });
  Series frontier{.name = "nothing is better", .mark = Mark::kRoof};
  double best = HUGE_VAL;
  for (Point& point : points) {
    if (!(sign * point.y < best)) continue;
    best = sign * point.y;
    point.note.clear();
    frontier.points.push_back(std::move(point));
  }
  return frontier;
}

std::string share_bars(const std::string& title, const std::vector<Bar>& bars) {
  std::vector<std::string> names;
  for (const Bar& bar : bars) {
    for (const auto& [name, size] : bar.parts) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  if (names.empty()) return "";
  std::string legend;
  for (std::size_t i = 0; i < names.size(); ++i) {
    legend += fmt::format("<span><i class=c{}></i>{}</span>", i % kColors, escape_html(names[i]));
  }
  std::string rows;
  for (const Bar& bar : bars) {
    double sum = 0;
    for (const auto& [name, size] : bar.parts) sum += size;
    rows += fmt::format("<div class=bar><span>{}</span><div>", escape_html(bar.name));
    for (const auto& [name, size] : bar.parts) {
      if (!(size > 0) || !(sum > 0) || !std::isfinite(sum)) continue;
      const auto index = std::find(names.begin(), names.end(), name) - names.begin();
      rows += fmt::format("<i class=c{} style='width:{:.2f}%' title='{}: {:.1f}%'></i>",
                          static_cast<std::size_t>(index) % kColors, 100 * size / sum,
                          escape_html(name), 100 * size / sum);
    }
    rows += fmt::format("</div><span>{}</span></div>\n", escape_html(bar.total));
  }
  return fmt::format(
      "<figure class=bars><figcaption>{}</figcaption><div class=legend>{}</div>\n{}</figure>\n",
      escape_html(title), legend, rows);
}

}  // namespace switchyard::tool
