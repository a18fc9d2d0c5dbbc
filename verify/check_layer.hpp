#pragma once

#include <chrono>
#include <string>

#include "switchyard/comm.hpp"
#include "switchyard/execution.hpp"
#include "verify/problem.hpp"
#include "verify/run_layer.hpp"
#include "verify/stage_checks.hpp"

namespace switchyard::verify {

struct CheckOptions {
  Backend backend = Backend::kCpu;
  DeviceEngine device_engine = DeviceEngine::kAuto;
  std::chrono::milliseconds timeout{10000};  ///< Of the waits between ranks.
  Communicator* group = nullptr;             ///< As in RunArgs; only rank 0 compares.
  LayerRunner run = run_layer;               ///< What is checked.
  double row_scale = 1;                      ///< As in reference::LayerRun.
};

/// Runs the layer as the case says and compares everything it reports with the reference. Empty if
/// all holds, else the first thing that does not.
[[nodiscard]] std::string check_layer(const Problem& problem, const CheckOptions& options);

/// Of check_layer() what is a chain's: its run against its iterations, each of which is a layer of
/// its own that is held against the reference: routing, counts and output.
[[nodiscard]] std::string check_chain(const Problem& problem, const CheckOptions& options,
                                      const RunResult& result);

/// check_layer() for the stages alone, each called by itself: route, apply_capacity, plan, pack,
/// combine, finish. By bits where the contract fixes them.
[[nodiscard]] std::string check_stages(const Problem& problem, const StageCalls& calls = {});

}  // namespace switchyard::verify
