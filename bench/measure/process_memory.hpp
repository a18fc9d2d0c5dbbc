#pragma once

#include <cstdint>

namespace switchyard::bench {

// Memory of this process that is resident, anonymous and mapped pages of files, in bytes; 0 where
// the system does not say.
[[nodiscard]] std::int64_t resident_bytes();
/// The most since the process began, or since forget_peak().
[[nodiscard]] std::int64_t peak_resident_bytes();
void forget_peak();
/// Gives back to the system what has been freed, where the C library can.
void return_freed_memory();

}  // namespace switchyard::bench
