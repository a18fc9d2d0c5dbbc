// Memory on either side.
#include "bench/measure/stage_memory.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

#ifdef SWITCHYARD_WITH_CUDA
#include "core/gpu/device_buffer.hpp"
#include "core/gpu/memory_count.hpp"
#endif

namespace switchyard::bench {

struct StageMemory::Blocks {
  std::vector<std::vector<std::byte>> host{};
#ifdef SWITCHYARD_WITH_CUDA
  std::vector<DeviceBuffer> device{};
#endif
};

StageMemory::StageMemory(Backend backend)
    : backend_(backend), blocks_(std::make_unique<Blocks>()) {}

StageMemory::~StageMemory() = default;

std::byte* StageMemory::make(std::int64_t bytes) {
  bytes_ += bytes;
#ifdef SWITCHYARD_WITH_CUDA
  if (backend_ == Backend::kCuda) {
    return blocks_->device.emplace_back().reserve(std::max<std::int64_t>(bytes, 1));
  }
#endif
  constexpr std::size_t kLine = 64;
  auto& block = blocks_->host.emplace_back(static_cast<std::size_t>(bytes) + kLine);
  void* first = block.data();
  std::size_t room = block.size();
  return static_cast<std::byte*>(std::align(kLine, room - kLine, first, room));
}

const std::byte* StageMemory::place(const void* host, std::int64_t bytes) {
  if (backend_ == Backend::kCpu || host == nullptr || bytes == 0) {
    return static_cast<const std::byte*>(host);
  }
  std::byte* const memory = make(bytes);
#ifdef SWITCHYARD_WITH_CUDA
  SWITCHYARD_CUDA(
      cudaMemcpy(memory, host, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice));
#endif
  return memory;
}

void StageMemory::put(void* to, const void* host, std::int64_t bytes) const {
  if (bytes == 0 || to == host) return;
#ifdef SWITCHYARD_WITH_CUDA
  if (backend_ == Backend::kCuda) {
    SWITCHYARD_CUDA(cudaMemcpy(to, host, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice));
    return;
  }
#endif
  std::memcpy(to, host, static_cast<std::size_t>(bytes));
}

void StageMemory::fetch(void* host, const std::byte* from, std::int64_t bytes) const {
  if (bytes == 0) return;
#ifdef SWITCHYARD_WITH_CUDA
  if (backend_ == Backend::kCuda) {
    SWITCHYARD_CUDA(cudaDeviceSynchronize());  // a copy does not wait for streams of other kinds
    SWITCHYARD_CUDA(
        cudaMemcpy(host, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost));
    return;
  }
#endif
  std::memcpy(host, from, static_cast<std::size_t>(bytes));
}

#ifdef SWITCHYARD_WITH_CUDA
std::int64_t device_bytes() { return DeviceMemoryCount::now(); }
std::int64_t peak_device_bytes() { return DeviceMemoryCount::most(); }
void forget_device_peak() { DeviceMemoryCount::forget_most(); }
#else
std::int64_t device_bytes() { return 0; }
std::int64_t peak_device_bytes() { return 0; }
void forget_device_peak() {}
#endif

}  // namespace switchyard::bench
