#pragma once

// From options to how a layer runs: shared by `run` and `bench`.

#include "switchyard/layer.hpp"
#include "tool/options.hpp"

namespace switchyard::tool {

/// Ranks of the layer, and this process's part in them.
struct World {
  int num_ranks = 1;
  int num_threads = 1;  ///< Of this process.
  const char* engine = "threads";
};

/// @throws UsageError: an engine that is not built in, --ranks against a launcher's world.
[[nodiscard]] World choose_world(const Options& options);

/// Sets the instruction set of --isa, and what of LayerOptions the command line says.
/// @throws UsageError: a backend or an instruction set that is not there.
[[nodiscard]] LayerOptions layer_options(const Options& options);

/// @throws UsageError: not there; says what is.
void choose_isa(const Options& options);

}  // namespace switchyard::tool
