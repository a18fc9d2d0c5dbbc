// The two plots of a report, as SVG inside the page: nothing has to be loaded or installed.
#include "tool/report/plots.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace switchyard::tool {
namespace {

constexpr const char* kColors[] = {"#3366cc", "#dc3912", "#ff9900", "#109618", "#990099",
                                   "#0099c6", "#dd4477", "#66aa00", "#b82e2e", "#316395"};

const char* color_of(std::size_t index) { return kColors[index % std::size(kColors)]; }

/// A logarithmic axis over whole decades, mapped to [begin, end] of the picture.
struct LogAxis {
  double low, high;  ///< log10
  double begin, end;

  LogAxis(double least, double most, double from, double to)
      : low(std::floor(std::log10(least))),
        high(std::ceil(std::log10(most))),
        begin(from),
        end(to) {
    if (high <= low) high = low + 1;
  }
  [[nodiscard]] double at(double value) const {
    return begin + (std::log10(value) - low) / (high - low) * (end - begin);
  }
};

/// Zero and what is below have no place on a logarithmic axis.
bool has_place(double x, double y) { return x > 0 && y > 0; }

struct Range {
  double least = HUGE_VAL;
  double most = 0;
  void take(double value) {
    least = std::min(least, value);
    most = std::max(most, value);
  }
};

constexpr double kWidth = 720, kHeight = 360, kLeft = 70, kRight = 250, kTop = 10, kBottom = 50;

std::string grid_of(const LogAxis& x, const LogAxis& y) {
  std::string svg;
  for (double e = x.low; e <= x.high; ++e) {
    const double at = x.at(std::pow(10, e));
    svg += fmt::format(
        "<line x1='{0:.1f}' x2='{0:.1f}' y1='{1}' y2='{2}' stroke='#ddd'/>"
        "<text x='{0:.1f}' y='{3}' text-anchor='middle'>{4:g}</text>",
        at, kTop, kHeight - kBottom, kHeight - kBottom + 16, std::pow(10, e));
  }
  for (double e = y.low; e <= y.high; ++e) {
    const double at = y.at(std::pow(10, e));
    svg += fmt::format(
        "<line x1='{1}' x2='{2}' y1='{0:.1f}' y2='{0:.1f}' stroke='#ddd'/>"
        "<text x='{3}' y='{4:.1f}' text-anchor='end'>{5:g}</text>",
        at, kLeft, kWidth - kRight, kLeft - 6, at + 4, std::pow(10, e));
  }
  return svg;
}

}  // namespace

std::string escape_html(const std::string& text) {
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

std::string line_plot(const std::string& x_label, const std::string& y_label,
                      const std::vector<Series>& series) {
  Range x_range;
  Range y_range;
  for (const Series& line : series) {
    for (const auto& [x, y] : line.points) {
      if (!has_place(x, y)) continue;
      x_range.take(x);
      y_range.take(y);
    }
  }
  if (x_range.most <= 0 || y_range.most <= 0) return "";
  const LogAxis x_axis(x_range.least, x_range.most, kLeft, kWidth - kRight);
  const LogAxis y_axis(y_range.least, y_range.most, kHeight - kBottom, kTop);
  std::string svg = fmt::format("<svg viewBox='0 0 {} {}' width='{}'>", kWidth, kHeight, kWidth);
  svg += grid_of(x_axis, y_axis);
  svg += fmt::format("<text x='{}' y='{}' text-anchor='middle'>{}</text>",
                     (kLeft + kWidth - kRight) / 2, kHeight - 12, escape_html(x_label));
  svg +=
      fmt::format("<text transform='translate(14 {}) rotate(-90)' text-anchor='middle'>{}</text>",
                  (kTop + kHeight - kBottom) / 2, escape_html(y_label));
  for (std::size_t i = 0; i < series.size(); ++i) {
    std::string points;
    for (const auto& [x, y] : series[i].points) {
      if (!has_place(x, y)) continue;
      points += fmt::format("{:.1f},{:.1f} ", x_axis.at(x), y_axis.at(y));
      svg += fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='3' fill='{}'/>", x_axis.at(x),
                         y_axis.at(y), color_of(i));
    }
    svg += fmt::format("<polyline points='{}' fill='none' stroke='{}'/>", points, color_of(i));
    svg += fmt::format("<text x='{}' y='{}' fill='{}'>{}</text>", kWidth - kRight + 12,
                       kTop + 14 + 16 * static_cast<double>(i), color_of(i),
                       escape_html(series[i].name));
  }
  return svg + "</svg>";
}

std::string share_plot(const std::vector<Bar>& bars) {
  std::vector<std::string> names;
  for (const Bar& bar : bars) {
    for (const auto& [name, size] : bar.parts) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  constexpr double kRow = 24, kText = 260, kLength = 440;
  const double height = kRow * static_cast<double>(bars.size() + 1);
  std::string svg =
      fmt::format("<svg viewBox='0 0 {} {}' width='{}'>", kText + kLength, height, kText + kLength);
  double legend = kText;
  for (std::size_t i = 0; i < names.size(); ++i) {
    svg += fmt::format("<text x='{}' y='14' fill='{}'>{}</text>", legend, color_of(i),
                       escape_html(names[i]));
    legend += 9 * static_cast<double>(names[i].size()) + 10;
  }
  for (std::size_t row = 0; row < bars.size(); ++row) {
    const double y = kRow * static_cast<double>(row + 1);
    double sum = 0;
    for (const auto& [name, size] : bars[row].parts) sum += size;
    double x = kText;
    svg += fmt::format("<text x='{}' y='{}' text-anchor='end'>{}</text>", kText - 8, y + 15,
                       escape_html(bars[row].name));
    for (const auto& [name, size] : bars[row].parts) {
      const double length = sum > 0 ? size / sum * kLength : 0;
      const auto index =
          static_cast<std::size_t>(std::find(names.begin(), names.end(), name) - names.begin());
      svg += fmt::format(
          "<rect x='{:.1f}' y='{}' width='{:.1f}' height='18' fill='{}'>"
          "<title>{}: {:.1f}%</title></rect>",
          x, y + 2, length, color_of(index), escape_html(name), sum > 0 ? 100 * size / sum : 0);
      x += length;
    }
  }
  return svg + "</svg>";
}

}  // namespace switchyard::tool
