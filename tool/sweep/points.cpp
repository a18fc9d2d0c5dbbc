// Suites and grids as points. A point of a grid is what `bench` would make of the same options.
#include "tool/sweep/points.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "bench/exchange/shapes.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "core/check.hpp"
#include "switchyard/error.hpp"
#include "switchyard/names.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "tool/bench/base_case.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"
#include "tool/sweeps_json.hpp"

namespace switchyard::tool {
namespace {

using bench::CaseKind;
using bench::SuiteCase;
using nlohmann::json;

constexpr std::size_t kMostPoints = 100000;

struct Work {
  const char* name;
  CaseKind kind;
  std::vector<std::string> keys;                           ///< The first varies slowest.
  std::vector<std::pair<const char*, const char*>> fixed;  ///< What the case does not depend on.
};

const std::vector<Work>& works() {
  static const std::vector<Work> all = {
      {"layer",
       CaseKind::kLayer,
       {"model",        "ranks",         "num_tokens",      "tokens_per_rank", "experts",
        "top_k",        "hidden",        "inner",           "shared_experts",  "groups",
        "top_groups",   "plain",         "activation",      "compute",         "weights",
        "router",       "skew",          "layout",          "capacity_factor", "drop_policy",
        "combine_wire", "dispatch_wire", "batch_invariant", "rank_invariant",  "pass",
        "recompute"},
       {}},
      {"pack",
       CaseKind::kIdentity,
       {"ranks", "num_tokens", "tokens_per_rank", "experts", "top_k", "hidden", "compute", "skew",
        "layout"},
       {{"inner", "32"}, {"experts", "identity"}}},
      {"router",
       CaseKind::kRouter,
       {"model", "num_tokens", "experts", "top_k", "hidden", "groups", "top_groups", "compute",
        "router"},
       {{"inner", "32"}}},
      {"capacity",
       CaseKind::kCapacity,
       {"num_tokens", "experts", "top_k", "capacity_factor"},
       {{"hidden", "32"}, {"inner", "32"}, {"router", "uniform"}}}};
  return all;
}

const OptionSpec& spec_of(const std::string& key) {
  std::string name = "--" + key;
  std::replace(name.begin(), name.end(), '_', '-');
  const auto specs = option_table();
  return *std::find_if(specs.begin(), specs.end(), [&](const OptionSpec& spec) {
    return spec.name == name && (spec.commands & kBench) != 0;
  });
}

/// The value as the command line would spell it.
std::string word_of(const std::string& key, const json& value) {
  const OptionSpec& spec = spec_of(key);
  const bool listed = std::holds_alternative<std::vector<std::string> Options::*>(spec.field) ||
                      std::holds_alternative<std::vector<std::int64_t> Options::*>(spec.field);
  if (value.is_number_integer()) return value.dump();
  if (value.is_number_float() && !listed) return fmt::format("{}", value.get<double>());
  if (value.is_string() && !listed) return value.get<std::string>();
  throw UsageError("{}: {} is no value, want {}", key, value.dump(),
                   listed ? "a whole number" : spec.value);
}

void set(Options& point, const std::string& key, const json& value) {
  if (value.is_null()) return;
  const OptionSpec& spec = spec_of(key);
  if (std::holds_alternative<bool Options::*>(spec.field)) {
    if (!value.is_boolean())
      throw UsageError("{}: {} is neither true nor false", key, value.dump());
    if (value.get<bool>()) set_option(point, spec, "");
    return;
  }
  set_option(point, spec, word_of(key, value));
}

/// A grid, checked to be one.
struct Grid {
  std::string name;
  const Work* work = nullptr;
  std::vector<std::pair<std::string, std::vector<json>>> axes{};  ///< In the order of the work.
};

const Work& work_of(const json& grid) {
  const std::string name =
      grid.contains("work") && grid.at("work").is_string() ? grid.at("work") : "";
  std::string names;
  for (const Work& work : works()) {
    if (work.name == name) return work;
    names += (names.empty() ? "" : ", ") + std::string(work.name);
  }
  throw UsageError("work: {}, want {}", grid.contains("work") ? grid.at("work").dump() : "missing",
                   names);
}

std::vector<json> values_of(const std::string& key, const json& value) {
  std::vector<json> values;
  if (key == "router" && value == "all") {
    for (const RouterKind& kind : router_kinds()) values.emplace_back(kind.name);
    return values;
  }
  if (!value.is_array()) return {value};
  for (const json& one : value) {
    if (std::find(values.begin(), values.end(), one) != values.end()) {
      throw UsageError("{}: {} is listed twice", key, one.dump());
    }
    values.push_back(one);
  }
  if (values.empty()) throw UsageError("{}: the list is empty", key);
  return values;
}

Grid grid_of(const std::string& name, const json& object) {
  if (!object.is_object()) throw UsageError("no object, want {{\"work\": ..., ...}}");
  Grid grid{.name = name, .work = &work_of(object)};
  const std::vector<std::string>& keys = grid.work->keys;
  for (const auto& [key, value] : object.items()) {
    if (key == "work") continue;
    if (key == "name") {
      if (!value.is_string() || value.get<std::string>().empty()) {
        throw UsageError("name: {} is no name", value.dump());
      }
      grid.name = value.get<std::string>();
    } else if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      throw UsageError("'{}' is no key of the work {}, want name, {}", key, grid.work->name,
                       fmt::join(keys, ", "));
    }
  }
  std::size_t points = 1;
  for (const std::string& key : keys) {
    if (!object.contains(key)) continue;
    grid.axes.emplace_back(key, values_of(key, object.at(key)));
    points *= grid.axes.back().second.size();
    if (points > kMostPoints) throw UsageError("more than {} points", kMostPoints);
  }
  if (object.contains("num_tokens") == object.contains("tokens_per_rank")) {
    throw UsageError("num_tokens{}", object.contains("num_tokens")
                                         ? " and tokens_per_rank are both given, want one"
                                         : " is missing");
  }
  return grid;
}

/// What the points share with the sweep's command line.
Options shared_options(const Options& options, const Grid& grid) {
  Options point;
  point.command = kBench;
  point.backend = options.backend;
  point.threads = options.threads;
  point.isa = options.isa;
  point.engine = options.engine;
  point.timeout_ms = options.timeout_ms;
  point.seed = options.seed;
  point.warmup = options.warmup;
  point.iterations = options.iterations;
  for (const auto& [key, value] : grid.work->fixed) set_option(point, spec_of(key), value);
  for (const auto& [key, values] : grid.axes) {  // a GPU is told before it is first used
    if (key != "ranks") continue;
    for (const json& ranks : values) {
      if (ranks.is_number_integer()) point.ranks_list.push_back(ranks.get<std::int64_t>());
    }
  }
  return point;
}

json scaled(const std::string& key, const json& value, double scale) {
  if (scale == 1 || !value.is_number_integer()) return value;
  if (key == "num_tokens" || key == "tokens_per_rank") {
    return bench::scaled_tokens(value.get<std::int64_t>(), scale);
  }
  if (key == "hidden" || key == "inner")
    return bench::scaled_size(value.get<std::int64_t>(), scale);
  return value;
}

/// Of a router that has no K of its own, points differ by no K.
void forget_unused_top_k(json& at) {
  if (!at.contains("router") || !at.at("router").is_string()) return;
  const std::string spelling = at.at("router");
  const RouterKind& kind = find_router_kind(spelling.substr(0, spelling.find(':')));
  const bool has_top_k =
      std::any_of(kind.options.begin(), kind.options.end(),
                  [](const RouterOption& o) { return o.name == std::string_view("top-k"); });
  if (!has_top_k) at.erase("top_k");
}

SweepPoint point_of(const Grid& grid, Options point, json at) {
  for (const auto& [key, value] : at.items()) {
    if (key != "tokens_per_rank") set(point, key, value);
  }
  if (at.contains("tokens_per_rank")) {
    const json tokens = at.at("tokens_per_rank");
    set(point, "num_tokens", tokens);
    point.num_tokens.front() *= point.ranks.value_or(1);
    at["num_tokens"] = point.num_tokens.front();
  }
  if (!point.model.empty() && grid.work->kind == CaseKind::kRouter) point.inner.reset();
  std::vector<SuiteCase> cases = model_cases(point, base_case(point, choose_world(point)));
  SweepPoint out{.work = std::move(cases.front()), .kind = grid.work->name, .at = std::move(at)};
  out.work.kind = grid.work->kind;
  if (point.model.empty()) out.work.layer.name = grid.name;
  if (!point.router.empty() && point.skew != "uniform") {
    throw UsageError("router {} and skew {} are both given, want one", point.router, point.skew);
  }
  if (out.kind == std::string_view("capacity") && !point.capacity_factor) {
    throw UsageError("capacity_factor is missing");
  }
  if (point.capacity_factor && out.work.layer.config.router.is_variable()) {
    throw UsageError("capacity_factor {} and router {}, which has no capacity, are both given",
                     *point.capacity_factor, point.router);
  }
  forget_unused_top_k(out.at);
  return out;
}

/// @throws UsageError or Error: a point that is none, with the point in front.
SweepPoint named_point(const Grid& grid, const Options& shared, const json& at) {
  try {
    return point_of(grid, shared, at);
  } catch (const UsageError& error) {
    throw UsageError("{}: {}", at.dump(), error.what());
  } catch (const Error& error) {
    throw at_place(at.dump(), error);
  }
}

/// Every combination of the axes' values.
Sweep expand(const Grid& grid, const Options& options) {
  const Options shared = shared_options(options, grid);
  Sweep sweep{.name = grid.name};
  std::set<std::string> seen;
  std::vector<std::size_t> place(grid.axes.size());
  for (bool more = true; more;) {
    json at = json::object();
    for (std::size_t i = 0; i < place.size(); ++i) {
      const auto& [key, values] = grid.axes[i];
      at[key] = scaled(key, values[place[i]], options.scale);
    }
    SweepPoint point = named_point(grid, shared, at);
    if (seen.insert(point.at.dump()).second) sweep.points.push_back(std::move(point));
    more = false;
    for (std::size_t i = place.size(); i-- > 0 && !more;) {
      place[i] = (place[i] + 1) % grid.axes[i].second.size();
      more = place[i] != 0;
    }
  }
  return sweep;
}

/// A key that stands twice would else be lost.
json parse(const std::string& text) {
  std::set<std::string> keys;
  return json::parse(text, [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::key && depth == 1 && !keys.insert(parsed).second) {
      throw UsageError("the key {} is there twice", parsed.dump());
    }
    return true;
  });
}

Sweep grid_file(const Options& options) {
  const std::string& path = options.grid;
  try {
    const auto file = MappedFile::open(path);
    const std::string text(reinterpret_cast<const char*>(file->bytes().data()),
                           file->bytes().size());
    return expand(grid_of("grid", parse(text)), options);
  } catch (const json::exception& error) {
    throw UsageError("--grid: {} is no JSON: {}", path, error.what());
  } catch (const UsageError& error) {
    throw UsageError("--grid: {}: {}", path, error.what());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    throw UsageError("--grid: {}: {}", path, message_of(error));
  }
}

/// A point of a suite of `bench`, in the words of a grid.
SweepPoint point_of(SuiteCase c) {
  const bench::LayerCase& layer = c.layer;
  json at = {{"num_tokens", layer.num_tokens},
             {"experts", layer.config.router.num_experts},
             {"top_k", layer.config.router.top_k()},
             {"hidden", layer.config.experts.hidden},
             {"compute", to_string(layer.dtype)}};
  if (c.kind == CaseKind::kRouter) return {.work = c, .kind = "router", .at = at};
  if (c.kind != CaseKind::kPaths) at["layout"] = layer.layout;
  if (c.kind == CaseKind::kIdentity) return {.work = c, .kind = "pack", .at = at};
  at["inner"] = layer.config.experts.inner;
  if (layer.options.capacity_factor) at["capacity_factor"] = *layer.options.capacity_factor;
  return {.work = c, .kind = "layer", .at = at};
}

}  // namespace

Sweep sweep_of(const Options& options) {
  if (!options.grid.empty()) return grid_file(options);
  const json suites = json::parse(kSweepsJson);
  if (suites.contains(options.suite)) {
    return expand(grid_of(options.suite, suites.at(options.suite)), options);
  }
  Options shared = options;
  shared.command = kBench;
  Sweep sweep{.name = options.suite};
  std::set<std::string> seen;  // scaled down, sizes may be the same
  const bench::LayerCase base = base_case(shared, choose_world(shared));
  for (SuiteCase& c : bench::suite_cases(options.suite, base, options.scale)) {
    SweepPoint point = point_of(std::move(c));
    if (seen.insert(point.at.dump()).second) sweep.points.push_back(std::move(point));
  }
  return sweep;
}

}  // namespace switchyard::tool
