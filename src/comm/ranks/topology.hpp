#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "switchyard/comm.hpp"

namespace switchyard {

/// Ranks of this host alone.
[[nodiscard]] Topology topology_of_this_host(int num_ranks);

/// @param first_of_host  [R] for each rank the lowest rank of its host.
/// @param host           [R] for each rank the name of its host.
[[nodiscard]] Topology topology_of_hosts(std::span<const int> first_of_host,
                                         const std::vector<std::string>& host);

}  // namespace switchyard
