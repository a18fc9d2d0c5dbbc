#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "switchyard/comm.hpp"
#include "switchyard/error.hpp"

namespace switchyard {

/// A value that must be the same on all ranks.
struct AgreedValue {
  const char* name;
  std::int64_t value = 0;
  const char* (*text)(std::int64_t) = nullptr;  ///< How to print it; null: as a number.
};

/// Collective: compares the values over the ranks.
/// @throws Error{kCommunication} on every rank if any two differ: which values, whose; {kTimeout}.
void require_agreement(Communicator& communicator, std::span<const AgreedValue> values);

/// Collective: a step that each rank has taken by itself fails on all of them or on none. `trouble`
/// is "" or why it has failed here.
/// @throws Error{code} on every rank if any has trouble; {kTimeout}.
void require_no_trouble(Communicator& communicator, ErrorCode code, const std::string& trouble);

}  // namespace switchyard
