#pragma once

#include "tool/options/options.hpp"

namespace switchyard::tool {

/// `bench --suite generate`: prompts and token steps of the presets of `train`, with made-up
/// weights; an exit code. @throws UsageError: an option that the suite has no use for, a preset
/// that there is not.
int bench_generate(const Options& options);

}  // namespace switchyard::tool
