// What /proc says of this process.
#include "bench/measure/process_memory.hpp"

#include <fstream>
#include <string>
#include <string_view>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace switchyard::bench {
namespace {

std::int64_t status_bytes(std::string_view key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key)) return std::stoll(line.substr(key.size())) * 1024;
  }
  return 0;
}

}  // namespace

std::int64_t resident_bytes() { return status_bytes("VmRSS:"); }

std::int64_t peak_resident_bytes() { return status_bytes("VmHWM:"); }

void return_freed_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

void forget_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

}  // namespace switchyard::bench
