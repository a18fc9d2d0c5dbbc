#pragma once

#include <iosfwd>

#include "verify/verify.hpp"

namespace switchyard::verify {

/// VerifyOptions::soak exchanges in one process over 24 shapes that take turns, each result
/// compared bit by bit; no rank may take more memory at the end than after the first tenth.
/// @returns 0: all holds; 1: a wrong bit, or memory has grown.
int run_soak(const VerifyOptions& options, std::ostream& out);

}  // namespace switchyard::verify
