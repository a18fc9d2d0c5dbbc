// Bars: what was asked for, what was reached.
#include <fmt/core.h>

#include <map>
#include <set>

#include "tool/report/sections.hpp"
#include "tool/report/values.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// One answer: a case says it in the line of each of its stages.
struct Answer {
  std::string words{}, value{}, target{}, verdict{}, machine{};
  bool holds = false;
  bool operator==(const Answer&) const = default;
};

struct BarAnswers {
  std::string name{};
  std::vector<Answer> answers{};
};

std::string shown_at(const json& line, std::string_view path) {
  const json* value = member_of(line, path);
  return value == nullptr ? "" : shown(*value);
}

std::vector<BarAnswers> answers_of(const Lines& lines) {
  std::map<std::string, LineList> bars;
  for (const Line& line : lines.lines) {
    const std::string name = text_of(line.json, "bar");
    const json* holds = member_of(line.json, "holds");
    if (!name.empty() && holds != nullptr && holds->is_boolean()) bars[name].push_back(&line);
  }
  std::vector<BarAnswers> all;
  for (const auto& [name, group] : bars) {
    std::vector<std::string> varying;
    for (std::string& member : varying_members(group)) {
      if (member.starts_with("case.") || member == "machine.isa")
        varying.push_back(std::move(member));
    }
    BarAnswers bar{.name = name};
    std::set<std::string> seen;
    for (const Line* line : group) {
      Answer answer{.words = words_of_line(*line, varying, {}),
                    .value = shown_at(line->json, "value"),
                    .target = shown_at(line->json, "target"),
                    .verdict = text_of(line->json, "verdict"),
                    .machine = line->machine,
                    .holds = flag_of(line->json, "holds")};
      if (answer.words.empty()) answer.words = text_of(line->json, "case.name");
      if (answer.value.empty()) answer.words += fmt::format(" {}", text_of(line->json, "stage"));
      if (seen.insert(answer.words + "\n" + answer.machine + "\n" + answer.value).second) {
        bar.answers.push_back(std::move(answer));
      }
    }
    all.push_back(std::move(bar));
  }
  return all;
}

std::string row_of(const Answer& answer) {
  return fmt::format("<tr><td class={}<td class=t>{}<td>{}<td>{}<td class=t>{}<td class=t>{}\n",
                     answer.holds ? "ok>holds" : "miss>MISS", escape_html(answer.words),
                     escape_html(answer.value), escape_html(answer.target),
                     escape_html(answer.machine), escape_html(answer.verdict));
}

std::string bar_of(const BarAnswers& bar) {
  std::string strip;
  std::string rows;
  std::size_t held = 0;
  for (const Answer& answer : bar.answers) {
    held += answer.holds ? 1 : 0;
    strip += answer.holds ? "<i class=ok></i>" : "<i class=miss></i>";
    rows += row_of(answer);
  }
  return fmt::format(
      "<details class=verdict><summary><b>{}</b><span>{} of {} hold</span><span class=strip>{}"
      "</span></summary><div class=scroll><table><thead><tr><th>answer<th>case<th>value<th>bar"
      "<th>machine<th>in words<tbody>\n{}</table></div></details>\n",
      escape_html(bar.name), held, bar.answers.size(), strip, rows);
}

}  // namespace

BarCount count_bars(const Lines& lines) {
  BarCount count;
  for (const BarAnswers& bar : answers_of(lines)) {
    for (const Answer& answer : bar.answers) count.held += answer.holds ? 1 : 0;
    count.all += bar.answers.size();
  }
  return count;
}

std::string bars_of(const Lines& lines) {
  std::string html;
  for (const BarAnswers& bar : answers_of(lines)) html += bar_of(bar);
  if (html.empty()) return "";
  return "<section id=bars><h2>Bars</h2>\n<p>A bar is a figure that was wanted before it was "
         "measured. A square is an answer, filled where it holds; open a row for the "
         "values.</p>\n" +
         html + "</section>\n";
}

}  // namespace switchyard::tool
