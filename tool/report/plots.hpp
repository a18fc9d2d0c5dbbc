#pragma once

#include <string>
#include <utility>
#include <vector>

namespace switchyard::tool {

/// One line of a plot: points (x, y), both > 0.
struct Series {
  std::string name{};
  std::vector<std::pair<double, double>> points{};
};

/// Lines over logarithmic axes, as an SVG element.
[[nodiscard]] std::string line_plot(const std::string& x_label, const std::string& y_label,
                                    const std::vector<Series>& series);

/// One bar made of parts.
struct Bar {
  std::string name{};
  std::vector<std::pair<std::string, double>> parts{};  ///< Name, size >= 0.
};

/// Bars of equal length, their parts in proportion, as an SVG element with a legend.
[[nodiscard]] std::string share_plot(const std::vector<Bar>& bars);

/// Text inside HTML or SVG.
[[nodiscard]] std::string escape_html(const std::string& text);

}  // namespace switchyard::tool
