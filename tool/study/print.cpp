// The findings of a study on a terminal.
#include <fmt/core.h>

#include <algorithm>

#include "core/human.hpp"
#include "tool/study/findings.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

std::string number_or(const json& value, const char* format) {
  return value.is_number() ? fmt::format(fmt::runtime(format), value.get<double>()) : "-";
}

/// "-" where there is none, or one without width.
std::string interval_of(const json& of) {
  if (!of.is_object() || of["low"] == of["high"]) return "-";
  return fmt::format("{:.4f} to {:.4f}", of["low"].get<double>(), of["high"].get<double>());
}

void print_row(const std::string& name, std::size_t width, const json& loss, const json& difference,
               const json& tokens_per_s) {
  const bool has = difference.is_object();
  fmt::print("{:<{}}  {:>9} {:>18} {:>9} {:>19} {:>9} {:>9}\n", name, width,
             loss.is_object() ? number_or(loss["mean"], "{:.4f}") : "-", interval_of(loss),
             has ? number_or(difference["mean"], "{:+.4f}") : "-", interval_of(difference),
             has ? number_or(difference["holm"], "{:.2g}") : "-",
             tokens_per_s.is_number() ? human_count(tokens_per_s.get<double>(), "") : "-");
}

json member(const json& arm, const char* key) { return arm.contains(key) ? arm[key] : json(); }

}  // namespace

void print_findings(const json& document) {
  std::size_t width = 9;
  for (const json& arm : document["arms"]) {
    width = std::max(width, arm["name"].get<std::string>().size());
  }
  for (const bool at_equal_time : {false, true}) {
    if (at_equal_time && document["equal_time"] != true) continue;
    fmt::print("\n{:<{}}  {:>9} {:>18} {:>9} {:>19} {:>9} {:>9}\n",
               at_equal_time ? "equal time" : "arm", width, "loss", "95% interval", "against",
               "95% interval", "Holm's p", "tokens/s");
    for (const json& arm : document["arms"]) {
      const json time = member(arm, "time");
      const bool is_own = !at_equal_time || !time.is_object();  // the reference's runs are the same
      if (at_equal_time && is_own && arm["name"] != document["reference"]) continue;
      print_row(arm["name"], width, is_own ? arm["loss"] : time["loss"],
                is_own ? member(arm, "difference") : time, arm["tokens_per_s"]);
    }
  }
  fmt::print("\n");
  for (const json& sentence : document["sentences"]) {
    fmt::print("{}\n", sentence.get<std::string>());
  }
}

}  // namespace switchyard::tool
