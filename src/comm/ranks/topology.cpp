// Nodes are numbered by their lowest rank, so that all ranks number them alike.
#include "comm/ranks/topology.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <array>

namespace switchyard {

std::string Topology::place_of(int rank) const {
  const std::int32_t its = node[static_cast<std::size_t>(rank)];
  return fmt::format("rank {} on node {} ({})", rank, its, name[static_cast<std::size_t>(its)]);
}

Topology topology_of_this_host(int num_ranks) {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(num_ranks), 0);
  return {.node = zeros, .domain = zeros, .name = {host.data()}};
}

Topology topology_of_hosts(std::span<const int> first_of_host,
                           const std::vector<std::string>& host) {
  Topology topology;
  for (std::size_t rank = 0; rank < first_of_host.size(); ++rank) {
    const auto first = static_cast<std::size_t>(first_of_host[rank]);
    if (first == rank) topology.name.push_back(host[rank]);
    topology.node.push_back(first == rank ? topology.num_nodes() - 1 : topology.node[first]);
  }
  topology.domain = topology.node;
  return topology;
}

}  // namespace switchyard
