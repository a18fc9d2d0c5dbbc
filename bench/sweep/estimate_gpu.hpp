#pragma once

#include "bench/sweep/estimate.hpp"

namespace switchyard::bench {

/// estimate_case() of work on CUDA but kPaths: what the host makes up, what it sends, the runs by a
/// model of the kernels, and the GPU's memory buffer by buffer.
[[nodiscard]] Estimate estimate_on_gpu(const SuiteCase& c, const Machine& machine,
                                       const Limits& limits, const MadeUpRates& rates);

}  // namespace switchyard::bench
