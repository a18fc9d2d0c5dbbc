#pragma once

#include "switchyard/execution.hpp"
#include "switchyard/router.hpp"

namespace switchyard {

/// Of the stage "router_network": what a router's features of so many tokens are made of.
[[nodiscard]] inline StageWork network_work(const RouterNetwork& network, std::int64_t num_tokens,
                                            std::int64_t hidden) {
  const double products = network.kind == RouterNetwork::Kind::kHadamard ? 2 : 1;
  const double flops =
      2 * products * static_cast<double>(num_tokens * hidden * network.inner(hidden));
  return {.flops = flops, .flops_executed = flops};
}

}  // namespace switchyard
