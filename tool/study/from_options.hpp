#pragma once

// What the command line says of a study.

#include <cstddef>
#include <vector>

#include "tool/options/options.hpp"
#include "tool/study/config.hpp"

namespace switchyard::tool {

/// The file, with the texts of the options in the place of its own.
/// @throws UsageError: as parse_study(); no texts, or some that are trained on and held out.
[[nodiscard]] StudyConfig study_of(const Options& options);

/// Those of --only, or all. @throws UsageError: there is none of that name.
[[nodiscard]] std::vector<std::size_t> arms_of(const Options& options, const StudyConfig& study);

/// Threads that each of the runs at a time (--jobs) has.
/// @throws UsageError: more runs than threads, or, for equal_time, than have a place to themselves.
[[nodiscard]] int threads_of_a_run(const Options& options, const StudyConfig& study);

}  // namespace switchyard::tool
