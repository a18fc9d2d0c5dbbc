#include "tool/report/suites.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "tool/report/suite_plots.hpp"
#include "tool/report/values.hpp"

namespace switchyard::tool {
namespace {

/// "eager" is the round trip in another way.
constexpr std::array<std::string_view, 8> kWholes = {
    "layer", "round_trip", "barrier_to_barrier", "eager",
    "load",  "exchange",   "dispatch+combine",   "experts_backward.backward"};

/// What a section's name stands for, where the name alone does not say it.
std::string_view words_of_suite(std::string_view name) {
  struct Entry {
    std::string_view name, words;
  };
  static constexpr Entry kWords[] = {
      {"all2all", "rows to the experts' ranks and back, on the shapes of a published exchange"},
      {"fixed-size", "the exchange whose messages all have the size of the largest"},
      {"device_exchange_bench", "dispatch and combine between GPUs by themselves"},
      {"streaming_bench", "experts of few tokens: every weight is read once"},
      {"middle_bench", "experts of a middle number of tokens"},
      {"stages_bench", "the stages around the experts by themselves"},
      {"grouped_gemm_bench", "the products of the experts by themselves"},
      {"torch_grouped_mm", "the same products by torch"},
      {"stages_torch", "the same stages by torch"},
      {"experts_backward_bench", "gradients of the experts by themselves"},
      {"transformers_gpu_beside", "blocks and models of transformers beside this library in them"},
      {"losses_bench", "auxiliary losses and the router's gradient"},
      {"routers_bench", "routers beside plain top-k, with their noise and their sums"},
      {"model_bench", "a training step of a small language model"},
      {"pack", "rows in the order of their experts, and back"},
      {"capacity", "what an expert capacity drops, beside the closed form"},
      {"routers", "what each router costs"},
      {"padding", "padded and compact layouts at a capacity, also for skewed loads"},
      {"strong-scaling", "the same work over more ranks"},
      {"weak-scaling", "the same work for each of more ranks"},
      {"topk", "scores of the experts and the choice among them"},
      {"fused-moe", "a layer of few tokens, plan and combine inside"}};
  const auto* const entry = std::find_if(std::begin(kWords), std::end(kWords),
                                         [&](const Entry& e) { return e.name == name; });
  return entry == std::end(kWords) ? "" : entry->words;
}

std::set<std::string> values_of(const LineList& lines, std::string_view path) {
  std::set<std::string> values;
  for (const Line* line : lines) {
    if (std::string text = text_of(line->json, path); !text.empty()) values.insert(std::move(text));
  }
  return values;
}

}  // namespace

bool is_whole_stage(const std::string& stage) {
  return std::find(kWholes.begin(), kWholes.end(), stage) != kWholes.end();
}

std::vector<Suite> suites_of(const Lines& lines) {
  std::map<std::string_view, std::size_t> first;  // line of a name
  std::map<std::pair<std::string_view, std::string_view>, std::size_t> places;
  std::vector<Suite> suites;
  for (std::size_t i = 0; i < lines.lines.size(); ++i) {
    const Line& line = lines.lines[i];
    first.try_emplace(line.section, i);
    const auto [place, fresh] = places.try_emplace({line.section, line.machine}, suites.size());
    if (fresh) suites.push_back({.name = line.section, .machine = line.machine});
    suites[place->second].lines.push_back(&line);
  }
  std::stable_sort(suites.begin(), suites.end(), [&](const Suite& a, const Suite& b) {
    return first.at(a.name) < first.at(b.name);
  });
  return suites;
}

std::vector<std::pair<std::string, LineList>> by_machine(const Lines& lines) {
  std::map<std::string_view, std::size_t> places;
  std::vector<std::pair<std::string, LineList>> machines;
  for (const Line& line : lines.lines) {
    const auto [place, fresh] = places.try_emplace(line.machine, machines.size());
    if (fresh) machines.push_back({line.machine, {}});
    machines[place->second].second.push_back(&line);
  }
  return machines;
}

std::string section_of(const Suite& suite, const std::string& id) {
  std::string html = fmt::format("<section class=suite id={}><h3>{} <small>on {}</small></h3>\n<p>",
                                 id, escape_html(suite.name), escape_html(suite.machine));
  if (const auto words = words_of_suite(suite.name); !words.empty()) {
    html += fmt::format("{}. ", words);
  }
  const std::set<std::string> commits = values_of(suite.lines, "commit");
  const std::set<std::string> times = values_of(suite.lines, "time");
  if (!commits.empty()) {
    html += fmt::format("Commit {}", escape_html(fmt::format("{}", fmt::join(commits, ", "))));
    if (!times.empty()) html += fmt::format(", {}", escape_html(times.rbegin()->substr(0, 10)));
    html += ".";
  }
  html += "</p>\n";
  if (const std::string plots = time_plots(suite); !plots.empty()) {
    html += "<div class=grid>" + plots + "</div>\n";
  }
  return html + stage_bars(suite) + table_of(suite.lines) + "</section>\n";
}

}  // namespace switchyard::tool
