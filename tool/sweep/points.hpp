#pragma once

// The points of a sweep: from a suite, or from a grid in JSON.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/cases/suites.hpp"
#include "tool/options/options.hpp"

namespace switchyard::tool {

/// One measurement of a sweep.
struct SweepPoint {
  bench::SuiteCase work{};
  const char* kind = "layer";  ///< "layer", "pack", "router" or "capacity".
  nlohmann::json at{};         ///< Where it lies: the values of the grid's keys.
};

struct Sweep {
  std::string name{};
  std::vector<SweepPoint> points{};
};

/// The sweep of --suite or --grid, --scale applied. A grid is an object: "work", "name" if it has
/// one, and options of `bench` that the work has ("_" for "-"), each a value or a list of values,
/// null where an option is not given; "tokens_per_rank" stands for num_tokens / ranks. The first in
/// the order of bench's options varies slowest. "router": "all" are all of `switchyard routers`.
/// @throws UsageError: a key or a value that is none, and what would be right; points that no layer
///         can be.
[[nodiscard]] Sweep sweep_of(const Options& options);

}  // namespace switchyard::tool
