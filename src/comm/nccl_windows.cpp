// Windows for GPUs of one NVLink domain by NCCL: its memory, its registration, and the peers'
// addresses, which our kernels then write to as to any other's. No barrier, no multicast and no
// network of NCCL is asked for.
#include "comm/nccl_windows.hpp"

#include <cuda_runtime_api.h>

#include <array>
#include <optional>
#include <string>

#include "comm/agreement.hpp"
#include "comm/device_exchange.hpp"
#include "comm/nccl.hpp"
#include "comm/nccl_pointers.hpp"
#include "comm/nccl_rank.hpp"
#include "core/check.hpp"
#include "core/cuda_check.hpp"

namespace switchyard {
namespace {

/// NCCL sees where its memory ends by CUDA's allocations, which are multiples of this.
constexpr std::size_t kGranularity = std::size_t{2} << 20;

}  // namespace

struct NcclWindows::State {
  State(Communicator& comm, std::size_t bytes) {
    require_no_trouble(comm, ErrorCode::kUnsupported, nccl_windows_missing());
    rank.emplace(comm);
    const std::size_t size = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    try {
      const NcclLibrary& nccl = rank->library();
      const ncclResult_t status = nccl.mem_alloc(&memory, size);
      require_no_trouble(comm, ErrorCode::kOutOfMemory,
                         status == ncclSuccess ? ""
                                               : fmt::format("NCCL: {} bytes: {}", size,
                                                             nccl.get_error_string(status)));
      SWITCHYARD_CUDA(cudaMemset(memory, 0, size));
      SWITCHYARD_CUDA(cudaDeviceSynchronize());
      require_no_trouble(comm, ErrorCode::kUnsupported, register_window(size));
      require_no_trouble(comm, ErrorCode::kUnsupported, find_parts(comm));
    } catch (...) {
      release();
      throw;
    }
  }
  ~State() { release(); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  /// "" or what NCCL says: without peer access among all ranks it has no symmetric memory.
  std::string register_window(std::size_t size) {
    const NcclLibrary& nccl = rank->library();
    try {
      if (nccl.get_peer_device_pointer == nullptr) {
        // Fails where there is no symmetric memory, which registration, there, does not.
        const ncclDevCommRequirements_t requirements{};
        rank->finish(nccl.dev_comm_create(rank->get(), &requirements, &device_comm), "device API");
        has_device_comm = true;
      }
      rank->finish(
          nccl.comm_window_register(rank->get(), memory, size, &window, NCCL_WIN_COLL_SYMMETRIC),
          "window");
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kTimeout) throw;
      return error.what();
    }
    return window == nullptr ? "NCCL has no symmetric memory between these GPUs" : "";
  }

  std::string find_parts(const Communicator& comm) {
    const NcclLibrary& nccl = rank->library();
    if (nccl.get_peer_device_pointer == nullptr) {
      read_peer_pointers(window, comm.size(), parts.data());
    }
    for (int peer = 0; peer < comm.size(); ++peer) {
      std::byte*& part = parts[static_cast<std::size_t>(peer)];
      if (nccl.get_peer_device_pointer != nullptr) {
        void* address = nullptr;
        const ncclResult_t status = nccl.get_peer_device_pointer(window, 0, peer, &address);
        if (status != ncclSuccess) {
          return fmt::format("NCCL: address of rank {}: {}", peer, nccl.get_error_string(status));
        }
        part = static_cast<std::byte*>(address);
      }
      if (part == nullptr) return fmt::format("rank {} is in another NVLink domain", peer);
    }
    return "";
  }

  void end(ncclResult_t status) noexcept {
    try {
      rank->finish(status, "end");
    } catch (const std::exception&) {
      kept = true;  // the communicator is given up with what it holds
      rank->abandon();
    }
  }

  void release() noexcept {
    if (!rank) return;
    const NcclLibrary& nccl = rank->library();
    if (kept) {
      rank->abandon();  // what others may still write to stays
    } else {
      if (window != nullptr) end(nccl.comm_window_deregister(rank->get(), window));
      if (has_device_comm) end(nccl.dev_comm_destroy(rank->get(), &device_comm));
      if (memory != nullptr) nccl.mem_free(memory);
    }
    window = nullptr;
    memory = nullptr;
    has_device_comm = false;
    rank.reset();
  }

  std::optional<NcclRank> rank;
  void* memory = nullptr;
  ncclWindow_t window = nullptr;
  ncclDevComm_t device_comm{};
  bool has_device_comm = false;
  bool kept = false;
  std::array<std::byte*, kMaxDeviceRanks> parts{};
};

NcclWindows::NcclWindows(Communicator& communicator, std::size_t bytes)
    : state_(std::make_unique<State>(communicator, bytes)) {}
NcclWindows::~NcclWindows() = default;

void NcclWindows::keep() { state_->kept = true; }

std::byte* NcclWindows::part(int rank) const {
  return state_->parts[static_cast<std::size_t>(rank)];
}

void NcclWindows::check() const { state_->rank->check(); }

}  // namespace switchyard
