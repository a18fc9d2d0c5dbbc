#pragma once

#include <functional>

#include "bench/layer/layer_run.hpp"
#include "tool/options/options.hpp"

namespace switchyard::tool {

/// bench::run_layer(), or what a test of --check puts in its place: one that errs.
using LayerRunner = std::function<bench::LayerRunResult(const bench::LayerRunArgs&)>;

/// `switchyard run`. @returns, @throws as the commands do.
int run_command(const Options& options, const LayerRunner& run);

}  // namespace switchyard::tool
