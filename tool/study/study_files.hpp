#pragma once

// What a study leaves in its directory besides its runs.

#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "tool/study/plan.hpp"

namespace switchyard::tool {

inline constexpr const char* kStudyFile = "study.json";     ///< The findings, one document.
inline constexpr const char* kLinesFile = "results.jsonl";  ///< A line of bench for each run.

/// Both, each whole or not at all. @throws Error{kIo}.
void write_study(const std::filesystem::path& directory, const nlohmann::json& document,
                 const RunResults& results);

/// The findings of a directory. @throws UsageError: it has none, or the file is no study's.
[[nodiscard]] nlohmann::json read_study(const std::filesystem::path& directory);

/// The floors that a study of the directory has counted before of these texts (the document's keys
/// text and valid), which takes a third of a second a megabyte; none: nobody did.
[[nodiscard]] std::vector<double> counted_floors(const std::filesystem::path& directory,
                                                 const nlohmann::json& text,
                                                 const nlohmann::json& valid);

}  // namespace switchyard::tool
