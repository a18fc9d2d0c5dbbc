// Windows for GPUs of one NVLink domain by NCCL: its memory, its registration, and the peers'
// addresses, which our kernels then write to as to any other's. No barrier, no multicast and no
// network of NCCL is asked for.
#include "comm/nccl/windows/windows.hpp"

#include <cuda_runtime_api.h>

#include <array>
#include <optional>
#include <string>

#include "comm/device/exchange.hpp"
#include "comm/nccl/nccl.hpp"
#include "comm/nccl/rank.hpp"
#include "comm/nccl/windows/pointers.hpp"
#include "comm/ranks/agreement.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/device_wide.hpp"

namespace switchyard {
namespace {

/// NCCL sees where its memory ends by CUDA's allocations, which are multiples of this.
constexpr std::size_t kGranularity = std::size_t{2} << 20;

/// What NCCL has made; a call that is left behind may still write it.
struct Made {
  void* memory = nullptr;
  ncclWindow_t window = nullptr;
  ncclDevComm_t device_comm{};
  bool has_device_comm = false;
};

}  // namespace

struct NcclWindows::State {
  State(Communicator& comm, std::size_t bytes) {
    require_no_trouble(comm, ErrorCode::kUnsupported, nccl_windows_missing());
    // Windows cannot be registered on a communicator that does not block: in 2.28 the registration
    // asks it for something while it is under way.
    rank.emplace(comm, NcclWaits::kOnThread);
    const std::size_t size = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    try {
      const NcclLibrary& nccl = rank->nccl();
      const ncclResult_t status = nccl.mem_alloc(&made->memory, size);
      require_no_trouble(comm, ErrorCode::kOutOfMemory,
                         status == ncclSuccess ? ""
                                               : fmt::format("NCCL: {} bytes: {}", size,
                                                             nccl.get_error_string(status)));
      SWITCHYARD_CUDA(cudaMemset(made->memory, 0, size));
      SWITCHYARD_CUDA(wait_for_device());
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
    const NcclLibrary& nccl = rank->nccl();
    try {
      if (nccl.get_peer_device_pointer == nullptr) {
        // Fails where there is no symmetric memory, which registration, there, does not.
        rank->call("device API", [&nccl, comm = rank->get(), made = made] {
          const ncclDevCommRequirements_t requirements{};
          return nccl.dev_comm_create(comm, &requirements, &made->device_comm);
        });
        made->has_device_comm = true;
      }
      rank->call("window", [&nccl, comm = rank->get(), made = made, size] {
        return nccl.comm_window_register(comm, made->memory, size, &made->window,
                                         NCCL_WIN_COLL_SYMMETRIC);
      });
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kTimeout) throw;
      return error.what();
    }
    return made->window == nullptr ? "NCCL has no symmetric memory between these GPUs" : "";
  }

  std::string find_parts(const Communicator& comm) {
    const NcclLibrary& nccl = rank->nccl();
    if (nccl.get_peer_device_pointer == nullptr) {
      read_peer_pointers(made->window, comm.size(), parts.data());
    }
    for (int peer = 0; peer < comm.size(); ++peer) {
      std::byte*& part = parts[static_cast<std::size_t>(peer)];
      if (nccl.get_peer_device_pointer != nullptr) {
        void* address = nullptr;
        const ncclResult_t status = nccl.get_peer_device_pointer(made->window, 0, peer, &address);
        if (status != ncclSuccess) {
          return fmt::format("NCCL: address of rank {}: {}", peer, nccl.get_error_string(status));
        }
        part = static_cast<std::byte*>(address);
      }
      if (part == nullptr) {
        return fmt::format("{} is in another NVLink domain", comm.topology().place_of(peer));
      }
    }
    return "";
  }

  void release() noexcept {
    if (!rank) return;
    try {
      if (!kept && !rank->abandoned()) {
        rank->call("end", [&nccl = rank->nccl(), comm = rank->get(), made = made] {
          if (made->window != nullptr) nccl.comm_window_deregister(comm, made->window);
          if (made->has_device_comm) nccl.dev_comm_destroy(comm, &made->device_comm);
          if (made->memory != nullptr) nccl.mem_free(made->memory);
          return ncclSuccess;
        });
      }
    } catch (const std::exception&) {
      kept = true;
    }
    if (kept) rank->abandon();  // what others may still write to stays
    rank.reset();
  }

  std::optional<NcclRank> rank;
  std::shared_ptr<Made> made = std::make_shared<Made>();
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
