#pragma once

// From options to how a layer runs: shared by `run` and `bench`.

#include <memory>

#include "bench/measure/machine.hpp"
#include "comm/ranks/engine_words.hpp"
#include "comm/ranks/launch.hpp"
#include "switchyard/layer.hpp"
#include "tool/options/options.hpp"

namespace switchyard::tool {

/// Ranks of the layer, and this process's part in them.
struct World {
  int num_ranks = 1;
  int num_threads = 1;                       ///< Of this process.
  std::shared_ptr<Communicator> launched{};  ///< This process's rank, if a launcher started it.
  DeviceEngine device_engine = DeviceEngine::kAuto;

  [[nodiscard]] const char* engine() const {
    if (device_engine != DeviceEngine::kAuto) return to_string(device_engine);
    return launched ? launched->engine() : kThreadsEngine;
  }
  /// Prints and writes files.
  [[nodiscard]] bool is_first() const { return !launched || launched->rank() == 0; }
};

/// @throws UsageError: a backend that is not there, or what it does not have.
[[nodiscard]] Backend choose_backend(const Options& options);

/// @throws UsageError: an engine that is not there, or not for this backend or launcher.
void check_engine(const Options& options, const Launch& launch);

/// @throws UsageError: as check_engine; --ranks against a launcher's world.
[[nodiscard]] World choose_world(const Options& options);

/// Of the backend. Measured by rank 0 with the threads of all ranks on its host, while the others
/// wait; they get the same.
[[nodiscard]] bench::Limits limits_of(const World& world, Backend backend);

/// Sets the instruction set of --isa, and what of LayerOptions the command line says.
/// @throws UsageError: a backend or an instruction set that is not there, or what the backend
/// lacks.
[[nodiscard]] LayerOptions layer_options(const Options& options);

/// The router of --router in the place of `router`, which has what is not said.
/// @param alone  Of a layer that has none before it.
/// @throws UsageError: as parse_router; `alone` and a gating residual.
[[nodiscard]] RouterConfig router_of(const std::string& spelling, const RouterConfig& router,
                                     bool alone = true);

/// @throws UsageError: not there; says what is.
void choose_isa(const Options& options);

/// @param option  That named the file, for messages. An output that is empty was not asked for.
/// @throws UsageError: the file's ending is none of a matrix of that type.
void check_matrix_output(const char* option, const std::string& path, DType dtype);

}  // namespace switchyard::tool
