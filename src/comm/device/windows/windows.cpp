// The ranks tell each other where their memory is through a small host window, or ask NCCL.
#include "comm/device/windows/windows.hpp"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>

#include "comm/ranks/agreement.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/device_wide.hpp"
#include "core/gpu/memory_count.hpp"

namespace switchyard {
namespace {

constexpr std::size_t kGoodbyeBytes = sizeof(std::uint64_t);

class OwnStream {
 public:
  OwnStream() { SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

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
    // The number of another process's address, as it has told it.
    pointer = reinterpret_cast<std::byte*>(address.pointer);  // NOLINT(performance-no-int-to-ptr)
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

DeviceWindows::DeviceWindows(Communicator& communicator, std::size_t bytes, DeviceEngine engine)
    : own_rank_(communicator.rank()),
      goodbyes_((bytes + kGoodbyeBytes - 1) / kGoodbyeBytes * kGoodbyeBytes),
      parts_(static_cast<std::size_t>(communicator.size()), nullptr),
      opened_(static_cast<std::size_t>(communicator.size()), false) {
  SWITCHYARD_CUDA(cudaGetDevice(&device_));
  bytes = goodbyes_ + parts_.size() * kGoodbyeBytes;
  // NCCL has no windows for a rank that is alone, and none are needed.
  if (engine == DeviceEngine::kNcclPairs && communicator.size() > 1) {
    fail(ErrorCode::kUnsupported, "engine nccl-pairs has no windows");
  }
  if (engine == DeviceEngine::kNccl && communicator.size() > 1) {
    ask_nccl(communicator, bytes);
    return;
  }
  try {
    reach_peers(communicator, bytes);
  } catch (const Error& error) {
    release();
    // Thrown on all ranks alike: all of them go on to NCCL.
    if (engine == DeviceEngine::kPeer || error.code() != ErrorCode::kUnsupported) throw;
    try {
      ask_nccl(communicator, bytes);
    } catch (const Error& second) {
      fail(second.code(), "{}; by NCCL: {}", error.what(), second.what());
    }
  }
}

void DeviceWindows::ask_nccl(Communicator& communicator, std::size_t bytes) {
  nccl_ = std::make_unique<NcclWindows>(communicator, bytes);
  for (int rank = 0; rank < communicator.size(); ++rank) {
    parts_[static_cast<std::size_t>(rank)] = nccl_->part(rank);
  }
}

void DeviceWindows::reach_peers(Communicator& communicator, std::size_t bytes) {
  const int ranks = communicator.size();
  const auto window =
      communicator.create_window(static_cast<std::size_t>(ranks) * sizeof(Address), ranks);
  void* own = nullptr;
  SWITCHYARD_CUDA(cudaMalloc(&own, bytes));
  own_bytes_ = static_cast<std::int64_t>(bytes);
  DeviceMemoryCount::add(own_bytes_);
  parts_[static_cast<std::size_t>(own_rank_)] = static_cast<std::byte*>(own);
  SWITCHYARD_CUDA(cudaMemset(own, 0, bytes));
  SWITCHYARD_CUDA(wait_for_device());
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
    const Topology& topology = communicator.topology();
    if (topology.node[at] != topology.node[static_cast<std::size_t>(own_rank_)]) {
      trouble = fmt::format("{} cannot reach {}: peer access is for one node",
                            topology.place_of(own_rank_), topology.place_of(from));
      continue;
    }
    bool opened = false;
    trouble = reach(reinterpret_cast<const Address*>(window->local())[from], parts_[at], opened);
    opened_[at] = opened;
    if (!trouble.empty()) trouble = fmt::format("{}: {}", topology.place_of(from), trouble);
  }
  require_no_trouble(communicator, ErrorCode::kUnsupported, trouble);
}

void DeviceWindows::end(std::chrono::milliseconds limit) noexcept {
  int before = device_;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  try {
    SWITCHYARD_CUDA(wait_for_device());  // this rank's kernels have left, or will in time
    if (parts_.size() > 1) say_goodbye(limit);
  } catch (const std::exception&) {
    keep();
  }
  cudaSetDevice(before);
}

void DeviceWindows::say_goodbye(std::chrono::milliseconds limit) {
  // Not the default stream: another thread may be capturing one that waits for it.
  const OwnStream stream;
  const std::uint64_t ended = 1;
  for (std::byte* part : parts_) {
    SWITCHYARD_CUDA(
        cudaMemcpyAsync(part + goodbyes_ + static_cast<std::size_t>(own_rank_) * kGoodbyeBytes,
                        &ended, kGoodbyeBytes, cudaMemcpyDefault, stream.get()));
  }
  std::vector<std::uint64_t> seen(parts_.size(), 0);
  const auto last = std::chrono::steady_clock::now() + limit;
  for (;;) {
    SWITCHYARD_CUDA(cudaMemcpyAsync(seen.data(),
                                    parts_[static_cast<std::size_t>(own_rank_)] + goodbyes_,
                                    seen.size() * kGoodbyeBytes, cudaMemcpyDefault, stream.get()));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream.get()));
    if (std::all_of(seen.begin(), seen.end(), [](std::uint64_t word) { return word == 1; })) return;
    if (std::chrono::steady_clock::now() > last) break;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  keep();
}

void DeviceWindows::keep() {
  kept_ = true;
  if (nccl_) nccl_->keep();
}

DeviceWindows::~DeviceWindows() { release(); }

void DeviceWindows::release() noexcept {
  if (nccl_) return;  // its memory is its own
  for (std::size_t rank = 0; rank < parts_.size(); ++rank) {
    if (parts_[rank] == nullptr) continue;
    if (opened_[rank]) cudaIpcCloseMemHandle(parts_[rank]);
    if (static_cast<int>(rank) == own_rank_ && !kept_) {
      cudaFree(parts_[rank]);
      DeviceMemoryCount::add(-own_bytes_);
    }
    parts_[rank] = nullptr;
    opened_[rank] = false;
  }
}

}  // namespace switchyard
