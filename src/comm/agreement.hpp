#pragma once

#include <cstdint>
#include <span>

#include "switchyard/comm.hpp"

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

}  // namespace switchyard
