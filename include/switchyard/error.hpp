#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace switchyard {

/// What went wrong, so that a caller can react without reading the message.
enum class ErrorCode : std::uint8_t {
  kInvalidArgument,  ///< A shape, dtype, value or option disagrees with the contract of the call.
  kUnsupported,      ///< The contract holds, but no implementation here can run it.
  kBadFile,      ///< A file is malformed, truncated or lacks what is needed; the message names it.
  kIo,           ///< The operating system refused to read or write; the message names the file.
  kOutOfMemory,  ///< Host or device memory is exhausted; the message says how much was asked for.
  kDevice,       ///< A device call failed; the message has its name and text.
  kTimeout,      ///< A rank did not arrive in time; the message names phase, rank, expected, seen.
  kCommunication,  ///< Ranks disagree, or the engine between them failed.
};

/// "invalid argument", "timeout", ...: the words that open every message of that code.
[[nodiscard]] const char* to_string(ErrorCode code) noexcept;

/// The only exception type the library throws. `what()` is one line, in the words of the user.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message);

  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace switchyard
