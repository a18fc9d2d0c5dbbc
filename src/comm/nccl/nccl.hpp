#pragma once

#include <string>

namespace switchyard {

/// Why NCCL cannot be used here, or "" if it can.
[[nodiscard]] std::string nccl_missing();
/// Why NCCL's windows cannot be, or "": the library may be too old for its device API.
[[nodiscard]] std::string nccl_windows_missing();
/// Version and file of the library, or "".
[[nodiscard]] std::string nccl_description();

}  // namespace switchyard
