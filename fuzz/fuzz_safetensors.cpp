// Any bytes are either refused, or tensors that lie inside the file, one after the other.
#include <cstdint>
#include <cstdlib>
#include <span>

#include "checkpoint/files/safetensors.hpp"
#include "switchyard/error.hpp"

using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::StoredTensor;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    unsigned sum = 0;
    std::size_t covered = 0;
    for (const StoredTensor& tensor : switchyard::parse_safetensors(bytes, "fuzz")) {
      if (tensor.spec.num_bytes() != static_cast<std::int64_t>(tensor.bytes.size())) std::abort();
      for (const std::byte byte : tensor.bytes) sum += std::to_integer<unsigned>(byte);
      covered += tensor.bytes.size();
    }
    if (covered > size || sum > 255U * size) std::abort();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBadFile) std::abort();
  }
  return 0;
}
