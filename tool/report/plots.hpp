#pragma once

// Plots as the page's script draws them: data in the page, and a place for the picture.

#include <cstdint>
#include <string>
#include <vector>

namespace switchyard::tool {

struct Point {
  double x = 0, y = 0;
  std::string note{};        ///< Said where the pointer is; may be empty.
  double low = 0, high = 0;  ///< Of a band; both 0: none.
};

enum class Mark : std::uint8_t { kLine, kDashed, kDots, kRoof };

struct Series {
  std::string name{};
  Mark mark = Mark::kLine;
  std::vector<Point> points{};
};

struct Axis {
  std::string label{};
  bool log = true;  ///< What is <= 0 has no place on it.
};

struct Plot {
  std::string title{};
  Axis x{}, y{};
  std::vector<Series> series{};
};

/// A figure; "" where no point has a place on the axes.
[[nodiscard]] std::string figure_of(const Plot& plot);

/// Of points of which both are wanted small (or y large): those that no other is better than.
[[nodiscard]] Series frontier_of(const std::vector<Series>& all, bool large_y);

/// Whether this build has the library that draws plots.
[[nodiscard]] bool has_plots();

/// One bar made of parts.
struct Bar {
  std::string name{};
  std::string total{};                                  ///< Said at its end.
  std::vector<std::pair<std::string, double>> parts{};  ///< Name, size >= 0.
};

/// Bars of equal length, their parts in proportion, with a legend.
[[nodiscard]] std::string share_bars(const std::string& title, const std::vector<Bar>& bars);

}  // namespace switchyard::tool
