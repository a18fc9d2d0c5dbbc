#pragma once

#include <string>

#include "switchyard/error.hpp"

namespace switchyard::tool {

/// " (rank 3)" under a launcher, which mixes the lines of all.
[[nodiscard]] std::string rank_words();

/// Says it on stderr behind what was printed, in one line, whatever a library's message has in it.
/// @returns exit_code.
int report_error(std::string message, int exit_code);

/// Wrong arguments and bad files are the user's to mend; the rest happened at run time.
[[nodiscard]] int exit_code_of(ErrorCode code);

}  // namespace switchyard::tool
