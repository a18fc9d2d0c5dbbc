#pragma once

#include <fmt/core.h>

#include <filesystem>
#include <string>
#include <utility>

#include "core/printable.hpp"
#include "switchyard/error.hpp"

namespace switchyard {

/// Throws Error{kBadFile}: the file's name, then what is wrong with it. Names come from the file
/// and are made printable.
template <typename... Args>
[[noreturn]] void bad_file(const std::string& file, fmt::format_string<Args...> format,
                           Args&&... args) {
  throw Error(ErrorCode::kBadFile,
              printable_message("{}: ", file) + printable_message(format, args...));
}

/// The same when `holds` is false.
template <typename... Args>
void require_file(bool holds, const std::string& file, fmt::format_string<Args...> format,
                  Args&&... args) {
  if (!holds) bad_file(file, format, std::forward<Args>(args)...);
}

}  // namespace switchyard
