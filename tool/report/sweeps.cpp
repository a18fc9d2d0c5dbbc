// The sweeps of the fixed-size exchange in a report.
#include "tool/report/sweeps.hpp"

#include <fmt/core.h>

#include <map>

#include "tool/options/words.hpp"
#include "tool/report/plots.hpp"
#include "tool/report/result_header.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;
using Points = std::map<double, SweepPoint>;

std::string title_of(const json& line) {
  const json& c = line.at("case");
  const json& machine = line.at("machine");
  return fmt::format("fixed-size, {}: {} ranks ({}), H={} {}, {}",
                     line.at("sweep").get<std::string>(), whole_number(c.at("R")),
                     c.at("engine").get<std::string>(), whole_number(c.at("H")),
                     c.at("compute").get<std::string>(), machine.at("cpu").get<std::string>());
}

std::string section_of(const std::string& title, const Points& points) {
  const SweepPoint& first = points.begin()->second;
  const std::string library = first.beside_nccl ? "NCCL" : "MPI";
  Series median{.name = "exchange, median"};
  Series mean{.name = "exchange, mean"};
  Series peer{.name = first.beside_nccl ? "NCCL's all-to-all, median" : "MPI_Alltoallv, median"};
  std::string rows;
  for (const auto& [value, point] : points) {
    median.points.emplace_back(value, point.median_us);
    mean.points.emplace_back(value, point.mean_us);
    std::string beside = "-";
    if (point.peer_us && point.beside_nccl == first.beside_nccl) {
      peer.points.emplace_back(value, *point.peer_us);
      beside = human_time(*point.peer_us);
    }
    rows += fmt::format(
        "<tr><td>{:g}<td>{}<td>{:.1f}%<td>{}<td>{}<td>{}<td>{:.3g}<td>{}<td>{}</tr>\n", value,
        point.rows, 100 * point.padding, human_count(point.wire_bytes, "B"),
        human_time(point.mean_us), human_time(point.median_us),
        point.wire_bytes / point.median_us * 1e-3, beside, point.holds ? "holds" : "MISS");
  }
  std::vector<Series> series = {median, mean};
  if (!peer.points.empty()) series.push_back(peer);
  return fmt::format(
      "<h2>{}</h2>\n<p>commit {}</p>\n{}\n<table><tr><th>{}<th>M<th>padding<th>sent<th>mean"
      "<th>median<th>GB/s<th>{}<th>check</tr>\n{}</table>\n",
      escape_html(title), escape_html(first.commit), line_plot(first.sweep, "microseconds", series),
      escape_html(first.sweep), library, rows);
}

}  // namespace

bool is_sweep_line(const json& line) { return line.contains("sweep"); }

SweepPoint sweep_point_of(const json& line) {
  const json& peers = line.at("peers");
  SweepPoint point{.title = title_of(line),
                   .sweep = line.at("sweep").get<std::string>(),
                   .commit = line.at("commit").get<std::string>(),
                   .beside_nccl = peers.contains("nccl"),
                   .value = line.at("value").get<double>(),
                   .median_us = line.at("median_us").get<double>(),
                   .mean_us = line.at("mean_us").get<double>(),
                   .padding = line.at("padding").get<double>(),
                   .wire_bytes = line.at("wire_bytes").get<double>(),
                   .rows = whole_number(line.at("M")),
                   .holds = line.at("holds").get<bool>()};
  const char* const library = point.beside_nccl ? "nccl" : "mpi";
  if (peers.contains(library)) point.peer_us = peers.at(library).get<double>();
  return point;
}

std::string sweep_sections(const std::vector<SweepPoint>& points, std::size_t& sections) {
  std::map<std::string, Points> sweeps;
  for (const SweepPoint& point : points) sweeps[point.title][point.value] = point;
  std::string html;
  for (const auto& [title, of_sweep] : sweeps) html += section_of(title, of_sweep);
  sections += sweeps.size();
  return html;
}

}  // namespace switchyard::tool
