// `switchyard report`: result lines as one HTML page that needs nothing else.
#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "checkpoint/files/mapped_file.hpp"
#include "core/atomic_file.hpp"
#include "core/printable.hpp"
#include "tool/commands.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"
#include "tool/output_files.hpp"
#include "tool/report/plots.hpp"
#include "tool/report/result_header.hpp"
#include "tool/report/sweeps.hpp"

namespace switchyard::tool {
namespace {

/// What of a result line is shown.
struct Line {
  std::string group{};  ///< Everything of the case but T.
  std::string stage{}, machine{}, commit{}, limit_by{};
  std::string time{};  ///< "2026-11-21T10:32:11Z": sorts as it reads.
  double num_tokens = 0, median_us = 0, p95_us = 0, gbps = 0, tflops = 0, limit_us = 0, share = 0;
};

Line line_of(const nlohmann::json& json) {
  const nlohmann::json& c = json.at("case");
  Line line;
  line.group =
      fmt::format("{} {} {} R={} E={} K={} H={} I={}", c.at("name").get<std::string>(),
                  c.at("compute").get<std::string>(), c.at("layout").get<std::string>(),
                  whole_number(c.at("R")), whole_number(c.at("E")), whole_number(c.at("K")),
                  whole_number(c.at("H")), whole_number(c.at("I")));
  const std::string skew = c.value("skew", "uniform");
  if (skew != "uniform") line.group += " " + skew;
  if (c.value("batch_invariant", false)) line.group += " batch_invariant";
  const nlohmann::json& machine = json.at("machine");
  const std::string gpu = machine.at("gpu").get<std::string>();
  line.machine = machine.at("cpu").get<std::string>() + ", " +
                 machine.at("isa").get<std::string>() + (gpu.empty() ? "" : ", " + gpu);
  line.commit = json.at("commit").get<std::string>();
  line.time = json.value("time", "");
  line.stage = json.at("stage").get<std::string>();
  line.limit_by = json.at("limit_by").get<std::string>();
  line.num_tokens = c.at("T").get<double>();
  line.median_us = json.at("median_us").get<double>();
  line.p95_us = json.at("p95_us").get<double>();
  line.gbps = json.at("gbps").get<double>();
  line.tflops = json.at("tflops").get<double>();
  line.limit_us = json.at("limit_us").get<double>();
  line.share = json.at("share").get<double>();
  return line;
}

/// The lines of all files, points of sweeps apart.
struct Lines {
  std::vector<Line> stages{};
  std::vector<SweepPoint> sweeps{};
  int others = 0;  ///< Of programs with lines of their own, as device_check appends them.
};

constexpr std::size_t kMostLine = 1 << 20;

/// The first line of a text, without its end, or as much of it as shows that it is too long.
std::string_view take_line(std::string_view& text) {
  const std::size_t end = text.substr(0, kMostLine + 1).find('\n');
  const std::string_view line = text.substr(0, end == std::string_view::npos ? kMostLine + 1 : end);
  text.remove_prefix(std::min(text.size(), line.size() + 1));
  return line;
}

Lines read_lines(const std::vector<std::string>& files) {
  Lines lines;
  for (const std::string& path : files) {
    const auto file = MappedFile::open(path);
    std::string_view rest(reinterpret_cast<const char*>(file->bytes().data()),
                          file->bytes().size());
    ResultHeader header;
    for (int number = 1; !rest.empty(); ++number) {
      const std::string_view text = take_line(rest);
      if (text.empty()) continue;
      if (text.size() > kMostLine) {
        throw UsageError("FILE: {} line {} is longer than the {} bytes of a result line of bench",
                         path, number, kMostLine);
      }
      try {
        const std::optional<nlohmann::json> line = header.whole(nlohmann::json::parse(text));
        if (!line) continue;
        if (line->contains("program")) {
          ++lines.others;
        } else if (is_sweep_line(*line)) {
          lines.sweeps.push_back(sweep_point_of(*line));
        } else {
          lines.stages.push_back(line_of(*line));
        }
      } catch (const nlohmann::json::exception&) {
        throw UsageError("FILE: {} line {} is no result line of bench", path, number);
      }
    }
  }
  if (lines.stages.empty() && lines.sweeps.empty())
    throw UsageError("FILE: {} has no result line", files.front());
  return lines;
}

/// A case on a machine, with the instruction set in use; T apart.
using Group = std::pair<std::string, std::string>;
/// Of the lines of one case and stage the newest counts: files are appended to.
using Stages = std::vector<Line>;
using Groups = std::map<Group, std::map<double, Stages>>;
Groups grouped(const std::vector<Line>& lines) {
  Groups groups;
  for (const Line& line : lines) {
    Stages& stages = groups[{line.group, line.machine}][line.num_tokens];
    const auto same = std::find_if(stages.begin(), stages.end(),
                                   [&](const Line& other) { return other.stage == line.stage; });
    if (same == stages.end()) {
      stages.push_back(line);
    } else if (same->time <= line.time) {
      *same = line;
    }
  }
  return groups;
}

std::string table_of(const std::map<double, Stages>& sizes) {
  std::string html =
      "<table><tr><th>T<th>stage<th>median<th>p95<th>GB/s<th>TFLOP/s<th>limit<th>by<th>share</"
      "tr>\n";
  for (const auto& [num_tokens, stages] : sizes) {
    for (const Line& line : stages) {
      html += fmt::format(
          "<tr><td>{}<td>{}<td>{}<td>{}<td>{:.3g}<td>{:.3g}<td>{}<td>{}<td>{:.1f}%</tr>\n",
          num_tokens, escape_html(line.stage), human_time(line.median_us), human_time(line.p95_us),
          line.gbps, line.tflops, human_time(line.limit_us), escape_html(line.limit_by),
          100 * line.share);
    }
  }
  return html + "</table>\n";
}

/// Stages of an exchange that others are parts of.
bool is_a_sum(const std::string& stage) {
  return stage == "dispatch+combine" || stage == "round_trip" || stage == "barrier_to_barrier";
}

std::string section_of(const std::string& group, const std::map<double, Stages>& sizes) {
  Series median{.name = "layer, median"};
  Series limit{.name = "layer, limit"};
  std::vector<Bar> bars;
  for (const auto& [num_tokens, stages] : sizes) {
    Bar bar{.name = fmt::format("T = {}", num_tokens)};
    for (const Line& line : stages) {
      if (is_a_sum(line.stage)) continue;
      if (line.stage != "layer") {
        bar.parts.emplace_back(line.stage, line.median_us);
      } else if (num_tokens > 0 && line.median_us > 0 && line.limit_us > 0) {
        median.points.emplace_back(num_tokens, line.median_us);
        limit.points.emplace_back(num_tokens, line.limit_us);
      }
    }
    bars.push_back(std::move(bar));
  }
  const Line& first = sizes.begin()->second.front();
  return fmt::format("<h2>{}</h2>\n<p>{}, commit {}</p>\n{}\n{}\n{}", escape_html(group),
                     escape_html(first.machine), escape_html(first.commit),
                     line_plot("tokens", "microseconds", {median, limit}), share_plot(bars),
                     table_of(sizes));
}

}  // namespace

int report_command(const Options& options) {
  const NamedFile output{"--output", options.output};
  std::vector<NamedFile> inputs;
  for (const std::string& path : options.positional) inputs.push_back({"FILE", path});
  check_output_place(output);
  check_outputs_apart({output}, inputs);
  const Lines lines = read_lines(options.positional);
  const Groups groups = grouped(lines.stages);
  std::string html =
      "<!DOCTYPE html>\n<html lang='en'><meta charset='utf-8'><title>switchyard</title>\n"
      "<style>body{font:14px sans-serif;margin:2em;max-width:60em}svg{display:block;font:12px "
      "sans-serif;margin:1em 0}table{border-collapse:collapse}td,th{padding:2px 10px;text-align:"
      "right;border-bottom:1px solid #ddd}</style>\n<h1>Switchyard: measured stages</h1>\n";
  for (const auto& [group, sizes] : groups) html += section_of(group.first, sizes);
  std::size_t cases = groups.size();
  html += sweep_sections(lines.sweeps, cases);
  write_text(options.output, html + "</html>\n");
  fmt::print("{}: {} case{}\n", printable(options.output), cases, cases == 1 ? "" : "s");
  if (lines.others > 0) {
    fmt::print("left out: lines of other programs than bench: {}\n", lines.others);
  }
  return kFine;
}

}  // namespace switchyard::tool
