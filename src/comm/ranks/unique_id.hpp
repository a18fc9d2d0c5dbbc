#pragma once

#include <string>

#include "comm/ranks/deadline.hpp"

namespace switchyard {

inline constexpr std::size_t kUniqueIdDigits = 32;

/// Hexadecimal digits that name one meeting of processes.
[[nodiscard]] std::string make_unique_id();
[[nodiscard]] bool is_unique_id(const std::string& text);

/// The same id for all ranks that name the same file: rank 0 makes it and writes the file, the
/// others wait for it. A file that a process which is gone has left behind does not count.
/// @throws Error{kTimeout}; {kInvalidArgument}: rank 0 finds the file of a process that still runs,
/// or the path names something that is not a regular file; {kIo}: rank 0 cannot write it.
[[nodiscard]] std::string unique_id_by_file(const std::string& path, int rank, Deadline deadline);

}  // namespace switchyard
