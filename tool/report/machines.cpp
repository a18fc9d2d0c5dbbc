// What was measured on: machines with the rates that were measured there, and their rooflines.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "tool/options/words.hpp"
#include "tool/report/plots.hpp"
#include "tool/report/sections.hpp"
#include "tool/report/values.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// The median of a rate over the runs of a machine; 0: no line has it.
double rate_of(const LineList& lines, const std::string& name) {
  std::vector<double> rates;
  for (const Line* line : lines) {
    const auto rate = number_of(line->json, "machine." + name);
    if (rate && *rate > 0) rates.push_back(*rate);
  }
  if (rates.empty()) return 0;
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() / 2];
}

void add_row(std::string& rows, const char* name, const std::string& value) {
  if (!value.empty()) rows += fmt::format("<dt>{}<dd>{}\n", name, escape_html(value));
}

std::string values_of(const LineList& lines, const std::string& path) {
  std::set<std::string> values;
  for (const Line* line : lines) {
    const json* value = member_of(line->json, path);
    const std::string text = value == nullptr ? "" : shown(*value);
    if (!text.empty()) values.insert(text);
  }
  return fmt::format("{}", fmt::join(values, ", "));
}

std::string versions_of(const LineList& lines) {
  std::map<std::string, std::set<std::string>> versions;
  for (const Line* line : lines) {
    const json* members = member_of(line->json, "versions");
    if (members == nullptr) continue;
    for (const auto& [name, value] : leaves_of(*members)) versions[name].insert(shown(value));
  }
  std::string words;
  for (const auto& [name, values] : versions) {
    words += fmt::format("{}{} {}", words.empty() ? "" : ", ", name, fmt::join(values, " and "));
  }
  return words;
}

std::string rate_words(const LineList& lines, const std::string& name, const char* unit) {
  const double rate = rate_of(lines, name);
  return rate > 0 ? human_count(rate, unit) : "";
}

std::string card_of(const std::string& machine, const LineList& lines) {
  std::string rows;
  if (const std::string gpu = values_of(lines, "machine.gpu"); !gpu.empty()) {
    add_row(rows, "processor", values_of(lines, "machine.cpu"));
    add_row(rows, "driver", values_of(lines, "machine.driver"));
    add_row(rows, "clock", values_of(lines, "machine.clocks.sm"));
    add_row(rows, "power limit", values_of(lines, "machine.power_limit"));
  }
  add_row(rows, "copy", rate_words(lines, "bandwidth", "B/s"));
  add_row(rows, "read", rate_words(lines, "read_bandwidth", "B/s"));
  add_row(rows, "products bf16", rate_words(lines, "flops_bf16", "FLOP/s"));
  add_row(rows, "products f16", rate_words(lines, "flops_f16", "FLOP/s"));
  add_row(rows, "products f32", rate_words(lines, "flops_f32", "FLOP/s"));
  add_row(rows, "versions", versions_of(lines));
  add_row(rows, "commits", values_of(lines, "commit"));
  return fmt::format("<div class=card><h3>{}</h3><p>{} line{}</p><dl>\n{}</dl></div>\n",
                     escape_html(machine), lines.size(), lines.size() == 1 ? "" : "s", rows);
}

/// A stage's point: operations a byte, and what of them was reached; nothing without both.
bool add_point(const Line& line, Series& series) {
  const auto bytes = number_of(line.json, "bytes");
  const auto flops = number_of(line.json, "flops");
  const auto us = number_of(line.json, "median_us");
  if (!bytes || !flops || !us || !(*bytes > 0) || !(*flops > 0) || !(*us > 0)) return false;
  const std::string note = fmt::format(
      "{} {} T {}", line.section,
      text_of(line.json, "case.name") == line.section ? "" : text_of(line.json, "case.name"),
      number_of(line.json, "case.T").value_or(0));
  series.points.push_back({.x = *flops / *bytes, .y = *flops / *us * 1e-6, .note = note});
  return true;
}

/// A roof from the left end to the right end, with its corner: what memory feeds, then the
/// products.
Series roof_of(const std::string& name, double bytes_per_s, double flops_per_s, double left,
               double right) {
  const double corner = flops_per_s / bytes_per_s;
  Series roof{.name = name, .mark = Mark::kRoof};
  left = std::min(left, corner / 4);
  right = std::max(right, corner * 4);
  roof.points = {{.x = left, .y = left * bytes_per_s * 1e-12},
                 {.x = corner, .y = flops_per_s * 1e-12},
                 {.x = right, .y = flops_per_s * 1e-12}};
  return roof;
}

std::string roofline_of(const std::string& machine, const LineList& lines) {
  // Lines over several GPUs count what all of them did; rates are of one.
  const double ranks = std::max(1.0, parse_real(machine.substr(0, machine.find(' '))).value_or(1));
  const double bandwidth =
      ranks * std::max(rate_of(lines, "bandwidth"), rate_of(lines, "read_bandwidth"));
  if (!(bandwidth > 0)) return "";
  std::map<std::string, Series> stages;
  std::set<std::string> types;
  for (const Line* line : lines) {
    Series& series = stages[text_of(line->json, "stage")];
    if (add_point(*line, series)) types.insert(text_of(line->json, "case.compute"));
  }
  double left = HUGE_VAL;
  double right = 0;
  Plot plot{.title = machine, .x = {"operations per byte"}, .y = {"TFLOP/s"}};
  for (auto& [stage, series] : stages) {
    for (const Point& point : series.points) {
      left = std::min(left, point.x);
      right = std::max(right, point.x);
    }
    series.name = stage;
    series.mark = Mark::kDots;
    if (!series.points.empty()) plot.series.push_back(std::move(series));
  }
  if (plot.series.empty()) return "";
  for (const char* type : {"bf16", "f16", "f32"}) {
    const double flops = ranks * rate_of(lines, std::string("flops_") + type);
    if (flops > 0 && (types.contains(type) || types.contains(""))) {
      plot.series.push_back(roof_of(fmt::format("roof {}", type), bandwidth, flops, left, right));
    }
  }
  return figure_of(plot);
}

}  // namespace

std::string machines_of(const Lines& lines) {
  std::string html =
      "<section id=machines><h2>Machines</h2>\n<p>Rates are those measured beside "
      "the lines (the median of the runs), not those of a data sheet.</p>\n"
      "<div class=grid>\n";
  for (const auto& [machine, of] : by_machine(lines)) html += card_of(machine, of);
  return html + "</div></section>\n";
}

std::string rooflines_of(const Lines& lines) {
  std::string figures;
  for (const auto& [machine, of] : by_machine(lines)) figures += roofline_of(machine, of);
  if (figures.empty()) return "";
  return "<section id=roofline><h2>Roofline</h2>\n<p>Each point is a stage of a case: to the right "
         "are those that do more operations with each byte, higher is faster. Nothing can be above "
         "the roof for long: on its slope memory is what limits, on its flat part the products "
         "are. Point at one to see its case, drag to zoom, double click for all.</p>\n"
         "<div class=grid>" +
         figures + "</div></section>\n";
}

}  // namespace switchyard::tool
