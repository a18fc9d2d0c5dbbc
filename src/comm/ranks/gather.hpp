#pragma once

// What ranks tell each other around a measurement, through windows of their communicator.

#include <cstddef>
#include <vector>

#include "switchyard/comm.hpp"

namespace switchyard {

/// Collective: the value of rank 0, on all ranks.
[[nodiscard]] double from_first(Communicator& communicator, double value);

/// Collective: the bytes of every rank, on rank 0; elsewhere empty.
[[nodiscard]] std::vector<std::vector<std::byte>> gather(Communicator& communicator,
                                                         const std::vector<std::byte>& part);

}  // namespace switchyard
