#include "switchyard/error.hpp"

#include "core/printable.hpp"

namespace switchyard {

const char* to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "invalid argument";
    case ErrorCode::kUnsupported: return "unsupported";
    case ErrorCode::kBadFile: return "bad file";
    case ErrorCode::kIo: return "input/output error";
    case ErrorCode::kOutOfMemory: return "out of memory";
    case ErrorCode::kDevice: return "device error";
    case ErrorCode::kTimeout: return "timeout";
    case ErrorCode::kCommunication: return "communication error";
  }
  return "unknown error";
}

Error::Error(ErrorCode code, const std::string& message)
    : std::runtime_error(printable(std::string(to_string(code)) + ": " + message, kPrintableLine)),
      code_(code) {}

}  // namespace switchyard
