// The ranks tell each other where their memory is through a small host window.
#include "comm/device_windows.hpp"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "core/cuda_check.hpp"

namespace switchyard {
namespace {

struct Address {
  std::uint64_t process = 0;
  std::uint64_t pointer = 0;
  std::int64_t device = 0;
  cudaIpcMemHandle_t handle{};
};

/// The memory at `address` for the current device; "" or why not.
std::string reach(const Address& address, std::byte*& pointer, bool& opened) {
  if (address.process == static_cast<std::uint64_t>(getpid())) {
    int device = 0;
    SWITCHYARD_CUDA(cudaGetDevice(&device));
    if (device != address.device) {
      const cudaError_t status = cudaDeviceEnablePeerAccess(static_cast<int>(address.device), 0);
      if (status != cudaSuccess && status != cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
        return fmt::format("device {} cannot reach device {}: {}", device, address.device,
                           cudaGetErrorString(status));
      }
      cudaGetLastError();  // of a pair that is enabled already
    }
    pointer = reinterpret_cast<std::byte*>(address.pointer);
    return "";
  }
  void* mapped = nullptr;
  const cudaError_t status =
      cudaIpcOpenMemHandle(&mapped, address.handle, cudaIpcMemLazyEnablePeerAccess);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return fmt::format("memory of process {} cannot be opened: {}", address.process,
                       cudaGetErrorString(status));
  }
  pointer = static_cast<std::byte*>(mapped);
  opened = true;
  return "";
}

}  // namespace

DeviceWindows::DeviceWindows(Communicator& communicator, std::size_t bytes)
    : own_rank_(communicator.rank()),
      parts_(static_cast<std::size_t>(communicator.size()), nullptr),
      opened_(static_cast<std::size_t>(communicator.size()), false) {
  const int ranks = communicator.size();
  const auto window = communicator.create_window(
      static_cast<std::size_t>(ranks) * (sizeof(Address) + 8), 2 * ranks);
  void* own = nullptr;
  SWITCHYARD_CUDA(cudaMalloc(&own, bytes));
  parts_[static_cast<std::size_t>(own_rank_)] = static_cast<std::byte*>(own);
  SWITCHYARD_CUDA(cudaMemset(own, 0, bytes));
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  Address address;
  int device = 0;
  SWITCHYARD_CUDA(cudaGetDevice(&device));
  address.process = static_cast<std::uint64_t>(getpid());
  address.pointer = reinterpret_cast<std::uint64_t>(own);
  address.device = device;
  // Some containers have no IPC; within one process none is needed.
  if (cudaIpcGetMemHandle(&address.handle, own) != cudaSuccess) cudaGetLastError();
  const std::size_t slot = static_cast<std::size_t>(own_rank_) * sizeof(Address);
  for (int to = 0; to < ranks; ++to) {
    window->put(to, slot, &address, sizeof(address));
    window->signal(to, own_rank_, 1);
  }
  std::string trouble;
  for (int from = 0; from < ranks; ++from) {
    window->wait(from, 1, {.phase = "device memory", .rank = from});
    if (from == own_rank_ || !trouble.empty()) continue;
    const auto at = static_cast<std::size_t>(from);
    bool opened = false;
    trouble = reach(reinterpret_cast<const Address*>(window->local())[from], parts_[at], opened);
    opened_[at] = opened;
  }
  // All fail together: 1 is fine, 2 is not.
  for (int to = 0; to < ranks; ++to) window->signal(to, ranks + own_rank_, trouble.empty() ? 1 : 2);
  for (int from = 0; from < ranks; ++from) {
    const std::uint64_t seen =
        window->wait(ranks + from, 1, {.phase = "device memory", .rank = from});
    if (seen == 2 && trouble.empty())
      trouble = fmt::format("rank {} cannot reach all others", from);
  }
  communicator.barrier("device memory");
  if (!trouble.empty()) fail(ErrorCode::kUnsupported, "{}", trouble);
}

DeviceWindows::~DeviceWindows() {
  for (std::size_t rank = 0; rank < parts_.size(); ++rank) {
    if (parts_[rank] == nullptr) continue;
    if (opened_[rank]) cudaIpcCloseMemHandle(parts_[rank]);
    if (static_cast<int>(rank) == own_rank_ && !kept_) cudaFree(parts_[rank]);
  }
}

}  // namespace switchyard
