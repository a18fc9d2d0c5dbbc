// Whatever is in the file that names a meeting, a rank takes an id from it or waits to the end.
#include <chrono>
#include <cstdint>
#include <cstdlib>

#include "comm/ranks/unique_id.hpp"
#include "fuzz/scratch_folder.hpp"
#include "switchyard/error.hpp"

using switchyard::Error;
using switchyard::ErrorCode;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string path = switchyard::fuzz::write_scratch("id", data, size);
  try {
    const auto now = std::chrono::steady_clock::now();
    if (!switchyard::is_unique_id(switchyard::unique_id_by_file(path, 1, now))) std::abort();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kTimeout) std::abort();
  }
  return 0;
}
