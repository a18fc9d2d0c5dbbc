#include "tool/report/lines.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "checkpoint/files/mapped_file.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/report/result_header.hpp"
#include "tool/report/run_document.hpp"
#include "tool/report/values.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr std::size_t kMostLine = 1 << 20;
constexpr std::size_t kMostDocument = 64 << 20;
constexpr int kMostDepth = 16;

enum class Kind : std::uint8_t { kText, kNumber, kWhole, kTruth, kObject };
struct Member {
  const char* path;
  Kind kind;
};

/// What every line of `bench` about a stage has.
constexpr Member kStageMembers[] = {
    {"stage", Kind::kText},       {"commit", Kind::kText},       {"limit_by", Kind::kText},
    {"case.name", Kind::kText},   {"machine.cpu", Kind::kText},  {"machine.isa", Kind::kText},
    {"machine.gpu", Kind::kText}, {"case.compute", Kind::kText}, {"case.layout", Kind::kText},
    {"case.R", Kind::kWhole},     {"case.E", Kind::kWhole},      {"case.K", Kind::kWhole},
    {"case.H", Kind::kWhole},     {"case.I", Kind::kWhole},      {"case.T", Kind::kNumber},
    {"median_us", Kind::kNumber}, {"p95_us", Kind::kNumber},     {"gbps", Kind::kNumber},
    {"tflops", Kind::kNumber},    {"limit_us", Kind::kNumber},   {"share", Kind::kNumber}};

/// What a point of a fixed-size sweep has.
constexpr Member kSweepMembers[] = {
    {"sweep", Kind::kText},        {"commit", Kind::kText},      {"case.R", Kind::kWhole},
    {"case.H", Kind::kWhole},      {"case.engine", Kind::kText}, {"case.compute", Kind::kText},
    {"machine.cpu", Kind::kText},  {"peers", Kind::kObject},     {"value", Kind::kNumber},
    {"median_us", Kind::kNumber},  {"mean_us", Kind::kNumber},   {"padding", Kind::kNumber},
    {"wire_bytes", Kind::kNumber}, {"M", Kind::kWhole},          {"holds", Kind::kTruth}};

bool is_of(const json& value, Kind kind) {
  switch (kind) {
    case Kind::kText: return value.is_string();
    case Kind::kNumber: return value.is_number();
    case Kind::kWhole: return value.is_number_integer();
    case Kind::kTruth: return value.is_boolean();
    case Kind::kObject: return value.is_object();
  }
  return false;
}

bool has(const json& line, const Member& member) {
  const json* value = member_of(line, member.path);
  return value != nullptr && is_of(*value, member.kind);
}

/// A line of a program says which, and may have any members; one of bench has all of its own.
bool is_result_line(const json& line) {
  if (!line.is_object()) return false;
  if (line.contains("program") || line.contains("suite")) return true;
  const auto all = [&](const auto& members) {
    return std::all_of(std::begin(members), std::end(members),
                       [&](const Member& member) { return has(line, member); });
  };
  return line.contains("sweep") ? all(kSweepMembers) : all(kStageMembers);
}

struct TooDeep : std::runtime_error {
  TooDeep() : std::runtime_error("too deep") {}
};

/// Values that hold each other thousands of times would exhaust the stack of whoever copies them.
json parse_shallow(std::string_view text) {
  return json::parse(text, [](int depth, json::parse_event_t /*event*/, json& /*value*/) {
    if (depth > kMostDepth) throw TooDeep();
    return true;
  });
}

/// The first line of a text, without its end, or as much of it as shows that it is too long.
std::string_view take_line(std::string_view& text) {
  const std::size_t end = text.substr(0, kMostLine + 1).find('\n');
  const std::string_view line = text.substr(0, end == std::string_view::npos ? kMostLine + 1 : end);
  text.remove_prefix(std::min(text.size(), line.size() + 1));
  return line;
}

/// Lines of a document of `run --json`, which begins with a line of its own for the brace.
bool read_document(std::string_view text, std::vector<json>& lines) {
  if (!text.starts_with("{\n") || text.size() > kMostDocument) return false;
  try {
    for (json& line : lines_of_run(parse_shallow(text))) lines.push_back(std::move(line));
  } catch (const json::exception&) {
    return false;
  } catch (const TooDeep&) {
    return false;
  }
  return !lines.empty();
}

void read_file(const std::string& path, std::vector<json>& lines) {
  const auto file = MappedFile::open(path);
  std::string_view rest(reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size());
  if (std::vector<json> run; read_document(rest, run)) {
    std::move(run.begin(), run.end(), std::back_inserter(lines));
    return;
  }
  ResultHeader header;
  for (int number = 1; !rest.empty(); ++number) {
    const std::string_view text = take_line(rest);
    if (text.empty()) continue;
    if (text.size() > kMostLine) {
      throw UsageError("FILE: {} line {} is longer than the {} bytes of a result line of bench",
                       path, number, kMostLine);
    }
    std::optional<json> line;
    bool fine = false;
    try {
      line = header.whole(parse_shallow(text));
      fine = !line || is_result_line(*line);
    } catch (const json::exception&) {
      fine = false;
    } catch (const TooDeep&) {
      fine = false;
    }
    if (!fine) throw UsageError("FILE: {} line {} is no result line of bench", path, number);
    if (line) lines.push_back(std::move(*line));
  }
}

/// Members that say what was measured; the rest are figures and circumstances.
constexpr std::array kIdentity = {"program",     "suite",   "sweep",     "value",      "stage",
                                  "case",        "backend", "variant",   "pass",       "bar",
                                  "every_token", "kernel",  "published", "routing_of", "router",
                                  "layer",       "run"};

/// Two lines with the same text are about the same: of them the newest counts.
std::string identity_of(const Line& line) {
  std::string text = line.machine + "\n" + text_of(line.json, "machine.isa");
  for (const char* name : kIdentity) {
    const json* value = member_of(line.json, name);
    // A bar's value is its answer, a sweep's its place.
    if (value == nullptr || (std::string_view(name) == "value" && !line.json.contains("sweep"))) {
      continue;
    }
    text += fmt::format("\n{}:", name) + value->dump(-1, ' ', true);
  }
  return text;
}

std::vector<Line> newest(std::vector<Line> lines) {
  std::vector<Line> kept;
  std::map<std::string, std::size_t> places;
  for (Line& line : lines) {
    const auto [place, fresh] = places.try_emplace(identity_of(line), kept.size());
    if (fresh) {
      kept.push_back(std::move(line));
    } else if (text_of(kept[place->second].json, "time") <= text_of(line.json, "time")) {
      kept[place->second] = std::move(line);
    }
  }
  return kept;
}

std::string machine_of(const json& line) {
  const std::string gpu = text_of(line, "machine.gpu");
  std::string cpu = text_of(line, "machine.cpu");
  for (const std::string_view noise : {"(R)", "(TM)", " Processor"}) {
    if (const std::size_t at = cpu.find(noise); at != std::string::npos)
      cpu.erase(at, noise.size());
  }
  if (gpu.empty() || text_of(line, "backend") == "cpu") {
    const std::string isa = text_of(line, "machine.isa");
    if (cpu.empty()) return "an unnamed machine";
    return isa.empty() ? cpu : cpu + ", " + isa;
  }
  const double ranks = number_of(line, "case.R").value_or(1);
  return ranks > 1 ? fmt::format("{} x {}", ranks, gpu) : gpu;
}

/// A verdict over several cases has no sizes of its own.
bool is_over_cases(const json& line) {
  return number_of(line, "case.E") == 0.0 && number_of(line, "case.T") == 0.0;
}

/// The section that a line of bench names itself; "" where its bar or its case has to.
std::string own_section(const json& line) {
  for (const char* name : {"suite", "program"}) {
    if (std::string text = text_of(line, name); !text.empty()) return text;
  }
  if (line.contains("sweep")) return "fixed-size";
  if (is_over_cases(line)) return "verdicts over several cases";
  const std::string name = text_of(line, "case.name");
  return name.rfind("all2all ", 0) == 0 ? "all2all" : "";
}

/// Cases that a bar judges together are one section, named by the bar; else each name is one.
void name_sections(std::vector<Line>& lines) {
  std::map<std::string, std::set<std::string>> bars_of;   // of a name
  std::map<std::string, std::set<std::string>> names_of;  // of a bar
  for (const Line& line : lines) {
    if (!own_section(line.json).empty()) continue;
    const std::string name = text_of(line.json, "case.name");
    const std::string bar = text_of(line.json, "bar");
    bars_of[name].insert(bar);
    names_of[bar].insert(name);
  }
  for (Line& line : lines) {
    line.section = own_section(line.json);
    if (!line.section.empty()) continue;
    const std::string name = text_of(line.json, "case.name");
    const std::string bar = text_of(line.json, "bar");
    const bool by_bar = !bar.empty() && bars_of[name].size() == 1 && names_of[bar].size() > 1;
    line.section = by_bar ? "bar " + bar : name;
  }
}

}  // namespace

Lines read_lines(const std::vector<std::string>& files) {
  std::vector<json> all;
  for (const std::string& path : files) read_file(path, all);
  if (all.empty()) throw UsageError("FILE: {} has no result line", files.front());
  std::vector<Line> lines;
  for (json& line : all) {
    std::string machine = machine_of(line);
    lines.push_back({.json = std::move(line), .machine = std::move(machine)});
  }
  name_sections(lines);
  Lines out{.read = lines.size()};
  out.lines = newest(std::move(lines));
  return out;
}

}  // namespace switchyard::tool
