#pragma once

// evaluate of a model that transformers' families describe, from its own files.

#include <filesystem>

#include "tool/options/options.hpp"

namespace switchyard::tool {

/// @param directory  As models::model_directory() gives it, and models::is_released().
[[nodiscard]] int evaluate_released(const Options& options, const std::filesystem::path& directory);

}  // namespace switchyard::tool
