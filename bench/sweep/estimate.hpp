#pragma once

#include "bench/cases/suites.hpp"

namespace switchyard::bench {

/// What a case will take, everything that it makes up included.
struct Estimate {
  double seconds = 0;
  double bytes = 0;  ///< At most at once, of the host; on CUDA of all GPUs.
};

/// How fast this process makes data up; measured in a few milliseconds.
struct MadeUpRates {
  double normals = 0;  ///< Normal numbers a second, one thread.
  double copied = 0;   ///< Bytes a second into new memory, one thread.
};
[[nodiscard]] MadeUpRates measure_made_up_rates();

/// From the measured roofs and how near its kernels come to them; a sweep says at its end how far
/// off that was. Of work kinds kLayer, kPaths, kIdentity, kRouter and kCapacity.
[[nodiscard]] Estimate estimate_case(const SuiteCase& c, const Machine& machine,
                                     const Limits& limits, const MadeUpRates& rates);

}  // namespace switchyard::bench
