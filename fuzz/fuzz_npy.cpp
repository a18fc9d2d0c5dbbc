// Any bytes are either refused, or an array whose shape and dtype account for the rest of the file.
#include <cstdint>
#include <cstdlib>
#include <span>

#include "checkpoint/files/npy.hpp"
#include "checkpoint/files/stored_type.hpp"
#include "switchyard/error.hpp"

using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::NpyArray;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    const NpyArray array = switchyard::parse_npy(bytes, "fuzz");
    const auto elements = switchyard::num_elements(array.shape);
    if (!elements ||
        *elements * size_of(array.dtype) != static_cast<std::int64_t>(array.bytes.size())) {
      std::abort();
    }
    unsigned sum = 0;
    for (const std::byte byte : array.bytes) sum += std::to_integer<unsigned>(byte);
    if (sum > 255U * size) std::abort();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBadFile) std::abort();
  }
  return 0;
}
