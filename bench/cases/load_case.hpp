#pragma once

// Loading a checkpoint against the least that it can cost.

#include <string>
#include <vector>

#include "bench/cases/cases.hpp"

namespace switchyard::bench {

/// One case of the suite "load": the experts of every MoE layer of c.checkpoint, from opening it to
/// weights that can be computed with, beside (1) reading its files once, into buffers that stay in
/// the caches, and (2) copying as many bytes as the packed weights have from memory to memory, on
/// the same threads in the same rounds. Asked for: load <= 1.15 * (1 + 2). The first load, into new
/// memory, is also timed; while it runs, resident memory (anonymous and mapped pages of files, by
/// VmHWM) may not grow by more than 1.10 times the packed weights. c.name: "load warm", files in
/// the page cache; "load cold": dropped from it before each reading.
/// @throws Error{kBadFile}, {kIo}.
[[nodiscard]] CaseResult run_load_case(const LayerCase& c, const Limits& limits);

/// Warm and cold.
[[nodiscard]] std::vector<LayerCase> load_cases(const LayerCase& base);

}  // namespace switchyard::bench
