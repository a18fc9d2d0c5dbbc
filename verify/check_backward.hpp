#pragma once

#include <string>

#include "verify/run_backward.hpp"

namespace switchyard::verify {

/// Runs the layer forward and back and compares every gradient that is asked for with the
/// reference; then once more with another number of threads and the other Recompute, for the same
/// bits. Of a case that has_backward(). Empty if all holds, else the first thing that does not.
[[nodiscard]] std::string check_backward(const Problem& problem, const BackwardRunner& run,
                                         Backend backend = Backend::kCpu);

}  // namespace switchyard::verify
