#pragma once

// What the ways back of the router's product on a GPU have in common: T is cut into parts, whose
// sums a second kernel adds in order.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "switchyard/backward.hpp"

namespace switchyard::router_backward {

/// Parts that T is cut into, for dgate and dbias.
struct Parts {
  std::int64_t count, tokens;
};

[[nodiscard]] constexpr std::int64_t blocks_of(std::int64_t size, std::int64_t share) {
  return (size + share - 1) / share;
}

/// args.dgate [E, H] = the sums of `sums` [parts, E, H] in their order, or what was there besides.
void add_gate_parts(const RouterGemmBackwardArgs& args, const float* sums, std::int64_t num_parts);

/// args.dbias [E] by parts of T. @param sums  Memory for [parts, E].
void make_bias_gradient(const RouterGemmBackwardArgs& args, float* sums, const Parts& parts);

/// Bytes of workspace that the kernels for Hopper need; 0 on another device.
[[nodiscard]] std::int64_t sm90_workspace_bytes(std::int64_t max_tokens, std::int64_t num_experts,
                                                std::int64_t hidden);

}  // namespace switchyard::router_backward
