// What machine this is, from /proc and /sys.
#include "bench/measure/machine.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "commit.hpp"
#include "switchyard/cpu_isa.hpp"
#include "switchyard/device.hpp"

namespace switchyard::bench {
namespace {

std::string first_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// The number that a text starts with, or 0.
std::int64_t number_of(const std::string& text) {
  std::int64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::vector<Cache> cpu_caches() {
  std::vector<Cache> caches;
  const std::filesystem::path root = "/sys/devices/system/cpu/cpu0/cache";
  for (int index = 0; index < 8; ++index) {
    const auto folder = root / fmt::format("index{}", index);
    const std::string size = first_line(folder / "size");  // "512K"
    if (size.empty()) break;
    const std::int64_t unit = size.back() == 'M' ? 1 << 20 : size.back() == 'K' ? 1 << 10 : 1;
    caches.push_back({.level = static_cast<int>(number_of(first_line(folder / "level"))),
                      .type = first_line(folder / "type"),
                      .bytes = number_of(size) * unit});
  }
  return caches;
}

}  // namespace

Machine this_machine() {
  const Gpus gpus = find_gpus();
  const Gpu gpu = gpus.missing.empty() ? gpus.list.front() : Gpu{};
  return {.cpu = cpu_model(),
          .cores = static_cast<int>(std::thread::hardware_concurrency()),
          .isa = to_string(isa_in_use()),
          .caches = cpu_caches(),
          .memory_bytes = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE),
          .gpu = gpu.name,
          .driver = gpus.driver,
          .gpu_l2_bytes = gpu.l2_bytes,
          .gpu_memory_bytes = gpu.memory_bytes};
}

std::int64_t Machine::largest_cache(Backend backend) const {
  std::int64_t bytes = backend == Backend::kCuda ? gpu_l2_bytes : 0;
  if (backend == Backend::kCpu) {
    for (const Cache& cache : caches) bytes = std::max(bytes, cache.bytes);
  }
  return bytes > 0 ? bytes : 32 << 20;  // where the system does not say
}

std::string build_commit() { return SWITCHYARD_COMMIT; }

nlohmann::json versions() {
  return {{"switchyard", SWITCHYARD_VERSION},
          {"compiler", SWITCHYARD_COMPILER},
          {"build", SWITCHYARD_BUILD_TYPE},
          {"fmt", FMT_VERSION}};
}

}  // namespace switchyard::bench
