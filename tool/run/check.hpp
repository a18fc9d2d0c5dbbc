#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "bench/layer/layer_run.hpp"

namespace switchyard::tool {

/// What the reference says of a run.
struct Verdict {
  bool holds = true;
  std::string miss{};                ///< The first thing that is wrong.
  std::int64_t tokens_routed = 0;    ///< Tokens whose routing was compared.
  std::int64_t tokens_computed = 0;  ///< Tokens whose output was compared.
  double largest_error = 0;          ///< Of the output, against the reference's value ...
  double largest_bound = 0;          ///< ... and the largest bound.
};

/// Compare routing (unless it was given), drops and output of a run with the reference in double.
/// Routing is compared for every token; outputs for as many as fit into about 2e10 operations.
[[nodiscard]] Verdict check_run(const bench::LayerRunArgs& args,
                                const bench::LayerRunResult& result);

/// check_run() of a chain: each iteration is run once more as a layer of its own on what the one
/// before has made, and compared so; the chain has the bits of these.
[[nodiscard]] Verdict check_chain(const bench::LayerRunArgs& args,
                                  const bench::LayerRunResult& result);

}  // namespace switchyard::tool
