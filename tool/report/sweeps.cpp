// The sweeps of the fixed-size exchange in a report.
#include "tool/report/sweeps.hpp"

#include <fmt/core.h>

#include <map>

#include "tool/options/words.hpp"
#include "tool/report/plots.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;
using Points = std::map<double, json>;

std::string title_of(const json& line) {
  const json& c = line.at("case");
  const json& machine = line.at("machine");
  return fmt::format("fixed-size, {}: {} ranks ({}), H={} {}, {}",
                     line.at("sweep").get<std::string>(), c.at("R").get<int>(),
                     c.at("engine").get<std::string>(), c.at("H").get<std::int64_t>(),
                     c.at("compute").get<std::string>(), machine.at("cpu").get<std::string>());
}

/// The library whose all-to-all was measured beside.
struct Peer {
  std::string key, name, call;
};

Peer peer_of(const json& line) {
  if (line.at("peers").contains("nccl")) return {"nccl", "NCCL", "NCCL's all-to-all"};
  return {"mpi", "MPI", "MPI_Alltoallv"};
}

std::string section_of(const std::string& title, const Points& points) {
  Series median{.name = "exchange, median"};
  Series mean{.name = "exchange, mean"};
  const Peer library = peer_of(points.begin()->second);
  Series peer{.name = library.call + ", median"};
  std::string rows;
  for (const auto& [value, line] : points) {
    const double us = line.at("median_us");
    median.points.emplace_back(value, us);
    mean.points.emplace_back(value, line.at("mean_us").get<double>());
    const json& peers = line.at("peers");
    std::string beside = "-";
    if (peers.contains(library.key)) {
      peer.points.emplace_back(value, peers.at(library.key).get<double>());
      beside = human_time(peers.at(library.key).get<double>());
    }
    const auto sent = line.at("wire_bytes").get<double>();
    rows += fmt::format(
        "<tr><td>{:g}<td>{}<td>{:.1f}%<td>{}<td>{}<td>{}<td>{:.3g}<td>{}<td>{}</tr>\n", value,
        line.at("M").get<std::int64_t>(), 100 * line.at("padding").get<double>(),
        human_count(sent, "B"), human_time(line.at("mean_us").get<double>()), human_time(us),
        sent / us * 1e-3, beside, line.at("holds").get<bool>() ? "holds" : "MISS");
  }
  std::vector<Series> series = {median, mean};
  if (!peer.points.empty()) series.push_back(peer);
  const json& first = points.begin()->second;
  const std::string sweep = first.at("sweep");
  return fmt::format(
      "<h2>{}</h2>\n<p>commit {}</p>\n{}\n<table><tr><th>{}<th>M<th>padding<th>sent<th>mean"
      "<th>median<th>GB/s<th>{}<th>check</tr>\n{}</table>\n",
      escape_html(title), escape_html(first.at("commit").get<std::string>()),
      line_plot(sweep, "microseconds", series), escape_html(sweep), library.name, rows);
}

}  // namespace

bool is_sweep_line(const json& line) { return line.contains("sweep"); }

std::string sweep_sections(const std::vector<json>& lines, std::size_t& sections) {
  std::map<std::string, Points> sweeps;
  for (const json& line : lines) sweeps[title_of(line)][line.at("value").get<double>()] = line;
  std::string html;
  for (const auto& [title, points] : sweeps) html += section_of(title, points);
  sections += sweeps.size();
  return html;
}

}  // namespace switchyard::tool
