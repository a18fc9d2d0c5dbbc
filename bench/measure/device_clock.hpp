#pragma once

#include "bench/measure/run_clock.hpp"

namespace switchyard::bench {

/// The clock of the current GPU, on a stream of its own; `meet` as make_run_clock() has it.
[[nodiscard]] std::unique_ptr<RunClock> make_device_clock(StageTimes& times,
                                                          std::function<void()> meet);

}  // namespace switchyard::bench
