#pragma once

// From options to the cases that they mean by themselves, without a suite.

#include <vector>

#include "bench/cases/suites.hpp"
#include "tool/options/options.hpp"
#include "tool/setup.hpp"

namespace switchyard::tool {

/// Whether --experts says identity.
[[nodiscard]] bool identity_wanted(const Options& options);

/// What all cases share: threads, ranks, seed, counts, the pass.
/// @throws UsageError: options that do not fit together.
[[nodiscard]] bench::LayerCase base_case(const Options& options, const World& world);

/// A model or sizes, once per number of tokens. @throws UsageError, Error of the configuration.
[[nodiscard]] std::vector<bench::SuiteCase> model_cases(const Options& options,
                                                        const bench::LayerCase& base);

}  // namespace switchyard::tool
