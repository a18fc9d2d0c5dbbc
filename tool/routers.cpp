// `switchyard routers`: the table of routers, as it is parsed by.
#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "switchyard/routing/router_kinds.hpp"
#include "tool/commands.hpp"
#include "tool/options/usage_error.hpp"

namespace switchyard::tool {
namespace {

nlohmann::json to_json(const RouterOption& option) {
  nlohmann::json out = {{"name", option.name}, {"value", option.value}, {"help", option.help}};
  if (option.low != option.high) {
    out["low"] = option.low;
    out["high"] = option.high;
    out["whole"] = option.whole;
  }
  return out;
}

nlohmann::json to_json(const RouterKind& kind) {
  nlohmann::json options = nlohmann::json::array();
  for (const RouterOption& option : kind.options) options.push_back(to_json(option));
  return {{"name", kind.name},           {"rule", kind.rule},         {"options", options},
          {"causal", kind.causal},       {"variable", kind.variable}, {"trainable", kind.trainable},
          {"weights_sum", kind.weights}, {"losses", kind.losses},     {"source", kind.source},
          {"on_gpu", kind.on_gpu}};
}

const char* yes_or_no(bool value) { return value ? "yes" : "no"; }

void print(const RouterKind& kind) {
  fmt::print(
      "{}: {}\n  causal {}, any number of experts {}, trainable {}, on a GPU {}; weights sum to "
      "{}\n",
      kind.name, kind.rule, yes_or_no(kind.causal), yes_or_no(kind.variable),
      yes_or_no(kind.trainable), yes_or_no(kind.on_gpu), kind.weights);
  fmt::print("  losses: {}; source: {}\n", kind.losses, kind.source);
  for (const RouterOption& option : kind.options) {
    fmt::print("    {}={}  {}\n", option.name, option.value, option.help);
  }
}

}  // namespace

int routers_command(const Options& options) {
  if (options.json) {
    nlohmann::json all = nlohmann::json::array();
    for (const auto kinds : {router_kinds(), mixing_kinds(), adapter_kinds()}) {
      for (const RouterKind& kind : kinds) all.push_back(to_json(kind));
    }
    fmt::print("{}\n", all.dump(2));
    return kFine;
  }
  for (const RouterKind& kind : router_kinds()) print(kind);
  fmt::print("\nBeside routings, none of a layer's --router (of train's soft-moe is one):\n");
  for (const auto kinds : {mixing_kinds(), adapter_kinds()}) {
    for (const RouterKind& kind : kinds) print(kind);
  }
  return kFine;
}

}  // namespace switchyard::tool
