#pragma once

// What ranks tell each other now and then, through windows of their communicator.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "switchyard/comm.hpp"

namespace switchyard {

/// Collective: the value of rank 0, on all ranks.
[[nodiscard]] double from_first(Communicator& communicator, double value);

/// Collective: the sum of every rank's values, of which all give as many, on all ranks.
/// @throws Error{kCommunication}: they do not.
[[nodiscard]] std::vector<std::int64_t> sum_over_ranks(Communicator& communicator,
                                                       const std::vector<std::int64_t>& values);
/// Added in the order of ranks: the same bits on all.
[[nodiscard]] std::vector<double> sum_over_ranks(Communicator& communicator,
                                                 const std::vector<double>& values);

/// Collective: the bytes of every rank, on rank 0; elsewhere empty.
[[nodiscard]] std::vector<std::vector<std::byte>> gather(Communicator& communicator,
                                                         const std::vector<std::byte>& part);
/// The same on all ranks.
[[nodiscard]] std::vector<std::vector<std::byte>> gather_to_all(Communicator& communicator,
                                                                const std::vector<std::byte>& part);

}  // namespace switchyard
