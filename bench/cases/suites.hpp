#pragma once

// The named grids of cases.

#include <string_view>
#include <vector>

#include "bench/cases/cases.hpp"

namespace switchyard::bench {

enum class CaseKind {
  kLayer,
  kPaths,
  kIdentity,
  kRouter,
  kCapacity,
  kFusedMoe,
  kCpuBar,
  kLoad,
  kSoftMoe,
  kChain
};

struct SuiteCase {
  CaseKind kind = CaseKind::kLayer;
  LayerCase layer{};
  std::vector<LayerCase> paths{};  ///< Of kPaths: `layer` in other layouts.
};

/// @param base   What all cases share: threads, ranks, seed, counts.
/// @param scale  Tokens, hidden and inner sizes are divided by it (sizes stay multiples of 32).
[[nodiscard]] std::vector<SuiteCase> suite_cases(std::string_view suite, const LayerCase& base,
                                                 double scale);

/// What it takes: of kPaths a result for each of them.
[[nodiscard]] std::vector<CaseResult> run_suite_case(const SuiteCase& c, const Machine& machine,
                                                     const Limits& limits);

}  // namespace switchyard::bench
