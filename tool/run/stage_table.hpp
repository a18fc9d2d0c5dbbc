#pragma once

#include <optional>
#include <string>

#include "bench/layer/layer_run.hpp"
#include "bench/measure/machine.hpp"
#include "comm/ranks/engine_words.hpp"
#include "tool/options/options.hpp"
#include "tool/run/check.hpp"
#include "tool/run/routing_stats.hpp"

namespace switchyard::tool {

/// Everything that `run` tells at its end.
struct RunReport {
  const Options& options;
  std::string family;
  std::int32_t layer = 0;
  const bench::LayerRunArgs& args;
  const bench::LayerRunResult& result;
  const char* engine = kThreadsEngine;
  std::optional<Verdict> verdict{};
  std::optional<RoutingStats> routing{};
  bench::Limits limits{};
};

/// A table, or JSON where --json asks for it, to stdout.
void print_report(const RunReport& report);

/// Stage, median, share of the layer, GB/s, GFLOP/s, limit, share of the limit. Shared with bench.
void print_stage_table(const std::vector<bench::StageFigures>& stages);

}  // namespace switchyard::tool
