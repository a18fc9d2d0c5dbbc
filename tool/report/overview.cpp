// The page's first screen: what was measured, where, and how close it came.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "tool/options/words.hpp"
#include "tool/report/sections.hpp"
#include "tool/report/values.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

std::string tile(const std::string& figure, const std::string& words) {
  return fmt::format("<div><b>{}</b>{}</div>", escape_html(figure), escape_html(words));
}

std::string plural(std::size_t count, const char* word) {
  return fmt::format("{}{}", word, count == 1 ? "" : "s");
}

/// Shares of the limit, by machine and stage.
using Shares = std::map<std::string, std::map<std::string, std::vector<double>>>;

Shares shares_of(const Lines& lines) {
  Shares shares;
  for (const Line& line : lines.lines) {
    const auto share = number_of(line.json, "share");
    const std::string stage = text_of(line.json, "stage");
    const std::string by = text_of(line.json, "limit_by");
    if (!share || !(*share > 0) || stage.empty() ||
        (by != "memory" && by != "compute" && by != "wire"))
      continue;
    shares[line.machine][stage].push_back(*share);
  }
  return shares;
}

/// From the least to the most, with a mark at the median; the scale ends at 120%.
std::string range_row(const std::string& stage, std::vector<double> shares) {
  constexpr double kEnd = 1.2;
  std::sort(shares.begin(), shares.end());
  const double median = shares[shares.size() / 2];
  const auto at = [&](double share) { return std::min(share, kEnd) / kEnd * 100; };
  return fmt::format(
      "<div class=range><span>{}</span><div><i class=full style='left:{:.1f}%'></i>"
      "<i class=span style='left:{:.1f}%;width:{:.1f}%'></i><i class=mid style='left:{:.1f}%'></i>"
      "</div><span>{:.0f}% <small>of {}</small></span></div>\n",
      escape_html(stage), at(1), at(shares.front()), at(shares.back()) - at(shares.front()),
      at(median), 100 * median, shares.size());
}

/// Machines with the most lines first; the others behind a line that opens them.
std::string closeness_of(const Lines& lines) {
  std::vector<std::pair<std::string, std::string>> figures;
  std::vector<std::size_t> sizes;
  for (const auto& [machine, stages] : shares_of(lines)) {
    std::string rows;
    std::size_t size = 0;
    for (const auto& [stage, shares] : stages) {
      rows += range_row(stage, shares);
      size += shares.size();
    }
    const auto place =
        std::find_if(sizes.begin(), sizes.end(), [&](std::size_t other) { return other < size; });
    figures.insert(figures.begin() + (place - sizes.begin()),
                   {machine, fmt::format("<figure class=ranges><figcaption>{}</figcaption>\n{}"
                                         "</figure>\n",
                                         escape_html(machine), rows)});
    sizes.insert(place, size);
  }
  if (figures.empty()) return "";
  std::string html =
      "<h3>How close each stage came to the machine</h3>\n<p>The limit of a stage is the time that "
      "its bytes or its products take at the rates measured on that machine in the same run. A bar "
      "goes from the worst to the best case, the mark is the median; the thin line is the limit. "
      "Caches can lift a case above it.</p>\n<div class=grid>";
  for (std::size_t i = 0; i < figures.size() && i < 2; ++i) html += figures[i].second;
  html += "</div>\n";
  if (figures.size() > 2) {
    std::string rest = "<div class=grid>";
    for (std::size_t i = 2; i < figures.size(); ++i) rest += figures[i].second;
    html += folded(fmt::format("{} more machines", figures.size() - 2), rest + "</div>\n", false);
  }
  return html;
}

std::string contents_of(const std::vector<Suite>& suites) {
  std::string html = "<h3>What was measured</h3>\n<ul class=contents>";
  for (std::size_t i = 0; i < suites.size(); ++i) {
    html += fmt::format("<li><a href='#s{}'>{}</a> <small>{} line{}, {}</small>\n", i,
                        escape_html(suites[i].name), suites[i].lines.size(),
                        suites[i].lines.size() == 1 ? "" : "s", escape_html(suites[i].machine));
  }
  return html + "</ul>\n";
}

}  // namespace

std::string overview_of(const Lines& lines, const std::vector<Suite>& suites) {
  std::set<std::string> machines;
  std::set<std::string> days;
  for (const Line& line : lines.lines) {
    machines.insert(line.machine);
    const std::string day = text_of(line.json, "time").substr(0, 10);
    if (!day.empty()) days.insert(day);
  }
  std::string html = "<section id=overview>\n<div class=tiles>";
  html += tile(fmt::format("{}", lines.lines.size()), plural(lines.lines.size(), "line"));
  html += tile(fmt::format("{}", suites.size()), plural(suites.size(), "suite"));
  html += tile(fmt::format("{}", machines.size()), plural(machines.size(), "machine"));
  if (const BarCount bars = count_bars(lines); bars.all > 0) {
    html += tile(fmt::format("{} of {}", bars.held, bars.all), "answers of bars hold");
  }
  if (!days.empty()) {
    html += tile(*days.rbegin(), days.size() > 1 ? "newest, since " + *days.begin() : "measured");
  }
  html += "</div>\n";
  return html + closeness_of(lines) + contents_of(suites) + "</section>\n";
}

}  // namespace switchyard::tool
