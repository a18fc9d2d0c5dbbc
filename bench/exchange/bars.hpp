#pragma once

// What all cases of an exchange suite on GPUs say together: bars R5 and R6, which are for 8 GPUs
// of one host; on fewer the same rules, and the verdict says how many there were.

#include <vector>

#include "bench/measure/results.hpp"

namespace switchyard::bench {

/// R5, of the native variant on the published benchmarks with every token there: each round trip
/// within the wire's time + 18 us, and at most 40 us in the geometric mean. Empty without them.
[[nodiscard]] std::vector<CaseResult> judge_round_trips(const std::vector<CaseResult>& results);

/// R6, of the fixed-size sweeps: each point within 1.06 times the wire's time + 12 us, and where
/// NCCL was measured never slower than it. Empty without them.
[[nodiscard]] std::vector<CaseResult> judge_fixed_size(const std::vector<CaseResult>& results);

}  // namespace switchyard::bench
