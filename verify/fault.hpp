#pragma once

#include <iosfwd>

#include "verify/verify.hpp"

namespace switchyard::verify {

/// One rank misbehaves in an exchange: it never comes ("absent"), comes late ("late"), throws
/// ("throw"), or sends a count that cannot be ("corrupt-count"). Every rank must leave within the
/// deadline with the right error, and after recover() the next exchange must be right.
int run_fault(const VerifyOptions& options, std::ostream& out);

}  // namespace switchyard::verify
