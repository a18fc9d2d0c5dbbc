#pragma once

// The CPU experts against the roof of the machine and against oneDNN, in one process.

#include <vector>

#include "bench/cases/cases.hpp"

namespace switchyard::bench {

/// One case of the suite "cpu-experts": experts() alone with weights in memory, in turn with the
/// peer (or with exact weights where the case's are not; of stored ones the bits must be the same)
/// and with measurements of the roofs, so that all see the same state of the machine. c.name names
/// the bar.
[[nodiscard]] CaseResult run_cpu_bar_case(const LayerCase& c, const Limits& limits);

/// What a bar asks for.
struct BarTarget {
  double ratio = 0;  ///< Peer / ours, at least; of C7 ours / bf16, at most.
  double share = 0;  ///< Of the roof, at least; 0: nothing is asked.
};
[[nodiscard]] BarTarget target_of(const LayerCase& c, double rows_per_expert);

/// The cases of the bars on the instruction set in use: layers A (H1024 I4096 E8 K2), B (H2048
/// I1024 E64 K6) and C (H2048 I768 E128 K8). If the base is q8, only those about q8. If its weights
/// are stored ones, these layers and one of gpt-oss's sizes with them, whatever the bars.
[[nodiscard]] std::vector<LayerCase> cpu_bar_cases(const LayerCase& base);

}  // namespace switchyard::bench
