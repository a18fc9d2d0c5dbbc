// A study as a page.
#include "tool/report/study_page.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <functional>

#include "core/human.hpp"
#include "tool/report/page.hpp"
#include "tool/report/plots.hpp"
#include "tool/report/table.hpp"
#include "tool/report/values.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;
using Rows = std::vector<std::vector<std::string>>;

std::string number_at(const json& of, const char* path, const char* format) {
  const auto value = number_of(of, path);
  return value ? fmt::format(fmt::runtime(format), *value) : "";
}

/// "1.2345 to 1.3456"; "" for one without width.
std::string interval_at(const json& of, const std::string& path, const char* format) {
  const auto low = number_of(of, path + "low");
  const auto high = number_of(of, path + "high");
  if (!low || !high || *low == *high) return "";
  return fmt::format(fmt::runtime(format), *low) + " to " +
         fmt::format(fmt::runtime(format), *high);
}

const json& arms_of(const json& document) { return document.at("arms"); }

std::string tile(const std::string& figure, const std::string& words) {
  return fmt::format("<div><b>{}</b>{}</div>", escape_html(figure), escape_html(words));
}

std::string overview_of(const json& document) {
  const std::size_t seeds = document.at("seeds").size();
  std::string html = "<section id=overview>\n<div class=tiles>";
  html += tile(fmt::format("{}", arms_of(document).size()), "arms");
  html += tile(fmt::format("{}", seeds), seeds == 1 ? "seed" : "seeds");
  html += tile(human_count(number_of(document, "tokens").value_or(0), ""), "bytes a run");
  html += tile(number_at(document, "runs.finished", "{:.0f}"),
               flag_of(document, "runs.whole") ? "runs, all of them" : "runs, not all of them yet");
  html += "</div>\n<h3>What may be said</h3>\n<ul>";
  for (const json& sentence : document.at("sentences")) {
    html += fmt::format("<li>{}\n", escape_html(shown(sentence)));
  }
  return html + "</ul></section>\n";
}

/// "hash", "top-2 (reference)".
std::string name_of(const json& document, const json& arm) {
  const std::string name = text_of(arm, "name");
  return name + (name == text_of(document, "reference") ? " (reference)" : "");
}

std::string leak_words(const json& arm) {
  const json* leaks = member_of(arm, "leaks");
  if (leaks == nullptr || leaks->empty()) return "";
  const bool any = std::any_of(leaks->begin(), leaks->end(), [](const json& change) {
    return change.is_number() && change.get<double>() > 0;
  });
  return any ? "leaks" : "holds";
}

/// Operations a token of the reference; 0: there are none.
double reference_operations(const json& document) {
  for (const json& arm : arms_of(document)) {
    if (text_of(arm, "name") == text_of(document, "reference")) {
      return number_of(arm, "executed").value_or(0);
    }
  }
  return 0;
}

std::string tokens_table(const json& document) {
  const double reference = reference_operations(document);
  Rows rows;
  for (const json& arm : arms_of(document)) {
    const double executed = number_of(arm, "executed").value_or(0);
    rows.push_back(
        {name_of(document, arm),
         number_at(arm, "loss.mean", "{:.4f}"),
         interval_at(arm, "loss.", "{:.4f}"),
         number_at(arm, "loss.deviation", "{:.4f}"),
         number_at(arm, "difference.mean", "{:.4f}"),
         interval_at(arm, "difference.", "{:.4f}"),
         number_at(arm, "difference.holm", "{:.2g}"),
         number_at(arm, "difference.smallest", "{:.2g}"),
         interval_at(arm, "difference.text_", "{:.4f}"),
         text_of(arm, "difference.verdict"),
         fmt::format("{} of {}", arm.at("diverged").size(), number_at(arm, "n", "{:.0f}")),
         leak_words(arm),
         human_count(number_of(arm, "parameters").value_or(0), ""),
         reference > 0 ? fmt::format("{:.3f}", executed / reference) : "",
         number_at(arm, "tokens_per_s", "{:.0f}"),
         number_at(arm, "accuracy", "{:.3f}"),
         number_at(arm, "load_cv", "{:.3f}"),
         number_at(arm, "max_vio", "{:.3f}"),
         number_at(arm, "information.trained", "{:.3f}"),
         number_at(arm, "information.untrained", "{:.3f}"),
         number_at(arm, "information.null", "{:.3f}"),
         number_at(arm, "dropped", "{:.4f}"),
         number_at(arm, "uniform_dropped", "{:.4f}"),
         number_at(arm, "at_capacity.dropped", "{:.4f}"),
         number_at(arm, "at_capacity.loss", "{:.4f}")});
  }
  return plain_table({"arm",
                      "loss",
                      "95% interval",
                      "sd",
                      "against the reference",
                      "95% interval",
                      "Holm's p",
                      "would be found",
                      "by blocks of the text",
                      "verdict",
                      "diverged",
                      "leak audit",
                      "parameters",
                      "operations",
                      "tokens/s",
                      "accuracy",
                      "load CV",
                      "MaxVio",
                      "information",
                      "of untrained routers",
                      "of permuted tokens",
                      "dropped",
                      "uniform loads would",
                      "dropped at capacity",
                      "loss at capacity"},
                     rows);
}

std::string time_table(const json& document) {
  Rows rows;
  for (const json& arm : arms_of(document)) {
    const bool is_reference = text_of(arm, "name") == text_of(document, "reference");
    const std::string of = is_reference ? "" : "time.";
    if (!is_reference && !number_of(arm, "time.n")) continue;
    rows.push_back({name_of(document, arm),
                    is_reference ? number_at(document, "steps", "{:.0f}")
                                 : number_at(arm, "time.steps", "{:.0f}"),
                    number_at(arm, (of + "seconds").c_str(), "{:.1f}"),
                    number_at(arm, (of + "loss.mean").c_str(), "{:.4f}"),
                    interval_at(arm, of + "loss.", "{:.4f}"), number_at(arm, "time.mean", "{:.4f}"),
                    interval_at(arm, "time.", "{:.4f}"), number_at(arm, "time.holm", "{:.2g}"),
                    number_at(arm, "time.smallest", "{:.2g}"), text_of(arm, "time.verdict")});
  }
  if (rows.size() < 2) return "";
  return "<h3>At equal time</h3>\n<p>Each arm once more, for as many steps as it does while the "
         "reference does its own; learning rates end as they do there.</p>\n" +
         plain_table({"arm", "steps", "seconds", "loss", "95% interval", "against the reference",
                      "95% interval", "Holm's p", "would be found", "verdict"},
                     rows);
}

/// Arms as lines over what a point of their curves gives.
using Get = std::function<std::optional<double>(const json& arm, const json& point)>;

std::string curves_of(const json& document, const std::string& title, const std::string& x_label,
                      const Get& x, const std::string& y_label, const char* y, bool band) {
  Plot plot{.title = title, .x = {x_label, false}, .y = {y_label, false}};
  for (const json& arm : arms_of(document)) {
    Series series{.name = text_of(arm, "name")};
    for (const json& point : arm.at("curve")) {
      const auto at = x(arm, point);
      const auto value = number_of(point, y);
      if (!at || !value) continue;
      Point out{.x = *at, .y = *value};
      const auto low = number_of(point, "low");
      const auto high = number_of(point, "high");
      if (band && low && high && *low < *high) {
        out.low = *low;
        out.high = *high;
      }
      series.points.push_back(std::move(out));
    }
    plot.series.push_back(std::move(series));
  }
  return figure_of(plot);
}

/// Loss against what it takes: an arm is a point with its 95% interval.
std::string trade_of(const json& document, const char* takes, double unit, const char* title,
                     const char* label) {
  Plot plot{
      .title = title, .x = {label, false}, .y = {"held out, nats a byte", false}, .series = {}};
  std::vector<Series> means;
  for (const json& arm : arms_of(document)) {
    const auto x = number_of(arm, takes);
    const auto mean = number_of(arm, "loss.mean");
    if (!x || !mean || leak_words(arm) == "leaks") continue;
    const double at = *x * unit;
    const double low = number_of(arm, "loss.low").value_or(*mean);
    const double high = number_of(arm, "loss.high").value_or(*mean);
    const std::string interval = fmt::format("95% interval {:.4f} to {:.4f}", low, high);
    plot.series.push_back({.name = text_of(arm, "name"),
                           .points = {{.x = at, .y = low, .note = interval},
                                      {.x = at, .y = *mean, .note = interval},
                                      {.x = at, .y = high, .note = interval}}});
    means.push_back({.points = {{.x = at, .y = *mean}}});
  }
  if (means.size() < 2) return "";
  plot.series.push_back(frontier_of(means, false));
  return figure_of(plot);
}

/// Arms of other sizes beside each other are to be seen by them.
bool sizes_differ(const json& document) {
  std::vector<double> sizes;
  for (const json& arm : arms_of(document)) {
    if (const auto size = number_of(arm, "parameters")) sizes.push_back(*size);
  }
  const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
  return !sizes.empty() && *most > 1.1 * *least;
}

std::string trades_of(const json& document) {
  const double reference = reference_operations(document);
  std::string html;
  if (reference > 0) {
    html += trade_of(document, "executed", 1 / reference, "Loss against operations",
                     "operations a token, over the reference's");
  }
  if (sizes_differ(document)) {
    html +=
        trade_of(document, "parameters", 1e-6, "Loss against parameters", "millions, all of them");
  }
  html += trade_of(document, "seconds", 1, "Loss against time of training", "seconds a run");
  if (html.empty()) return "";
  return "<section id=trades><h2>What is paid for what</h2>\n<p>Means over the seeds with their "
         "95% "
         "intervals, arms that leak left out; the line joins the means that no other is better "
         "than. Seconds of runs that shared a machine are no claim.</p>\n<div class=grid>" +
         html + "</div></section>\n";
}

std::string figures_of(const json& document) {
  const double steps = number_of(document, "steps").value_or(1);
  const double tokens = number_of(document, "tokens").value_or(0) / steps;
  const Get step = [](const json&, const json& point) { return number_of(point, "step"); };
  const Get seconds = [](const json&, const json& point) { return number_of(point, "seconds"); };
  const Get operations = [&](const json& arm, const json& point) -> std::optional<double> {
    const auto executed = number_of(arm, "executed");
    const auto at = number_of(point, "step");
    if (!executed || !at) return std::nullopt;
    return *executed * *at * tokens * 1e-12;
  };
  const char* const loss = "held out, nats a byte";
  std::string html = curves_of(document, "Loss over steps, with 95% intervals of the mean", "steps",
                               step, loss, "mean", true) +
                     curves_of(document, "Loss at equal operations", "TFLOP executed", operations,
                               loss, "mean", false) +
                     curves_of(document, "Loss at equal time of training", "seconds", seconds, loss,
                               "mean", false) +
                     curves_of(document, "Load CV over steps", "steps", step, "deviation / mean",
                               "load_cv", false) +
                     curves_of(document, "MaxVio over steps", "steps", step, "largest / mean - 1",
                               "max_vio", false) +
                     curves_of(document, "What a token tells of its experts", "steps", step,
                               "information, nats", "information", false) +
                     curves_of(document, "Dropped over steps", "steps", step,
                               "share of assignments", "dropped", false);
  if (html.empty()) return "";
  return "<section id=curves><h2>Over steps</h2>\n<p>Means over the seeds, on all of the held-out "
         "text. A learning rate that is still high makes a loss on the way worse than that of a "
         "shorter run which has ended there; the tables have ends only.</p>\n<div class=grid>" +
         html + "</div></section>\n";
}

std::string rates_of(const json& document) {
  Rows rows;
  for (const json& arm : arms_of(document)) {
    std::string tried;
    for (const json& rate : arm.at("rates")) {
      tried += fmt::format(
          "{}{:g}: {}", tried.empty() ? "" : ", ", rate.at(0).get<double>(),
          rate.at(1).is_number() ? fmt::format("{:.4f}", rate[1].get<double>()) : "diverged");
    }
    rows.push_back({name_of(document, arm), number_at(arm, "rate", "{:.4g}"), tried,
                    number_at(arm, "below", "{:.4f}"), number_at(arm, "above", "{:.4f}"),
                    flag_of(arm, "edge") && arm.at("rates").size() > 1 ? "at the edge" : ""});
  }
  return "<section id=rates><h2>Learning rates</h2>\n<p>Tuned on a seed that no claim uses, the "
         "same "
         "rates and steps for all. What the neighbours of the best lose says how much an arm "
         "depends "
         "on its rate.</p>\n" +
         plain_table({"arm", "rate", "tried", "one below", "one above", ""}, rows) + "</section>\n";
}

std::string leaks_of(const json& document) {
  Rows rows;
  for (const json& arm : arms_of(document)) {
    rows.push_back({name_of(document, arm), text_of(arm, "router"),
                    arm.at("causal").is_boolean() ? (flag_of(arm, "causal") ? "yes" : "no") : "",
                    number_at(arm, "leaks.later tokens", "{:.3g}"),
                    number_at(arm, "leaks.other sequences", "{:.3g}")});
  }
  return "<section id=leaks><h2>Leaks</h2>\n<p>The largest change of a logit where later tokens of "
         "its sequence, or all other sequences, were replaced, at three positions and over all "
         "seeds; "
         "0: the same bits. An arm that leaks enters no comparison.</p>\n" +
         plain_table({"arm", "router", "causal by its rule", "later tokens", "other sequences"},
                     rows) +
         "</section>\n";
}

std::string floors_of(const json& document) {
  Rows rows;
  const json& floors = document.at("floors");
  for (std::size_t i = 0; i < floors.size(); ++i) {
    rows.push_back({fmt::format("{}", i + 1), fmt::format("{:.4f}", floors[i].get<double>())});
  }
  const std::string begin =
      "<section id=floors><h2>Floors</h2>\n<p>What byte n-grams (Witten-Bell), counted in the same "
      "text, lose on what is held out";
  if (rows.empty()) return begin + ": not counted, the study was interrupted.</p></section>\n";
  return begin + ".</p>\n" + plain_table({"order", "nats a byte"}, rows) + "</section>\n";
}

std::string made_by(const json& document) {
  Rows rows;
  for (const auto& [path, value] : leaves_of(document)) {
    const bool is_shown = path == "commit" || path.starts_with("machine.") ||
                          path.starts_with("versions.") || path.starts_with("text.") ||
                          path.starts_with("valid.") || path.starts_with("tuning.") ||
                          path.starts_with("estimate.") || path == "steps";
    if (is_shown) rows.push_back({path, shown(value)});
  }
  for (const json& arm : arms_of(document)) {
    rows.push_back({text_of(arm, "name"), text_of(arm, "model")});
  }
  return "<section id=made><h2>Made by</h2>\n" +
         folded("machine, versions, text, models", plain_table({"what", "value"}, rows), false) +
         "</section>\n";
}

}  // namespace

std::string study_page(const json& document) {
  const std::string name = text_of(document, "study");
  std::string main = overview_of(document);
  main +=
      "<section id=arms><h2>Arms</h2>\n<h3>At equal tokens</h3>\n<p>The last step's models, nats "
      "a byte of the held-out text. \"Would be found\": the smallest difference that Holm's first "
      "step finds four times in five. Operations: executed a token, over the reference's. "
      "Information: of a token about its experts, nats, less the estimate's bias, mean over the "
      "layers. Dropped: of the last steps of training; \"uniform loads would\" is the closed form; "
      "\"at capacity\": of the held-out text, which comes document by document.</p>\n" +
      tokens_table(document) + time_table(document) + "</section>\n";
  main += trades_of(document) + figures_of(document) + rates_of(document) + leaks_of(document) +
          floors_of(document) + made_by(document);
  return page_around(
      "Switchyard: study " + name, text_of(document, "what"),
      "<a href='#overview'>Overview</a><a href='#arms'>Arms</a><a href='#trades'>Trades</a>"
      "<a href='#curves'>Over steps</a>"
      "<a href='#rates'>Learning rates</a><a href='#leaks'>Leaks</a><a href='#floors'>Floors</a>"
      "<a href='#made'>Made by</a>",
      main);
}

}  // namespace switchyard::tool
