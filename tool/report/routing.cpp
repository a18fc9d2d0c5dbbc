// Where tokens go: loads of the experts, tokens x experts, and a text in its experts' colours.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "tool/report/sections.hpp"
#include "tool/report/values.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr std::size_t kMostExperts = 256;
constexpr std::size_t kMostTokens = 96;   // of a heat map
constexpr std::size_t kMostWords = 2000;  // of a text
constexpr std::size_t kMostKinds = 24;
constexpr std::size_t kMostPairs = 64;

/// One layer's routing as a line has it; what is no list of the right kind counts as not there.
struct Routing {
  std::string title{};
  std::vector<double> counts{};                     ///< [E], before dropping.
  std::vector<std::vector<std::size_t>> choices{};  ///< [T][<= K].
  std::vector<std::string> text{};                  ///< [T] or none.
  std::vector<std::string> kinds{};                 ///< [T] or none.
  std::vector<std::vector<double>> pairs{};         ///< [E][E]: how often experts meet, or none.
  Leaves figures{};
};

const json* list_at(const json& object, const char* name) {
  const json* list = member_of(object, name);
  return list != nullptr && list->is_array() ? list : nullptr;
}

std::vector<std::string> texts_at(const json& object, const char* name) {
  std::vector<std::string> texts;
  const json* list = list_at(object, name);
  if (list == nullptr) return texts;
  for (const json& value : *list) {
    if (texts.size() == kMostWords) break;
    texts.push_back(shown(value));
  }
  return texts;
}

/// Of a token without a kind: what its first byte that is no space is.
std::string kind_of(const std::string& token) {
  for (const char c : token) {
    if (c == ' ') continue;
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return "letters";
    if (c >= '0' && c <= '9') return "digits";
    if (c == '\n' || c == '\t' || c == '\r') return "white space";
    return c == '\\' || static_cast<unsigned char>(c) >= 0x80 ? "other bytes" : "punctuation";
  }
  return "white space";
}

std::optional<Routing> routing_in(const json& object) {
  Routing routing;
  const json* counts = list_at(object, "counts");
  if (counts == nullptr) return std::nullopt;
  for (const json& count : *counts) {
    const double load = count.is_number() ? count.get<double>() : -1;
    if (!(load >= 0) || !std::isfinite(load)) return std::nullopt;
    routing.counts.push_back(load);
  }
  if (routing.counts.empty()) return std::nullopt;
  if (const json* choices = list_at(object, "choices")) {
    for (const json& token : *choices) {
      if (routing.choices.size() == kMostWords) break;
      std::vector<std::size_t>& chosen = routing.choices.emplace_back();
      if (!token.is_array()) continue;
      for (const json& expert : token) {
        if (expert.is_number_unsigned() && expert.get<std::size_t>() < routing.counts.size()) {
          chosen.push_back(expert.get<std::size_t>());
        }
      }
    }
  }
  routing.text = texts_at(object, "text");
  routing.kinds = texts_at(object, "kinds");
  if (routing.kinds.empty()) {
    for (const std::string& token : routing.text) routing.kinds.push_back(kind_of(token));
  }
  if (const json* pairs = list_at(object, "coactivation")) {
    for (const json& row : *pairs) {
      std::vector<double>& shares = routing.pairs.emplace_back();
      if (!row.is_array()) continue;
      for (const json& value : row) {
        shares.push_back(value.is_number() ? value.get<double>() : 0);
      }
    }
  }
  for (auto& [name, value] : leaves_of(object)) {
    if (value.is_number()) routing.figures.emplace_back(name, std::move(value));
  }
  return routing;
}

/// A cell as dark as its share; an empty one for nothing.
std::string heat_cell(double share, const std::string& words) {
  if (!(share > 0)) return "<td>";
  return fmt::format("<td style='--v:{:.2f}' title='{}'>", std::min(1.0, share),
                     escape_html(words));
}

std::string load_bars(const Routing& routing) {
  const std::size_t experts = std::min(routing.counts.size(), kMostExperts);
  double sum = 0;
  for (const double count : routing.counts) sum += count;
  const double most = *std::max_element(routing.counts.begin(), routing.counts.end());
  const double mean = sum / static_cast<double>(routing.counts.size());
  if (!(most > 0) || !std::isfinite(sum)) return "";
  std::string bars;
  for (std::size_t e = 0; e < experts; ++e) {
    bars += fmt::format("<i style='height:{:.1f}%' title='expert {}: {}'></i>",
                        100 * routing.counts[e] / most, e, shown(routing.counts[e]));
  }
  return fmt::format(
      "<figure class=loads><figcaption>Load of each expert, before dropping; the line is the mean, "
      "{}, the tallest is {}</figcaption><div><b style='bottom:{:.1f}%'></b>{}</div>"
      "<p class=ends><span>expert 0</span><span>expert {}</span></p></figure>\n",
      shown(mean), shown(most), 100 * mean / most, bars, experts - 1);
}

std::string token_map(const Routing& routing) {
  const std::size_t tokens = std::min(routing.choices.size(), kMostTokens);
  const std::size_t experts = std::min(routing.counts.size(), kMostExperts);
  if (tokens == 0) return "";
  std::string rows;
  for (std::size_t t = 0; t < tokens; ++t) {
    std::vector<double> shares(experts, 0);
    for (std::size_t k = 0; k < routing.choices[t].size(); ++k) {
      const std::size_t e = routing.choices[t][k];
      if (e < experts) shares[e] = 1 - 0.7 * static_cast<double>(k) / 8;
    }
    const std::string name = t < routing.text.size() ? routing.text[t] : fmt::format("{}", t);
    rows += fmt::format("<tr><th>{}", escape_html(name));
    for (std::size_t e = 0; e < experts; ++e) {
      rows += heat_cell(shares[e], fmt::format("{}: expert {}", name, e));
    }
    rows += "\n";
  }
  return fmt::format(
      "<figure><figcaption>Tokens (down) x experts (across): the darkest is the first choice; {} "
      "of "
      "{} tokens</figcaption><div class=scroll><table class=heat><tbody>\n{}</table></div>"
      "</figure>\n",
      tokens, routing.choices.size(), rows);
}

std::string coloured_text(const Routing& routing) {
  const std::size_t tokens = std::min(routing.choices.size(), routing.text.size());
  if (tokens == 0) return "";
  std::string words;
  for (std::size_t t = 0; t < tokens; ++t) {
    if (routing.choices[t].empty()) {
      words += fmt::format("<span title='no expert'>{}</span>", escape_html(routing.text[t]));
      continue;
    }
    const std::size_t expert = routing.choices[t].front();
    words += fmt::format("<span style='--h:{:.0f}' title='expert {}'>{}</span>",
                         std::fmod(static_cast<double>(expert) * 137.508, 360), expert,
                         escape_html(routing.text[t]));
  }
  return "<figure><figcaption>The text, each token in the colour of its first expert</figcaption>"
         "<p class=tokens>" +
         words + "</p></figure>\n";
}

std::string kinds_map(const Routing& routing) {
  const std::size_t tokens = std::min(routing.choices.size(), routing.kinds.size());
  const std::size_t experts = std::min(routing.counts.size(), kMostExperts);
  std::map<std::string, std::vector<double>> counts;
  for (std::size_t t = 0; t < tokens; ++t) {
    auto place = counts.find(routing.kinds[t]);
    if (place == counts.end()) {
      if (counts.size() == kMostKinds) continue;
      place = counts.emplace(routing.kinds[t], std::vector<double>(experts, 0)).first;
    }
    for (const std::size_t e : routing.choices[t]) {
      if (e < experts) place->second[e] += 1;
    }
  }
  if (counts.empty()) return "";
  std::string rows;
  for (const auto& [kind, loads] : counts) {
    double sum = 0;
    for (const double load : loads) sum += load;
    const double most = *std::max_element(loads.begin(), loads.end());
    rows += fmt::format("<tr><th>{}", escape_html(kind));
    for (std::size_t e = 0; e < experts; ++e) {
      rows += heat_cell(
          most > 0 ? loads[e] / most : 0,
          fmt::format("{}: {:.1f}% to expert {}", kind, sum > 0 ? 100 * loads[e] / sum : 0, e));
    }
    rows += "\n";
  }
  return "<figure><figcaption>Shares by kind of token (down) x experts (across), each row as dark "
         "as "
         "its largest share</figcaption><div class=scroll><table class=heat><tbody>\n" +
         rows + "</table></div></figure>\n";
}

/// How often the experts across are chosen by tokens of the expert down.
std::string pairs_map(const Routing& routing) {
  const std::size_t experts = std::min(routing.pairs.size(), kMostPairs);
  double most = 0;
  for (std::size_t e = 0; e < experts; ++e) {
    for (std::size_t other = 0; other < std::min(experts, routing.pairs[e].size()); ++other) {
      if (other != e) most = std::max(most, routing.pairs[e][other]);
    }
  }
  if (!(most > 0) || !std::isfinite(most)) return "";
  std::string rows;
  for (std::size_t e = 0; e < experts; ++e) {
    rows += fmt::format("<tr><th>{}", e);
    for (std::size_t other = 0; other < std::min(experts, routing.pairs[e].size()); ++other) {
      const double share = routing.pairs[e][other];
      rows += e == other
                  ? "<td>"
                  : heat_cell(share / most, fmt::format("{} with {}: {}", e, other, shown(share)));
    }
    rows += "\n";
  }
  return "<figure><figcaption>Experts (across) that the tokens of an expert (down) chose too"
         "</figcaption><div class=scroll><table class=heat><tbody>\n" +
         rows + "</table></div></figure>\n";
}

std::string figures_of(const Routing& routing) {
  std::string rows;
  for (const auto& [name, value] : routing.figures) {
    rows += fmt::format("<dt>{}<dd>{}\n", escape_html(title_of(name)), escape_html(shown(value)));
  }
  return rows.empty() ? "" : "<dl class=figures>\n" + rows + "</dl>\n";
}

std::string part_of(const Routing& routing) {
  return fmt::format("<div class=routing><h3>{}</h3>\n{}{}{}{}{}{}</div>\n",
                     escape_html(routing.title), load_bars(routing), figures_of(routing),
                     kinds_map(routing), coloured_text(routing), token_map(routing),
                     pairs_map(routing));
}

}  // namespace

std::string routing_of(const Lines& lines) {
  std::string html;
  for (const Line& line : lines.lines) {
    const json* member = member_of(line.json, "routing");
    if (member == nullptr) continue;
    const bool several = member->is_array();
    for (std::size_t i = 0; i < (several ? member->size() : 1); ++i) {
      auto routing = routing_in(several ? (*member)[i] : *member);
      if (!routing) continue;
      const std::string name = text_of(line.json, "case.name");
      routing->title = fmt::format("{}{} on {}", name.empty() ? line.section : name,
                                   several ? fmt::format(", layer {}", i) : "", line.machine);
      html += part_of(*routing);
    }
  }
  if (html.empty()) return "";
  return "<section id=routing><h2>Where tokens go</h2>\n" + html + "</section>\n";
}

}  // namespace switchyard::tool
